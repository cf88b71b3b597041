# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 14 · SLURM and multi-node
#
# So far all ranks were on one machine, and it was yours. A cluster is shared by many people: you ask for machines in
# writing, you wait, and then your program starts on computers that you have never seen. The program that most clusters
# use to decide whose jobs run where and when is called **SLURM**. In this lesson you write the script that asks, submit
# it to a real SLURM, let a job outlive its time limit, and find out why a job on several nodes does not start, hangs,
# or is slow.
#
# ## Goals
#
# - say what starts what, from `sbatch` to the last rank, and on which node;
# - find your way on a cluster that you see for the first time;
# - write a batch script from an empty cell, and let it save and go on when its time is up;
# - predict what the second node adds to a step, and measure it;
# - get from the symptom of a failed job to its cause.
#
# **Time**: 162 minutes, and 20 more for what is optional. Good places for a break are after sections 2, 3 and 5.
# **Needs**: lesson 01 (sections 1 and 8), lesson 04 (section 1). For section 4 also lesson 01 (section 3).
#
# In the first cell `replace`, from Python itself, is a function that copies a configuration with some values changed.

# %%
import re
from dataclasses import replace
from pathlib import Path

from course.lab import check, compare, plot
from course.labs import l14_cluster
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import load

lab = l14_cluster.open_lab("lesson14")

# %% [markdown]
# This is a real SLURM on your machine, with three **nodes**, as the machines of a cluster are called. Each node has its
# own host name, network and processes; only the hardware is shared. The cluster needs Linux and a few Debian packages.
# If they are missing, the cell above says which; then the commands below are shown and not run, and your own scripts
# run on this machine without SLURM.

# %% [markdown]
# ## 1. What a job is (core, 22 min)
#
# You log in to the **login node**, which is not for computing; here it is called `head`. There you submit a **job**: a
# request (how many nodes, for how long) together with a script. SLURM puts the job into a queue. When enough nodes are
# free, it starts the script **once, on the first node of the job**. The other nodes are reserved for you, but nothing
# runs on them.
#
# To use them, the script calls `srun`, which starts a command on all nodes of the job, as often as there are **tasks**.
# Each task gets a number, `SLURM_PROCID`. If the tasks train a model together, that number is the rank.

# %% tags=["figure"]
plot.launch_chain(nodes=2, ranks_per_node=2, launcher="srun", caption="14.srun")

# %% [markdown]
# The request is in the script itself, in lines that begin with `#SBATCH`. For bash they are comments; for `sbatch`, the
# command that submits a job, they are options, called **directives**. Here is a small script.

# %%
FIRST = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=5
#SBATCH --output=runs/%x-%j.log
echo "the script runs on $(hostname)"
srun bash -c 'echo "task $SLURM_PROCID runs on $(hostname)"' | sort
"""
Path("runs/first.sbatch").write_text(FIRST)
print(FIRST)

# %% [markdown]
# It asks for two nodes with two tasks on each, for at most five minutes, and names the file that its output goes to:
# `%x` stands for the name of the job and `%j` for its number.
#
# **Predict.** How many lines does the `echo` of the script print? How many lines do the tasks of `srun` print?

# %% tags=["predict"]
lines_of_the_script = 1
lines_of_the_tasks = 2 * 2

# %%
lab.sh("sinfo")
log = lab.batch("runs/first.sbatch")
if log:
    from_script = log.count("the script runs")
    from_tasks = log.count("task ")
    compare("the script", lines_of_the_script, from_script, within=1, found="counted")
    compare("the tasks", lines_of_the_tasks, from_tasks, within=1, found="counted")

# %% [markdown]
# `sinfo` lists the nodes and their state. They belong to a **partition**, a queue with limits of its own; this one is
# called `debug`. The two counts show a common mistake of the first week: a training run that is started without `srun`
# stays on one node, while the others idle and are paid for.
#
# Now let us fill the queue. Jobs start in the order of their priority, here in the order of submission. But a later job
# may overtake a waiting one, if this does not delay it. SLURM can decide that, because each job has a time limit and is
# killed when it reaches it.
#
# Three jobs are submitted, one after the other. The first and the second want two nodes for ten minutes each, and the
# third wants one node for one minute. The cluster has three nodes. (`--exclusive` lets no other job onto the nodes of
# this one, and `--wrap` takes a command instead of a script: here one that only sleeps.)
#
# **Predict.** How many of the three jobs run at once?

# %% tags=["predict"]
running_jobs = 2  # the first, and the third, which delays nobody

# %%
REQUESTS = {"first": (2, 10, 600), "second": (2, 10, 600), "third": (1, 1, 50)}
for name, (nodes, minutes, seconds) in REQUESTS.items():
    lab.sh(
        "sbatch", f"--job-name={name}", f"--nodes={nodes}", f"--time={minutes}",
        "--exclusive", "--output=/dev/null", "--wrap", f"sleep {seconds}",
    )

def has_overtaken():
    queue = {job.name: job for job in lab.client.queue()}
    third_runs = "third" in queue and queue["third"].state == "RUNNING"
    return third_runs and "Resources" in queue["second"].where

lab.until(has_overtaken)
print()
lab.sh("squeue", "--sort=i", "--format=%.5i %.8j %.8T %.5D %R")
if lab.said:
    running = lab.said.count("RUNNING")
    compare("jobs that run", running_jobs, running, within=1, found="counted")
lab.sh("scancel", "--me")
lab.sh("squeue", "--me", "--noheader")

# %% [markdown]
# The last column says where a job runs, or in brackets why it waits. The second job waits for `Resources`, that is for
# nodes. The third has overtaken it: it will end long before the first one, for which the second has to wait. This is
# called **backfill**, and it is why a short but honest time limit makes you wait less. Finally `scancel --me` cancels
# all of your jobs, as `scancel -u $USER` does. The last `squeue` finds none, or jobs that are completing (`CG`).
#
# **Day one.** A script is for what you know to work. Until then you want nodes right away, and to see what happens on
# them. `salloc` asks for nodes as `sbatch` does, waits for them, and then runs a command, or without one a shell, in
# which each `srun` uses these nodes. When the command or the shell ends, the nodes are free again. `srun` outside of a
# job asks for nodes by itself, and with `--pty` it connects your terminal to the task: `srun --pty bash` is a shell on
# a node. Instead of `bash` we start `tty`, which prints the terminal that it has. (A notebook has none, so the program
# `script` lends it one.)

# %%
lab.sh("sinfo", "--noheader", "--format=%P: %D nodes of %c CPUs, %m MB and %G")
lab.sh(
    "salloc", "--nodes=2", "--ntasks-per-node=2", "--time=5",
    "srun", "--label", "hostname",
)
lab.sh("script", "-q", "--echo=never", "-c", "srun --time=5 --pty tty", "/dev/null")
lab.sh("squeue", "--states=all", "--sort=i", "--format=%.5i %.8j %.10T %.6M %R")

# %% [markdown]
# `salloc` runs its command where you are, on the login node, and only what follows `srun` runs on the nodes. (Some
# sites set `salloc` up to give you a shell on the first node instead.) With `--states=all` `squeue` also lists the jobs
# that ended in the last minutes, here all that this section has started.
#
# These are the commands of the first day, to come back to. The last column says what this section has run.
#
# | you want | you type | run above |
# |---|---|---|
# | to know what there is | `sinfo`; one node: `scontrol show node n1` | the first |
# | to see your jobs; when they may start | `squeue --me`; `squeue --me --start` | `squeue` |
# | nodes for an hour, to try things | `salloc --nodes=2 --gpus-per-node=8 --time=1:00:00` | without GPUs |
# | a shell on a node; in a job that runs already | `srun --pty bash`; `srun --jobid=1234 --overlap --pty bash` | the first |
# | to end a job; all of yours | `scancel 1234`; `scancel --me` | the second |
# | to see what the GPUs of a job do | `srun --jobid=1234 --overlap nvidia-smi` | no |
# | how a job ended, how long it took, how much memory | `sacct -j 1234 -o JobID,State,ExitCode,Elapsed,MaxRSS` | no |
# | the same as a fraction of what was asked for | `seff 1234` | no |
# | one job after another; the same script ten times | `sbatch --dependency=afterok:1234 next.sbatch`; `sbatch --array=0-9 job.sbatch` | no |
# | to run in a container, with pyxis | `srun --container-image=nvcr.io#nvidia/pytorch:25.09-py3 --container-mounts=$PWD python train.py` | no |
# | to run in a container, with Apptainer | `srun apptainer exec --nv --bind $PWD image.sif python train.py` | no |
# | to run in a container, with shifter (NERSC) | `srun shifter --image=nersc/pytorch:24.08.01 python train.py` | no |
# | nodes that are reserved for a course | `sbatch --reservation=NAME job.sbatch`, often with `--account=NAME` | no |
#
# `sacct` and `seff` read a database of past jobs, which ours does not have; `seff` is an extra that a site may leave
# out, and so are pyxis, a plugin of SLURM, and Apptainer. A **container** brings the libraries of a program along. It
# may not see the folders of the node, so name those you use; `--nv` lets an Apptainer container see the GPUs.
#
# **Takeaway: a job is a request and a script. The script runs once, on the first node, and only `srun` reaches the
# others.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Ask before the figure: where does the line `pip install` of a batch script take effect? (On the
# first node only, unless the file system is shared.) Many predict that all three jobs wait in order. Ask then who is
# harmed if the third job runs longer than it said. (Nobody: SLURM kills it after its minute.)

# %% [markdown]
# ## 2. The script, line by line (core, 47 min)
#
# There are two usual ways to start the ranks. In the figure of section 1, `srun` starts each rank. In the other way,
# `srun` starts one **torchrun** on each node, and torchrun starts the ranks of its node.

# %% tags=["figure"]
plot.launch_chain(nodes=2, ranks_per_node=2, launcher="torchrun", caption="14.torchrun")

# %% [markdown]
# labcode writes such scripts. A `Job` says what to run, a **site profile** says what the cluster requires, and `render`
# makes a script from both. We read a script of the torchrun kind now; you will write one of the other kind.

# %% tags=["nbval-check-output"]
job = Job(
    "gpt_tiny", ("--train.global_batch", "24"),
    nodes=3, ranks_per_node=2, minutes=30, name="three-nodes", requeue=False,
)
script = render(job, load("local"))
head, body = script.split("set -euo pipefail")
print(head)

# %% [markdown]
# What follows a ` #` in a directive is a comment.
#
# - `--ntasks-per-node=1`: the task of a node is torchrun. So the two CPUs of `--cpus-per-task=2` are for both ranks
#   that it starts.
# - `--gpus-per-node=2`: one GPU for each rank. (The GPUs of our nodes are emulated: SLURM counts them, and the ranks
#   compute on the CPU.)
# - `--time=00:30:00`: after this, SLURM kills what still runs.
# - `--output=%x-%j.log`: every job gets its own log. With a fixed name, the next job would overwrite it, and with
#   `tee -a` the runs would be mixed. `--error` would send errors to a second file; without it both go to one, in order.
# - `--no-requeue`: if a node fails, the job is not started again. A second attempt would find that the folder for its
#   results already exists. Section 3 changes that.

# %% tags=["nbval-check-output"]
print("set -euo pipefail" + body)

# %% [markdown]
# In exercise 14.2 you will need four of these lines yourself: `set`, `first_node`, `port`, and `srun` with
# `--kill-on-bad-exit`.
#
# - `set -euo pipefail`: three options of bash. With `-e` it stops at the first command that fails. Without it a script
#   goes on after the ranks have died, and if its last command works, the job ends as COMPLETED. With `-u` an unset
#   variable is an error instead of an empty text. With `-o pipefail` a pipe such as `srun ... | tee log` fails if
#   `srun` fails; otherwise only its last command counts.
# - `PYTHONUNBUFFERED=1` prints each line at once, and `OMP_NUM_THREADS=1` computes with as many threads as the rank has
#   CPUs.
# - `GLOO_SOCKET_IFNAME=eth0`: the network **interface** that the ranks use. Section 5 shows what happens when it is the
#   wrong one.
# - `first_node=...`: all ranks have to meet somewhere (lesson 01 called it the rendezvous). SLURM writes the nodes of
#   the job as `n[1-3]`, which no program can connect to. `scontrol show hostnames` lists the names, one on a line, and
#   `sed -n 1p` takes the first.
# - `port=...`: the port comes from the number of the job: that of job 31337 is 20000 + 1337 = 21337. A fixed port works
#   until two jobs share a node.
# - `out=...`: the folder of the results, with the name and the number of the job.
# - `srun --kill-on-bad-exit=1`: if one task fails, all tasks end. Otherwise the others may wait for it until a time-out
#   of their own, or until the time limit of the job.
# - `--cpus-per-task` is given again, because `srun` does not inherit it from the directives (in SLURM 22.05 and 23.02).
# - `--nnodes`, `--nproc-per-node`, `--rdzv-...` tell torchrun how many nodes there are, how many ranks to start here,
#   and where to meet. It then sets `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` for each rank. There is one
#   process for each GPU instead of one for a node, since in one process Python runs one thread at a time (lesson 07,
#   section 8).
#
# **Predict.** How many torchruns start in this job? How many ranks do they start?

# %% tags=["predict"]
torchruns = 3 * 1
ranks = 3 * 2

# %%
if lab.cluster:
    endless = replace(job, overrides=(*job.overrides, "--train.steps", "100000"))
    running = lab.submit(endless)
    lab.until(lambda: " ranks on " in running.log())
    lab.sh("squeue", "--steps", "--noheader", "--format=step %i has %A tasks")
    started = re.search(r"\.0 has (\d+) tasks", lab.said)
    first_line = running.log().partition("; grid")[0]
    found = re.search(r"(\d+) ranks on", first_line)
    running.cancel()
    compare("torchruns", torchruns, int(started[1]), within=1, found="counted")
    compare("ranks", ranks, int(found[1]), within=1, found="counted")
    print(first_line)

# %% [markdown]
# SLURM counts the tasks of `srun`, which are the torchruns. It does not know of the six ranks; they are in the first
# line of the log.
#
# SLURM refuses a directive that is misspelt, but it accepts many scripts that do not do what was meant. Here is one
# with four wishes: two GPUs on each node, two nodes, an hour and a half, and no other jobs beside it (`--exclusive`).

# %%
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.parse import Script

WISHES = """#!/bin/bash
# SBATCH --gpus-per-node=2
#SBATCH --nodes=2
#SBATCH --time=1:30
cd runs
#SBATCH --exclusive
srun hostname
"""
Path("runs/wishes.sbatch").write_text(WISHES)
print(WISHES)

# %% [markdown]
# Three rules are enough to read it as `sbatch` does. Only lines that begin with exactly `#SBATCH` are directives.
# `sbatch` stops looking for them at the first command. And two numbers with a colon between them are minutes and
# seconds, which SLURM rounds up to whole minutes.
#
# **Predict.** How many directives does `sbatch` read here? How many minutes does the job get?

# %% tags=["predict"]
directives_read = 2
limit_minutes = 2

# %%
lab.sh("sbatch", "--hold", "--output=/dev/null", "runs/wishes.sbatch")
FORMAT = "job %i: %D nodes, time limit %l, GPUs %b, shares its nodes %h"
lab.sh("squeue", "--noheader", "--name=wishes.sbatch", f"--format={FORMAT}")
limit = re.search(r"time limit (\d+):", lab.said)
lab.sh("scancel", "--name=wishes.sbatch")
read = len(Script(WISHES).directives)
compare("directives read", directives_read, read, within=1, found="counted")
if limit:
    compare("minutes", limit_minutes, int(limit[1]), within=1)
print()
for problem in lint(WISHES):
    print(f"line {problem.line}, {problem.rule}: {problem.message}")

# %% [markdown]
# The job has two nodes and no GPU (`N/A`), and other jobs may run beside it (`OK`; `NO` would mean that they may not).
# Its time limit is two minutes instead of an hour and a half. `lint`, a part of labcode, knows more than fifty such
# faults. It found the comment and the late line, but not the time, because a minute and a half might have been meant.
#
# **One script, many runs.** A script is seldom edited for each run. Three things reach it from the line that submits
# it:
#
# - options of `sbatch` **before** the name of the script override its directives;
# - words **after** the name are arguments of the script: `"$@"` stands for all of them;
# - the job inherits the environment variables of the shell in which you submit, unless `--export=NONE` forbids it.
#
# NERSC's tutorial on deep learning at scale runs all of its experiments from one script in this way, for example with
# `ENABLE_PROFILING=1 sbatch -n 1 -t 20 submit_pm.sh --config=short`. Here is a script of that kind. Its last two lines
# differ only in their quotes. In double quotes bash inserts the value of a variable where it reads the line, and in
# single quotes it leaves the text as it is.

# %%
MANY = """#!/bin/bash
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --time=5
#SBATCH --output=runs/%x-%j.log
echo "on $SLURM_NNODES nodes; words: $@; PROFILE: ${PROFILE:-no}"
srun bash -c "echo in double quotes: I am task $SLURM_PROCID"
srun bash -c 'echo in single quotes: I am task $SLURM_PROCID'
"""

# %% [markdown]
# We submit it with `--nodes=3`. The batch script has a `SLURM_PROCID` of its own, which is 0.
#
# **Predict.** How many tasks say that they are task 0: in double quotes, and in single quotes?

# %% tags=["predict"]
zeros_in_double_quotes = 3 * 2  # the script, on the first node, has put in its own 0
zeros_in_single_quotes = 1

# %%
Path("runs/many.sbatch").write_text(MANY)
log = lab.batch(
    "runs/many.sbatch", "--nodes=3", words=["--config=short"], env={"PROFILE": 1}
)
if log:
    double = log.count("double quotes: I am task 0")
    single = log.count("single quotes: I am task 0")
    compare("double", zeros_in_double_quotes, double, within=1, found="counted")
    compare("single", zeros_in_single_quotes, single, within=1, found="counted")

# %% [markdown]
# In single quotes the text goes to every task, and the bash of the task inserts its own number. NVIDIA's workshop on
# Megatron-LM starts one launcher on each node with `srun bash -c '$LAUNCHER --node_rank $SLURM_PROCID $CMD'`. In double
# quotes every node would take itself for node 0.
#
# **Takeaway: SLURM accepts many scripts that do not do what was meant. Read a script as `sbatch` reads it, and let a
# linter check it before you submit it. With options, words and variables beside its name, one script serves many
# runs.**

# %% [markdown] tags=["exercise"]
# ### Exercise 14.1 · Who is where
#
# One line of the log tells whether a script did what was meant. labcode's training prints it first:
#
#     4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 4 x pp 1 x cp 1 x tp 1
#
# If a script starts the ranks wrongly, each of them trains the same model alone, and the log says `1 rank on 1 node`
# four times. The loss falls all the same, so read this line before you look at the loss.
#
# Write a function that finds the line in a log and returns `{"n1": [0, 1], "n2": [2, 3]}`. Other lines of a log have
# brackets too, or speak of nodes.

# %% tags=["exercise"]
def ranks_by_node(log):
    """{node: [its ranks]} from the log of a run on several nodes."""
    ### BEGIN SOLUTION
    inside = re.search(r"ranks on \d+ nodes \((.+?)\)", log)[1]
    found = {}
    for part in inside.split("; "):
        node, ranks = part.split(": ")
        found[node] = [int(rank) for rank in ranks.split(", ")]
    return found
    ### END SOLUTION

# %% tags=["check"]
check("14.1", ranks_by_node)

# %% [markdown] tags=["exercise"]
# ### Exercise 14.2 · A script of your own
#
# Write a whole batch script, from the first line to the last. On **two nodes with two ranks on each** it runs
#
#     python -m labcode.train gpt_tiny --train.steps 10
#
# with `srun`, as in the figure of section 1: without torchrun, **each task is a rank**. Ask for at most 10 minutes and
# for no GPUs. The log goes to the folder `runs`, which exists. Give the script as a text between triple quotes. It has
# to begin right after the quotes, because `#!/bin/bash` must be its very first line.
#
# What changes without torchrun? `labcode.train` reads its rank from `SLURM_PROCID`, which `srun` sets. (Plain PyTorch
# does not; the cells after the exercise show what it needs.) It reads the address and the port of the rendezvous from
# `MASTER_ADDR` and `MASTER_PORT`, which you have to set.
#
# The check lints your script, submits it, waits for its end, and reads its log. This takes 15 to 90 seconds, and
# longest if the ranks do not find each other.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_script = """#!/bin/bash
#SBATCH --job-name=my-first
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:10:00
#SBATCH --output=runs/%x-%j.log
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR=$first_node
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 10
"""
### END SOLUTION

# %% tags=["check"]
check("14.2", my_script, lab)

# %% [markdown]
# **Your own program.** `dist.init_process_group()` of plain PyTorch knows no SLURM. It reads `RANK`, `WORLD_SIZE`,
# `MASTER_ADDR` and `MASTER_PORT`, which torchrun sets. Where each task is a rank, `srun` sets none of them, and the
# program stops with *environment variable RANK expected, but not set*. So translate what `srun` does set:
#
# | `srun` sets | PyTorch reads | it is |
# |---|---|---|
# | `SLURM_PROCID` | `RANK` | the number of the rank in the job |
# | `SLURM_NTASKS` | `WORLD_SIZE` | the number of ranks |
# | `SLURM_LOCALID` | `LOCAL_RANK`, by convention | the number of the rank on its node, and so of its GPU |
#
# `torch.cuda.set_device` gives each rank of a node a GPU of its own. Without it, all of them would use the first one.

# %%
PLAIN = '''import os
import socket
import torch
import torch.distributed as dist

os.environ["RANK"] = os.environ["SLURM_PROCID"]
os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]

local_rank = int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    total = torch.ones(1, device="cuda")
else:
    dist.init_process_group("gloo")
    total = torch.ones(1)

dist.all_reduce(total)
node = socket.gethostname()
rank = dist.get_rank()
print(f"rank {rank}, local rank {local_rank} on {node}: sum {total.item():g}")
dist.destroy_process_group()
'''

# %% [markdown]
# Its script, which labcode writes, is like yours, with `python -m runs.plain` as the command. It exports `MASTER_ADDR`
# and `MASTER_PORT` as yours does.

# %%
from course.labs import l14_scripts

one_task_per_rank = replace(load("local"), launcher="srun", logs="runs")
Path("runs/plain.py").write_text(PLAIN)
own_program = Job("", module="runs.plain", nodes=2, ranks_per_node=2, requeue=False)
ended = l14_scripts.run_script(lab, render(own_program, one_task_per_rank))
print(ended.state)
print("\n".join(sorted(ended.log.splitlines())))

# %% [markdown]
# Under torchrun leave the three lines out: it sets all of these variables itself.

# %% [markdown] tags=["solution-only"]
# *For the instructor.* What people get wrong in 14.2: they set `MASTER_ADDR` without `export`, so that the ranks do not
# inherit it; they keep `--ntasks-per-node=1`; they forget `srun`; or they write `--time=10:00`, which is ten minutes
# and passes, and next time `1:30`. The script is short, so let people compare theirs in pairs. Ask: what would happen
# with `--ntasks=4` instead of `--ntasks-per-node=2`? (SLURM may place three tasks on one node and one on the other.)

# %% [markdown]
# ## 3. Longer than the time limit (core, 42 min)
#
# Clusters have a maximum time limit, often a day, and a training run takes weeks. So it has to be cut into pieces: stop
# in time, write a **checkpoint** (weights, optimizer and position in the data, everything that it needs to go on), go
# back into the queue, and resume. The job can do that by itself, and each of its lives is called an **attempt**.

# %% tags=["figure"]
plot.second_attempt(caption="14.second_attempt")

# %% [markdown]
# A **signal** is the simplest message between processes: a number that can arrive at any time. `USR1` has no meaning of
# its own. A process that does not expect it is killed by it.
#
# 1. `#SBATCH --signal=B:USR1@120` asks SLURM for `USR1`, 120 seconds before the time limit, or up to 60 seconds
#    earlier. `B:` sends it to the batch script. Without `B:` it goes to the tasks.
# 2. The script passes it on: `scancel --signal=USR1 JOB` signals the tasks of a job. It cancels nothing, despite its
#    name.
# 3. labcode's training, with `--checkpoint.every`, catches `USR1`. The ranks finish their step, agree that they have
#    been told to stop, write a checkpoint and end with exit code 0. The end of this section does this in plain PyTorch.
# 4. `scontrol requeue JOB` puts the job back into the queue, under the same number. In the next attempt
#    `--checkpoint.resume` goes on from the newest checkpoint in `--train.out`, or begins if there is none. Two more
#    directives belong to it: `--requeue` allows this, and `--open-mode=append` keeps what the first attempt has logged.
#
# Each attempt pays for the start and for the early stop. Suppose that the training needs 100 minutes, the limit is 10
# minutes, the start takes 1 minute, and the signal comes 2 minutes before the end. Then an attempt trains for 7
# minutes, and the job needs 15 attempts.
#
# Before you write it, four facts about bash.
#
# - `trap 'COMMANDS' USR1` runs the commands when `USR1` comes, but only **between two commands**: while a command runs,
#   the trap waits.
# - `COMMAND &` starts a command in the background, so that bash goes on at once. `$!` is its process number.
# - `wait NUMBER` waits for that process and returns its exit code. A trap does interrupt it. Then `wait` returns a
#   number above 128, **and the process still runs**.
# - Under `set -e` a `wait` that returns anything but 0 ends the script, unless its result is used, as in
#   `wait NUMBER || status=$?`.

# %% [markdown] tags=["exercise"]
# ### Exercise 14.3 · A script that lasts
#
# Write a script that does what the figure shows. You may begin with a copy of yours. This time one rank on each of the
# two nodes is enough, and the command is
#
#     python -m labcode.train gpt_tiny --train.steps 120 --checkpoint.every 100 --checkpoint.resume --train.out FOLDER
#
# in which you choose the FOLDER, below `runs`. **A job that was not told to stop must not go back into the queue**, and
# one whose ranks fail must end as FAILED. A second job of the same script is another run, and begins at step 1.
#
# The check does not wait for the time limit: it sends the signal itself, as SLURM would, when the log shows step 10.
# Then it follows the job through both attempts. This takes one to three minutes, most of it in the queue. At the end it
# runs the script once more, with ranks that fail at once. (A real signal may come while a rank is still starting, and
# would kill it. After this exercise you see how labcode prevents that; your script need not.)

# %% tags=["exercise"]
### BEGIN SOLUTION
my_lasting_script = """#!/bin/bash
#SBATCH --job-name=my-lasting
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
#SBATCH --output=runs/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export MASTER_ADDR=$first_node
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

stopped=no
trap 'stopped=yes' USR1

srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 120 \\
    --checkpoint.every 100 --checkpoint.resume --train.out "runs/$SLURM_JOB_ID" &
ranks=$!

status=0
wait "$ranks" || status=$?
if [[ $stopped == yes ]]; then
    scancel --signal=USR1 "$SLURM_JOB_ID"
    status=0
    wait "$ranks" || status=$?
    if [[ $status == 0 ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$status"
"""
### END SOLUTION

# %% tags=["check"]
check("14.3", my_lasting_script, lab)

# %% [markdown]
# The second attempt goes on after the step that was saved. Its first line is of a later step only because the log shows
# every tenth one.
#
# This is how labcode's script waits and passes the signal on.

# %% tags=["nbval-check-output"]
one_task_per_rank = replace(load("local"), launcher="srun", logs="runs")
lasting = Job(
    "gpt_tiny", ("--train.steps", "120", "--checkpoint.every", "100"),
    nodes=2, ranks_per_node=1, name="my-lasting",
)
text = render(lasting, one_task_per_rank)
print(text[text.index("srun --kill") : text.index("# A run that SLURM")])

# %% [markdown]
# This does the same as a short script, and covers two more cases that can happen to every job.
#
# - **Ranks that are still starting.** `USR1` would kill a rank that has not set up its handler yet. So between `srun`
#   and each rank there is a small bash script of labcode, `hand_down`, which gets the signal from SLURM. The rank below
#   it ignores the signal until its handler is set up, and from then on it is told every second until it ends. `scancel`
#   is repeated too, because `srun` may still be starting.
# - **Stopped or finished?** The exit code is 0 for both. So a training run that was stopped leaves a file named
#   `stopped` in its folder, and the rest of the script, which is not shown, looks for it. If the signal comes in the
#   last step, the run finishes without such a file, and the job does not go back into the queue.
#
# <details><summary>What else the script takes care of: preemption, a last attempt, torchrun</summary>
#
# - **Others may end a job.** `scontrol requeue` would bring back a job that somebody has just cancelled, so the script
#   asks SLURM first. And on some clusters a job with a higher priority may take away the nodes of a running job. This
#   is called **preemption**. If the site grants a grace time, SLURM announces it with the signal `TERM`, but to the
#   tasks only. `hand_down` treats `TERM` as the same request.
# - **A last attempt.** A bug that stops every attempt early would send the job back into the queue for ever.
#   `SLURM_RESTART_COUNT` says how often the job has been requeued, and after 20 attempts the script gives up.
# - **torchrun** is one more reason for `hand_down`. SLURM knows torchrun, but on most clusters not the ranks below it,
#   and torchrun dies of `USR1`. (In PyTorch 2.13 its option `--signals-to-handle` lets it pass on a signal that you
#   name. But then it kills the ranks after `--shutdown-timeout` seconds, by default 30, and ends with an error even if
#   all of them have saved.) `hand_down` finds the ranks. `python -m labcode.slurm.hand_down` prints it.
# </details>
#
# A node that fails sends no signal. That is what `--checkpoint.every` is for: the job begins again at the last
# checkpoint.
#
# **The same in plain PyTorch.** What does a training script of your own need for step 3? The handler of a signal may
# run between any two instructions of Python, so it only notes that the signal has come. The signal does not reach all
# ranks in the same step, so at the end of each step they compare notes: the maximum of all notes says whether **any**
# rank has been told. Then all of them stop after the same step.

# %%
LASTING = '''import os
import signal
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

told_to_stop = False

def note(number, frame):
    global told_to_stop
    told_to_stop = True

signal.signal(signal.SIGUSR1, note)  # early: before this line the signal kills
path = sys.argv[1]
signalled_step = int(sys.argv[2])  # when rank 1, and no other, is signalled

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DDP(nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
done = 0
if os.path.exists(path):
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    done = saved["step"]

for step in range(done + 1, 31):
    generator = torch.Generator().manual_seed(2 * step + rank)
    loss = model(torch.randn(4, 8, generator=generator)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if rank == 1 and step == signalled_step:
        os.kill(os.getpid(), signal.SIGUSR1)  # what SLURM does

    stop = torch.tensor(int(told_to_stop))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    if stop.item():
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if rank == 0:
            torch.save(state | {"step": step}, path)
        break

size = model.module.weight.norm().item()
print(f"steps {done + 1} to {step}, weights of norm {size:.6f}")
dist.destroy_process_group()
'''

# %% [markdown]
# We start it on two ranks with torchrun, three times. In the first attempt rank 1 gets the signal during step 12, and
# rank 0 never gets one. The second attempt finds the checkpoint. The third run, with another file, is undisturbed.
#
# **Predict.** With which step does rank 0 end the first attempt? Are the weights in the end the `"same"` as those of
# the undisturbed run, or `"other"` ones?

# %% tags=["predict"]
last_step_of_rank_0 = 12
weights_in_the_end = "same"

# %%
from labcode.runtime import launch

Path("runs/lasting.py").write_text(LASTING)
Path("runs/stopped.pt").unlink(missing_ok=True)
outputs = []
for path, signalled_step in (("stopped", 12), ("stopped", 0), ("whole", 0)):
    words = [f"runs/{path}.pt", signalled_step]
    outputs.append(launch.run("runs.lasting", *words, nproc=2, echo=False).output)
found = re.search(r"\[rank 0\] steps 1 to (\d+)", outputs[0])
compare("last step of rank 0", last_step_of_rank_0, int(found[1]), within=1)
norms = {re.search(r"norm (\S+)", output)[1] for output in outputs[1:]}
found = "same" if len(norms) == 1 else "other"
compare("weights in the end", weights_in_the_end, found, options=("same", "other"))
print(*outputs, sep="\n")

# %% [markdown]
# Without the all-reduce rank 1 would leave alone, and rank 0 would miss it in the backward of step 13: gloo would
# report a lost connection, NCCL might wait until its time-out, and nobody would have saved. The extra all-reduce of one
# number costs little, but on a GPU `.item()` also makes the program wait until the GPU is done; where that counts, do it
# in every tenth step. After the loop the program ends with exit code 0, and the script decides about the requeue, as in
# exercise 14.3. Megatron-LM has a way without a signal, too: with `--exit-duration-in-mins 1190` it checks its own
# clock after each step, saves and ends. That clock starts with the program and not with the job, so leave room. (Here
# `torch.save` overwrites the only checkpoint. If the job dies in the middle of it, none is left; lesson 17, section 2,
# does it better.)
#
# **Takeaway: with a trap, a second wait and a requeue, a run may be longer than any time limit. The ranks agree on the
# step after which they stop, and all attempts need the same folder.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* Typical: `srun` in the foreground (the trap runs when the training is over; the linter says so),
# no second `wait` (the job is requeued while the ranks still save), and a folder that differs between the attempts. Let
# somebody draw what happens if the signal comes one second after the start. Ask before you show labcode's version: what
# happens to a script of this kind when a bug lets every attempt stop at once? (It is requeued for ever.) Show the two
# versions of labcode's script side by side: `render(job, site)` with and without `requeue=False`, through `diff`.

# %% [markdown]
# ## 4. What the second node costs (core, 13 min)
#
# Inside a node the ranks communicate over memory or NVLink, a direct link between GPUs; between nodes over a network.
# That may be **InfiniBand**, which is made for clusters, or Ethernet, which is as fast only with cards and switches
# made for it (**RoCE**). We train a small GPT with plain data parallelism on two nodes, with one rank on each. In every
# step the ranks all-reduce the gradients of 4 bytes, in a ring (lesson 01, section 3).
#
# The network between our nodes is only emulated, and too fast to matter. So we slow it down while the job runs, first
# to 200 and then to 100 Mbit/s, which is 100/8 million bytes per second. The model has 811,520 parameters. The
# interface of each node counts the bytes that leave it, so we also see what a step really sends.
#
# **Predict.** How many bytes does a rank send in a step? How many seconds does the network of 100 Mbit/s add to a step?
# (For the seconds we allow a factor of 1.8: DDP sends while backward still computes, as lesson 05, section 2, explains,
# which can hide a good part of the sending.)

# %% tags=["predict"]
sent_bytes = 2 * (1 / 2) * 4 * 811_520
added_s = sent_bytes / (100e6 / 8)

# %%
options = (
    "--model.num_layers=1", "--model.hidden_size=256", "--model.context_length=16",
    "--train.global_batch=2", "--train.log_every=1", "--train.eval_every=0",
    "--train.steps=100000" if lab.cluster else "--train.steps=30",
)
training = Job("gpt_tiny", options, nodes=2, ranks_per_node=1, name="two-nodes")
running = lab.submit(training)
measured_bytes = l14_cluster.sent_per_step(lab, running, node="n2", count=60)
found = l14_cluster.at_rates(lab, running, ["off", "200mbit", "100mbit"], count=6)
print(running.log().partition("; grid")[0])
if lab.cluster:
    running.cancel()

# %% tags=["figure"]
NAMES = {"off": "as it is", "200mbit": "200 Mbit/s", "100mbit": "100 Mbit/s"}
BYTES_PER_S = {"200mbit": 200e6 / 8, "100mbit": 100e6 / 8}
curves = {}
fastest = {}
for rate, rows in found.items():
    curves[NAMES[rate]] = ([step for step, *_ in rows], [1e3 * s for *_, s in rows])
    step, _, seconds = min(rows, key=lambda row: row[2])
    fastest[rate] = (step, 1e3 * seconds)
predicted = {}
if lab.cluster:
    compare(
        "bytes that n2 sends in a step", sent_bytes, measured_bytes,
        within=1.1, unit="B",
    )
    unslowed_ms = fastest["off"][1]
    slower_s = (fastest["100mbit"][1] - unslowed_ms) / 1e3
    compare("added at 100 Mbit/s", added_s, slower_s, within=1.8, unit="s")
    for rate, bytes_per_s in BYTES_PER_S.items():
        on_the_wire_ms = 1e3 * 4 * 811_520 / bytes_per_s
        predicted[f"predicted, {NAMES[rate]}"] = unslowed_ms + on_the_wire_ms
plot.lines(
    curves,
    reference=predicted,
    points={"the fastest": tuple(zip(*fastest.values()))},
    caption="14.bandwidths",
)

# %% [markdown]
# In a ring of p ranks each one sends 2 (p - 1)/p · 4 N bytes for N parameters, with two ranks 4 N: its whole gradient
# once. The interface counts a few percent more, because packets have headers and the ranks also exchange a few numbers
# of their own. The time can be less than predicted, where sending hides behind backward, or a little more. We compare
# the fastest step at each bandwidth. The dashed lines are the fastest step of the network as it is, plus the predicted
# bytes over the bandwidth. (Between the groups two steps are left out, because the bandwidth changed during them.)
#
# On a real cluster you do not have to train to know your network. **nccl-tests** is a program of NVIDIA that times
# single collectives. For each size it prints `algbw`, the bytes divided by the time, and `busbw`, the **bus bandwidth**
# of lesson 01, which can be compared with the datasheet. Here are two lines of its output, from a public request for
# help.
#
#     #  size         count   type   redop    time   algbw   busbw
#     #   (B)    (elements)                   (us)  (GB/s)  (GB/s)
#     33554432      8388608   float    sum  2180.1   15.39   29.50
#     67108864     16777216   float    sum   24410    2.75    5.27
#
# Larger messages should not lower the bandwidth. Here it falls from 29.5 to 5.3 GB/s: twice the bytes take eleven times
# as long. Something is wrong: the network itself, or the algorithm to which NCCL switches at this size (`NCCL_ALGO` and
# `NCCL_PROTO` choose another one, to find out). No loss curve would ever show it. So run nccl-tests first on a new
# cluster, inside a node and between nodes, with messages as large as yours. For an InfiniBand card of 400 Gbit/s, which
# is 50 GB/s, NVIDIA's developers expect 46 to 48 GB/s, and for a node with eight such cards eight times as much.
# Between just two nodes set `NCCL_ALGO=RING` for this test: by default NCCL may first sum inside each node, and then
# `busbw`, whose factor is that of a ring, comes out above what the cards can carry.
#
# Why would a network be that slow? Often the ranks use a different network than you think. With `NCCL_DEBUG=INFO`, NCCL
# says what it uses. **The log below is made up, in NCCL's form**, for two nodes of four GPUs, since we have none here.
# NCCL arranges the ranks in a ring, 0 to 7, and for each link it names the **transport**: `P2P` from GPU to GPU
# (`P2P/CUMEM`, or `P2P/IPC` in older logs), `SHM` through the host's memory, `NET/IB` over InfiniBand or RoCE, or
# `NET/Socket` over TCP and the CPU.
#
# The ranks 0 to 3 are on the first node, the ranks 4 to 7 on the second, so two links of the ring leave a node: 3 to 4,
# and 7 to 0.

# %% tags=["figure", "nbval-check-output"]
from course.labs import l14_nccl_example
from labcode.doctor import nccl_log

text = l14_nccl_example.two_nodes()
for line in text.splitlines():
    if line.startswith("gpu01:703") and ("Using" in line or "Channel 00" in line):
        print(line)
plot.transports(nccl_log.parse(text), caption="14.transports")

# %% [markdown]
# The numbers on the arrows count the **channels**: NCCL uses several rings side by side, here two, so that more of the
# hardware is busy. In the log, `GDRDMA` says that the network card reads and writes the GPU's memory directly, as it
# should.
#
# A colleague says that training has been slow since Monday, with the same script on the same nodes. Here is what the
# same rank says about its network now.

# %% tags=["nbval-check-output"]
for line in l14_nccl_example.two_nodes(rdma=False).splitlines():
    if line.startswith("gpu01:703") and ("NET/" in line or "Channel 00" in line):
        print(line)

# %% [markdown]
# NCCL found no InfiniBand card, for instance because the job runs in a container that does not see it, and took TCP
# over the slow interface instead. That is no error, and the loss is the same, but a step takes much longer.
#
# **Takeaway: the second node costs bytes over bandwidth. Measure the bandwidth with nccl-tests, and read in NCCL's log
# at least once which network the nodes use.**

# %% [markdown] tags=["solution-only"]
# *For the instructor.* The added time lies between 0.6 and 1.2 of the prediction on a busy machine. Ask: 7 billion
# gradients of 2 bytes on 16 ranks, with a card of 50 GB/s and with an Ethernet of 1.25 GB/s for each: what does a step
# pay? (With one rank on each node 0.5 s and 21 s: 1.875 · 14 GB / bandwidth. Two nodes of eight ranks have eight cards
# each, and need an eighth of that at most: 0.07 s and 2.6 s.)

# %% [markdown]
# ## 5. When it does not start (core, 9 min)
#
# A job on several nodes starts in four stages, and each can fail: the nodes are given to you; the ranks find each other
# by name; they connect over an interface and a port; they run the same code. So first find out how far the job got.
#
# Our example is a very small program: two ranks, one on n1 and one on n2, meet and all-reduce 64 numbers.

# %%
HELLO = '''import socket, sys
import torch, torch.distributed as dist
from labcode.runtime import bootstrap

HIDDEN = 64
world = bootstrap.start(timeout_s=float(sys.argv[1]))
total = torch.ones(HIDDEN)
dist.all_reduce(total)
name = socket.gethostname()
print(f"rank {world.rank} on {name}: {HIDDEN} numbers, each {total[0]:g}")
bootstrap.stop()
'''
Path("runs/hello.py").write_text(HELLO)
lab.hello()

# %% [markdown]
# **First fault.** Debian's installer writes the line `127.0.1.1 own-name` into `/etc/hosts` if a machine has no fixed
# address. We do that on our nodes, and name no interface. A rank now looks up its own host name and tells the others
# what it found: *reach me at 127.0.1.1*. But addresses that begin with 127 mean "myself" on every machine.

# %%
with lab.fault("name"):
    lab.hello(interface=None)
    lab.sh("getent", "ahostsv4", "n2", node="n2")
    print("\nwith the interface named:")
    lab.hello(interface="eth0")

# %% [markdown]
# The address in the error is the cause. Another wrong address is `172.17.0.1`: it belongs to `docker0`, an interface
# that machines with Docker have and that leads to no other machine. Name the right interface in `NCCL_SOCKET_IFNAME`
# or `GLOO_SOCKET_IFNAME`; `ip -brief address` on a node lists them.
#
# **Second fault.** A firewall between the nodes silently drops all packets to the ports 20000 to 29999 of n1. So there
# is no error until some time-out: here after 6 to 10 seconds, by default after minutes.

# %%
with lab.fault("port"):
    lab.hello(wait_s=6)
    for port in (20017, 18017):
        lab.sh("timeout", "2", "bash", "-c", f"</dev/tcp/n1/{port}", node="n2")

# %% [markdown]
# The last two commands try a port by hand. On port 18017 the answer is *Connection refused*, which is good news: the
# packets arrived, and only no program listens there. On port 20017 there is no answer at all, and `timeout` ends the
# attempt with exit code 124. This silence is the fault, and the cure is a port that the site leaves open. (The same
# test is `nc -zv n1 20017`, where it is installed; `ping` says only that the host answers.)
#
# **Third fault.** Somebody has installed a new version of the program, but on n1 only. On n2 the file is still the old
# one, in which `HIDDEN` is 96. Both ranks start, find each other, and connect.

# %%
with lab.fault("code"):
    lab.hello()
    everywhere = ["srun", "--nodelist=n1,n2", "--ntasks-per-node=1", "--label"]
    lab.sh(*everywhere, "cksum", "runs/hello.py")

# %% [markdown]
# The ranks have met and are connected, so the network is not to blame. But a rank received a message of a different
# size than it expected. gloo notices that, and ends the process with a `gloo::EnforceNotMet`. The two sizes are
# **bytes** of one message: gloo cuts this all-reduce into four pieces, and a quarter of 64 numbers of 4 bytes happens
# to be 64 bytes. (If the job ends very fast, only this name is printed, without the sizes.) NCCL does not notice: its
# documentation warns of hangs, crashes and wrong data. `cksum` prints a checksum of a file and its size. `srun` runs it
# on each node, and here the two checksums differ: the ranks do not run the same code.
#
# **Takeaway: an error with an address says where a rank tried to connect; find out whose address that is. No answer at
# all means a firewall, or a node that is gone.**

# %% [markdown]
# ## 6. When it hangs (core, 24 min)
#
# The worst failure has no message. The job runs, the GPUs are busy, and no step ends, because some rank has made a
# different call than the others, or none. In the program below only rank 0 evaluates, and in doing so it broadcasts one
# number.
#
# Two tools watch it. After 5 seconds `faulthandler`, a part of Python, writes down where each rank is. And PyTorch's
# **flight recorder** keeps the last collectives of each rank, by default 2000.

# %%
from course.exercises import l14
from course.labs import l14_hang
from labcode.runtime import launch

HANG = '''import faulthandler, os
from pathlib import Path
import torch, torch.distributed as dist
from labcode.runtime import bootstrap
from course.labs.l14_hang import save_flight_record

def train_step():
    dist.all_reduce(torch.ones(1000))

def evaluate():
    dist.broadcast(torch.ones(1), src=0)

world = bootstrap.start(timeout_s=8)
folder = Path("runs/hang")
folder.mkdir(exist_ok=True)
stack = open(folder / f"stack_{world.rank}", "w")
faulthandler.dump_traceback_later(5, file=stack)
try:
    for step in range(4):
        train_step()
        if step == 1 and world.rank == 0:
            evaluate()
except RuntimeError as error:
    print("gave up:", str(error).split("] ")[-1][:60])
save_flight_record(folder, world.rank)
os._exit(0)  # at once: the broken group would be waited for
'''
Path("runs/hang.py").write_text(HANG)
hung = launch.run(
    "runs.hang", nproc=2, echo=False,
    env_extra={"CUDA_VISIBLE_DEVICES": ""},
)
print(hung.output)

# %% [markdown]
# Both ranks gave up waiting, and neither says which rank it waited for. Where were they?

# %%
folder = Path("runs/hang")
print(l14_hang.stacks(folder))

# %% [markdown]
# Such a list of calls, from the innermost to the outermost, is called a **stack**. Rank 0 waits in `evaluate`, rank 1
# in `train_step`: they wait for each other, in different calls. At work `py-spy dump --pid PID` gives you the stacks of
# a running job on its node, without a change to the program (in a container only with the right to trace,
# `SYS_PTRACE`). This is what seven of eight ranks showed in a published case, issue 3104 of accelerate (shortened):
#
#     Thread 3293 (active): "MainThread"
#         all_gather_coalesced (deepspeed/runtime/zero/partition_parameters.py:1254)
#         ...
#         forward (transformers/models/mixtral/modeling_mixtral.py:676)
#
# The eighth rank was in `forward` and in no collective at all. The model was a mixture of experts, in which the data
# decide which layers a rank uses, and its weights were sharded: to use a layer, all ranks have to gather its weights
# together, and a rank that does not use it does not take part. (DeepSpeed's cure is `set_z3_leaf_modules`: all experts
# of a layer are gathered as one, on every rank. Newer versions do that by themselves for Mixtral and some other
# models.) Here the stacks alone are enough: look for the one that differs.
#
# A stack shows one moment only. And on a GPU a call returns before it is done, so a rank may already be somewhere else
# when it gets stuck. The flight recorder knows the history of each rank.
#
# **Predict.** Calls are counted from 1. Which is the first call in which the two ranks differ?

# %% tags=["predict"]
first_difference = 3  # two steps are the same; then rank 0 broadcasts

# %%
analysis = l14_hang.analysis(folder)
reported = int(re.search(r"sequence number: (\d+)", analysis)[1])
compare("first difference", first_difference, reported, within=1, found="counted")
print(l14_hang.calls(folder))
print()
print(analysis)

# %% [markdown]
# The upper part is our own table of the records. The lower part is what PyTorch's analyser says of the same files, and
# with the stack it names the line of the program. But it blames *Culprit rank 1*, because it assumes that the lowest
# rank is right and compares the others with it. Here rank 0 is the one that did something else. The tool finds the
# place; which rank is wrong, you have to decide.
#
# Under NCCL you need no code for this. PyTorch has a thread that watches the collectives of NCCL, the **watchdog**.
# When one has timed out, it says so, and this message is what you read first in the log of such a job. From a published
# case, shortened:
#
#     [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE,
#     NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.
#     [PG 1 Rank 0] Exception (either an error or timeout) detected by watchdog at work: 1580,
#     last enqueued NCCL work: 1582, last completed NCCL work: 1579.
#
# `SeqNum` counts the collectives of the group. Call 1579 was finished, and call 1580 was not, after ten minutes. Rank 0
# had *enqueued* 1580, and even two more, so it waited for others. Now compare the ranks. One whose last enqueued number
# is lower than 1580 never made the call; look at its stack. If all of them have enqueued 1580, there are three cases:
# their calls differ, which the flight recorder tells; or the network is broken; or the GPU of a rank has not got that
# far and is still in an earlier kernel, since enqueued does not mean started.
#
# The watchdog also lets each rank write its record to a file. Variables that you export in the script control that:
#
# | variable (its name in older versions of PyTorch) | what it says |
# |---|---|
# | `TORCH_FR_BUFFER_SIZE` (`TORCH_NCCL_TRACE_BUFFER_SIZE`) | how many collectives are kept: 2000 by default in PyTorch 2.13, perhaps none in an older one |
# | `TORCH_NCCL_DUMP_ON_TIMEOUT=1` | write them to a file at a time-out; the default in newer versions, not in older ones |
# | `TORCH_FR_DUMP_TEMP_FILE` (`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`) | how the name of each file begins; the rank is appended. Its folder has to exist |
#
# With `runs/JOB/trace_`, in a folder that all nodes share, you get `trace_0`, `trace_1` and so on. Then
# `torchfrtrace --prefix trace_ runs/JOB`, which comes with PyTorch, prints the analysis that you see above.
#
# labcode's own training uses stacks and flight recorder by itself: when nothing moves for a minute,
# `python -m labcode.train` prints one line that begins with `hang:` and names the rank that did not come, the line of
# the program where it is, and the ranks that wait for it. PyTorch has begun to do so as well. After
# `torch.distributed.debug.start_debug_server()` on every rank, port 25999 of rank 0's node shows a page with the stacks
# and the flight records of all ranks. (In 2.13 that is experimental, needs aiohttp and Jinja2, and asks for no
# password.)
#
# **Takeaway: for a hang, first compare the counts, then the stacks, then the calls. The rank that complains is usually
# one of those that waited.**

# %% [markdown] tags=["exercise"]
# Here are the seven faults of this lesson in one table. The names on the left are for the exercise.
#
# | fault | what you see | what proves it |
# |---|---|---|
# | `node` | the job stays in the queue, or ends as NODE_FAIL: one of its nodes has failed | `squeue` gives the reason, `sinfo --Node` the state |
# | `name` | a node's own name leads to an address that begins with 127 | `getent ahostsv4 NAME` on the node |
# | `interface` | an address that is not the cluster's | `ip -brief address` on the node |
# | `port` | no answer, then a time-out | `timeout 2 bash -c '</dev/tcp/HOST/PORT'` |
# | `code` | the ranks meet, and the bytes of their messages differ | `srun cksum FILE`: the same file everywhere? |
# | `absent` | a hang: a rank does not make the call | counts, stacks, flight recorder |
# | `slow` | all is right and takes too long | NCCL's log, nccl-tests |
#
# ### Exercise 14.4 · From symptom to cause
#
# The cell prints what was seen in seven jobs, modelled on real ones. Name the fault of each, in a dict from the letter
# of the job to a name from the table: `{"A": ..., "B": ..., ...}`.

# %% tags=["exercise"]
for letter, symptom in l14.SYMPTOMS.items():
    print(f"{letter}:  " + symptom.replace("\n", "\n    ") + "\n")
### BEGIN SOLUTION
my_diagnosis = {
    "A": "name",
    "B": "port",
    "C": "absent",
    "D": "interface",
    "E": "node",
    "F": "slow",
    "G": "code",
}
### END SOLUTION

# %% tags=["check"]
check("14.4", my_diagnosis)

# %% [markdown] tags=["solution-only"]
# *For the instructor.* B and D are the ones people get wrong: B because they look for a fault in rank 3, D because they
# do not know Docker's address. For G ask how two ranks can disagree about the size of a tensor. (Another version of the
# code on one node: an installation that was done there only, or an old container image.) Ask in section 6 what would
# have happened if `evaluate` had called `all_reduce` on a tensor of the same size. (No hang until the last step: the
# calls would be off by one, and all later gradients wrong.)

# %% [markdown]
# ## 7. More nodes, larger batches (optional, 20 min)
#
# What do you do with 16 nodes when a job runs well on one? The usual first answer is **weak scaling**: every rank keeps
# its number of samples, so the batch grows with the nodes. As lesson 06 explains, the learning rate then grows with the
# root of the batch for AdamW, and since every run is to see the same samples, the number of steps falls. This script of
# thirty lines submits one job for each number of nodes. The comment on top names the case of NERSC's tutorial: 16
# samples on each of four GPUs, on 1, 4 and 16 nodes.

# %% tags=["nbval-check-output"]
print((l14_cluster.REPOSITORY / "slurm/weak_scaling").read_text())

# %% [markdown]
# Here it runs in miniature: one rank on each node, 4 samples on each rank, 1, 2 and 3 nodes, and a vision transformer
# small enough for a core, on the weather of lesson 02. The first job has a learning rate of 0.001.
#
# **Predict.** Which learning rate does the job on three nodes get? All three see 512 samples: on how many nodes is the
# loss on held-out weather lowest in the end? And the time to a loss that all three reach, times the number of ranks,
# is what it costs: on how many nodes is it cheapest?

# %% tags=["predict"]
rate_on_three_nodes = 1e-3 * 3**0.5
lowest_loss_on = 1
cheapest_on = 1

# %%
folders = lab.script(
    "slurm/weak_scaling", 1, 2, 3, "--",
    "--model.patch_size", 10, "--model.hidden_size", 64, "--model.num_layers", 2,
    env={"RANKS_PER_NODE": 1, "SAMPLES_PER_RANK": 4, "STEPS": 128},
)

# %%
from labcode.run import scaling

runs = [scaling.read(folder) for folder in folders]
rates = [run.row.lr for run in runs]
losses = [run.row.val_losses[-1][1] for run in runs]
goal = scaling.common_loss(runs)
costs = [run.seconds_to(goal) * run.row.devices for run in runs]
compare("learning rate", rate_on_three_nodes, rates[2], within=1.05)
lowest = runs[losses.index(min(losses))].row.devices
cheapest = runs[costs.index(min(costs))].row.devices
compare("lowest loss on", lowest_loss_on, lowest, within=1, unit="node")
compare("cheapest on", cheapest_on, cheapest, within=1, unit="node")
print("\n".join(scaling.table(runs)))

# %% [markdown]
# The table is that of `python -m labcode.run.scaling runs/weak_scaling-*`. Read it as two columns that pull in opposite
# directions. **Samples a second** grow with the nodes, as far as there is hardware: on a laptop with two cores the
# third node has no core of its own, and on a cluster the network takes its share. **The loss after the same samples**
# gets worse, because fewer steps were made with them. The time to a loss is what remains of both. The cost in
# rank-seconds usually rises, since a batch n times as large saves at most a factor of n in steps, and often less. (Each
# row is a single run. Another seed moves such losses too, so do not rank runs by the last digits.)

# %% tags=["figure"]
curves = {}
for name, run in zip(("1 node", "2 nodes", "3 nodes"), runs):
    curves[name] = tuple(zip(*run.seconds))
plot.lines(curves, reference={"reached by all": goal}, caption="14.nodes")

# %% [markdown]
# Over samples the curves would lie in the order of the batches; over seconds they can cross. TensorBoard draws both
# from the same files: `tensorboard --logdir runs`, with the horizontal axis set to *Relative* for time.
#
# On a cluster of four GPUs a node the command is
#
#     slurm/weak_scaling 1 4 16 -- --site my.yaml --minutes 30 --no-wait
#
# for batches of 64, 256 and 1024, and rates of 0.001, 0.002 and 0.004. Point `--data.path` at a longer record of the
# weather: that of the course has 24 states, of which a batch of 1024 sees every one again and again, turned around the
# globe. Without `--no-wait` the jobs wait for each other. And try what lesson 06, section 4 says of a rate that grows
# without the batch: `slurm/weak_scaling 1 -- --site my.yaml --optim.lr 0.004`.
#
# **What a forecaster asks.** The loss is the mean of the squared errors of four variables, each in units of its
# standard deviation: the temperature (t2m), two components of the wind (u10 and v10) and the pressure (msl). The root
# of the mean for one variable is its **RMSE**. NERSC judges its model by u10, the wind along the circles of latitude,
# and reaches 0.13 after 22,000 steps, which take 22 hours on one A100. The log of each run ends with a table of these
# errors. Beside them stands **persistence**, the forecast that nothing changes in six hours.
#
# **Predict.** Over all variables the run on one node has an RMSE of about 0.33, the root of its loss. Is that of u10
# `"above"` or `"below"` it?

# %% tags=["predict"]
error_of_the_wind = "above"

# %%
log = Path(f"{folders[0].name}.log").read_text()
u10 = float(re.search(r"u10 +(\S+)", log)[1])
found = "above" if u10 > losses[0] ** 0.5 else "below"
compare("u10", error_of_the_wind, found, options=("above", "below"))
print(log[log.index("normalised RMSE") : log.index("\nmetrics, weights")])
print("rate on the way:", *re.findall(r"\| lr (\S+)", log)[::3])

# %% [markdown]
# In six hours the wind changes more than temperature and pressure, so the model and persistence are worst at it. A
# model that does not beat persistence has learned nothing of use. The rates show the schedule of each of these runs: a
# warm-up, and then half a **cosine** down to nearly 0, over the steps of the run. PyTorch has it as
# `CosineAnnealingLR`. So a run that is cut short has not had its small rates yet, and its loss cannot be compared with
# that of a shorter run that has ended.
#
# **What others measured.** NERSC has published the logs of two such runs of its ViT (November 2025). One node of four
# A100, with a batch of 64, reaches 203 samples/s; 16 nodes, with a batch of 1024, reach 2,560, which are 79 % of 16
# times as many. After the same three epochs the loss on held-out weather is 0.170 on one node and 0.375 on 16, since
# these were 1,780 steps against 111. The 16 nodes trained for 86 s. The one node had a loss of 0.251 after its first
# epoch of 226 s. So to a loss of 0.375 the 16 nodes are at most 2.6 times as fast, for at least six times the
# GPU-seconds.
#
# **Takeaway: scale with one script and judge by one table. Samples per second say what the hardware does; the time to
# a loss says what you get for it.**

# %%
lab.close()

# %% [markdown]
# ## 8. From here to GPUs and SLURM (core, 2 min)
#
# Your own cluster needs a profile of about ten lines: copy `slurm/sites/generic.yaml`, fill in account, partition, GPUs
# of a node and the interface, and run
#
#     python -m labcode.slurm render gpt_tiny --site my.yaml --nodes 2 --checkpoint.every 100    # read it first
#     python -m labcode.slurm submit gpt_tiny --site my.yaml --nodes 2 --checkpoint.every 100    # then send it
#     python -m labcode.slurm lint my_own_script.sbatch                                          # or yours
#
# On GPU nodes there is one rank for each GPU, and the ranks use NCCL. The scripts stay the same. You can also start the
# cluster of this lesson in a terminal, with `slurm/cluster up 2`, and break it in your own way.
#
# ## Questions (core, 3 min)
#
# **1.** A script ends with `srun python train.py`, followed by one more line: `echo finished`. After 100 steps a rank
# dies. In which state does the job end, and which two things are missing in the script?
#
# <details><summary>Answer</summary>
#
# COMPLETED, with exit code 0, because the last command was an `echo` that worked: `set -e` is missing. And since `srun`
# was not told `--kill-on-bad-exit=1`, the other ranks may first wait for the dead one until their own time-out, or
# until the time limit of the job. SLURM then ends it as TIMEOUT.
# </details>
#
# **2.** Why is `--checkpoint.every 100` needed, although the ranks save when they are told to stop?
#
# <details><summary>Answer</summary>
#
# Not every end is announced. If a node fails, or the job is killed because it took too much memory, no signal comes.
# All steps since the last checkpoint are then lost.
# </details>
#
# **3.** From lesson 01: 16 ranks on 2 nodes all-reduce 1 GB in a ring. How many bytes does each rank send, and how many
# bytes cross from one node to the other?
#
# <details><summary>Answer</summary>
#
# Each rank sends 2 · 15/16 · 1 GB = 1.875 GB to its neighbour. Of the sixteen links, one leads from the first node to
# the second and one leads back, so 1.875 GB cross in each direction. All other links stay inside a node.
# </details>
#
# ## Recap
#
# | concept | fact | in labcode |
# |---|---|---|
# | job, task | the script runs once, on the first node; `srun` runs tasks on all | `slurm.script.job` |
# | two launchers | srun starts the ranks, or one torchrun on each node does | `slurm.script.render` |
# | one script, many runs | options before its name, words after it, and the environment | |
# | plain PyTorch under srun | RANK, WORLD_SIZE, LOCAL_RANK from SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID | `runtime.bootstrap` |
# | legal faults | found by rules, before the queue | `slurm.lint` |
# | next attempt | USR1, all-reduce of the notes, checkpoint, requeue, resume in the same folder | `train.checkpoint` |
# | the second node | 2 (p - 1)/p · 4 N bytes / bandwidth | `perf.alpha_beta` |
# | which link NCCL uses | P2P, SHM, NET/IB, NET/Socket | `doctor.nccl_log` |
# | a hang | counts, then stacks, then calls | |
# | a cluster at home | real SLURM, emulated nodes | `minislurm` |
#
# ## Sources
#
# - SLURM: https://slurm.schedmd.com/sbatch.html (directives, `--signal`), https://slurm.schedmd.com/srun.html,
#   https://slurm.schedmd.com/scontrol.html (requeue), https://slurm.schedmd.com/sched_config.html (backfill),
#   https://slurm.schedmd.com/preempt.html (grace time), https://slurm.schedmd.com/salloc.html,
#   https://slurm.schedmd.com/sacct.html.
# - One script for many runs, and the runs on 1 and 16 nodes: NERSC, *SC25 Deep Learning at Scale Tutorial*,
#   https://github.com/NERSC/sc25-dl-tutorial. The launcher on each node: NVIDIA DLI, *Multi-Node Distributed Training
#   Strategies*, section 3.5.
# - Containers: https://github.com/NVIDIA/pyxis, https://apptainer.org/docs/user/latest/gpu.html.
# - torchrun: https://docs.pytorch.org/docs/stable/elastic/run.html; what it does with signals: `torchrun --help`, and
#   `run` in https://github.com/pytorch/pytorch/blob/main/torch/distributed/elastic/agent/server/api.py.
# - NCCL's variables: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; what happens if ranks disagree
#   on the size: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/collectives.html.
# - Bus bandwidth: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md. The two lines of section 4:
#   https://github.com/NVIDIA/nccl/issues/1453; what to expect of a card of 400 Gbit/s:
#   https://github.com/NVIDIA/nccl-tests/issues/290, of eight of them: https://github.com/NVIDIA/nccl-tests/issues/319,
#   and why two nodes can show more: https://github.com/NVIDIA/nccl-tests/issues/196. RoCE and InfiniBand, both at 400
#   Gbit/s: arXiv:2407.21783, section 3.3.1.
# - Flight recorder: https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html.
# - The watchdog's message: https://github.com/hiyouga/LlamaFactory/issues/7396; the stacks of py-spy:
#   https://github.com/huggingface/accelerate/issues/3104, why such a model hangs, and the cure:
#   https://github.com/deepspeedai/DeepSpeed/issues/4808, https://github.com/deepspeedai/DeepSpeed/pull/4966,
#   https://github.com/deepspeedai/DeepSpeed/pull/7604; py-spy itself: https://github.com/benfred/py-spy.
# - 127.0.1.1 in `/etc/hosts`: Debian Reference, section 5.1.1,
#   https://www.debian.org/doc/manuals/debian-reference/ch05.en.html.
