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
# One machine is full, and the next one is not yours: it belongs to a cluster, and you ask for it in writing. SLURM is the program that most clusters use to decide who computes
# where and when. This lesson submits the training program of the course to a real SLURM, reads the script that it is started with, spreads the ranks over two nodes, and breaks the
# network on purpose.
#
# ## Goals
#
# - say what a job is, and follow one through the queue;
# - read a batch script line by line, find its faults before the queue does, and describe your own cluster in ten lines;
# - predict what a step costs once its ranks are on two nodes, and measure it;
# - see in a log who talks to whom over what, and get from a symptom to its cause with one command.
#
# **Time**: 90 minutes. **Needs**: lesson 04 (data parallel); lesson 01 (the ring all-reduce and its bytes).

# %%
import difflib
import re
from dataclasses import replace
from pathlib import Path

from labcode.config import GPTConfig
from labcode.doctor import nccl_log as nccl
from labcode.perf import alpha_beta as comm
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.parse import Script
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import load
from labcode.teach.check import check, compare
from labcode.teach.exercises import l14
from labcode.teach.figures import plot
from labcode.teach.labs import l14_cluster as slurm_lab
from labcode.teach.labs import l14_nccl_example as nccl_example

lab = slurm_lab.open_lab("lesson12")

# %% [markdown]
# This cluster runs on your machine: the daemons of SLURM, and three **nodes**, each with its own host name, network and processes. Only the hardware is emulated. It needs Linux and a few Debian
# packages; without them the cell above says which, commands below are shown and not run, and training jobs run on this machine.
#
# ## 1. What a job is
#
# - You log in to a **login node**, which is not for computing; here it is called `head`.
# - A **job** is a request (how many nodes, for how long) and a script. It waits until nodes are free; then the script starts on the **first** of them, and what is left when the time is over is killed.
# - The request stands in the script, in comments that begin with `#SBATCH`: bash passes over them, `sbatch` reads them.
# - In the job, `srun` starts a **step**: one command as many times as there are **tasks**, spread over the nodes. A task finds its number in `SLURM_PROCID`.
#
# **Predict.** How many lines does the job below print with `hostname`, and how many with `srun hostname`?

# %% tags=["predict"]
without_srun_guess = 1  # the script itself runs once, on the first node
with_srun_guess = 2 * 2

# %%
FIRST = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=5
#SBATCH --output=runs/%x-%j.log
echo "script on $(hostname)"
srun bash -c 'echo "task $SLURM_PROCID of $SLURM_NTASKS on $(hostname), there number $SLURM_LOCALID"' | sort
"""
Path("runs/first.sbatch").write_text(FIRST)
lab.sh("sinfo")
log = lab.batch("runs/first.sbatch")
if log:
    compare("lines without srun", without_srun_guess, log.count("script on"), within=1)
    compare("lines with srun", with_srun_guess, log.count("task "), within=1)

# %% [markdown]
# `sinfo` shows the **partition** `debug`, a queue with limits of its own, and the state of its nodes. The commonest mistake of the first week is in the two numbers: whatever stands in the script without `srun`
# runs once, on one node, while the others idle and are paid for.
#
# Now the queue. Three jobs, one after the other: *first* takes two nodes, *second* wants two nodes, *third* wants one and promises to be done in a minute. The cluster has three nodes.
#
# **Predict.** How many of the three run at once? In which order do they start?

# %% tags=["predict"]
running_guess = 2  # first and third: the third overtakes, because that delays nobody

# %%
for name, nodes, minutes in (("first", 2, 10), ("second", 2, 10), ("third", 1, 1)):
    lab.sh("sbatch", f"--job-name={name}", f"--nodes={nodes}", "--exclusive", f"--time={minutes}",
           "--output=/dev/null", "--wrap", "sleep 600")
def states():
    return {job.name: job.state for job in lab.client.queue()}

lab.until(lambda: states().get("third") == "RUNNING")
QUEUE = ["squeue", "--sort=i", "--format=%.5i %.8j %.8T %.5D %R"]
lab.sh(*QUEUE)
if lab.said:
    compare("jobs that run", running_guess, list(states().values()).count("RUNNING"), within=1)
lab.sh("scancel", "--name=first")
lab.until(lambda: states().get("second") == "RUNNING")
lab.sh(*QUEUE)
lab.sh("scancel", "--name=second")
lab.sh("scancel", "--name=third")
emptied = lab.until(lambda: not states())

# %% [markdown]
# *second* waits for `Resources`, and *third* has passed it: this is **backfill**. From `--time` SLURM knows when *first* is over at the latest. *third* ends before that, on a node that *second* does not need, so
# it delays nobody. An honest, short time limit is the cheapest way to wait less. Then `scancel` ends *first*, and *second* begins.
#
# **Takeaway: a job is a request and a script. The script runs once, on the first node; only `srun` reaches them all. Short jobs overtake.**
#
# ## 2. The script, line by line
#
# A `Job` says what to run, a **site profile** what the cluster wants to be asked, and `render` makes the script of both. First the request:

# %% tags=["nbval-check-output"]
job = Job("gpt_tiny", ("--train.steps", "200", "--checkpoint.every", "50"), nodes=2, ranks_per_node=2, minutes=10, name="two-nodes")
script = render(job, load("local"))
head, body = script.split("set -euo pipefail")
print(head)

# %% [markdown]
# - `--ntasks-per-node=1`: the one task of a node is **torchrun**, and that starts the ranks. So its CPUs are those of all ranks of the node.
# - `%x-%j`: name and number of the job, so that no log is overwritten; `append`, because a job may have a second life.
# - `--signal=B:USR1@120`: two minutes before the end, or up to one more, a signal comes, to the batch script (`B:`).
#
# **Predict.** How many torchruns start? How many ranks do they make? And below, the ranks meet on a **port**: 20000 plus the last four digits of the job's number. Which one has job 31337?

# %% tags=["predict"]
torchruns_guess = 2 * 1
ranks_guess = 2 * 2
port_guess = 20000 + 31337 % 10000

# %% tags=["nbval-check-output"]
print("set -euo pipefail" + body)
request = Script(script)
torchruns = request.number("nodes") * request.number("ntasks-per-node")
base, span = map(int, re.search(r"\((\d+) \+ SLURM_JOB_ID % (\d+)\)", script).groups())
compare("torchruns", torchruns_guess, torchruns, within=1)
compare("ranks", ranks_guess, torchruns * int(re.search(r"--nproc-per-node=(\d+)", script)[1]), within=1)
compare("port of job 31337", port_guess, base + 31337 % span, within=1)

# %% [markdown]
# - `set -euo pipefail` makes bash stop at the first command that fails. Else a job whose training died ends as COMPLETED, because its last `echo` was fine.
# - `SLURM_JOB_NODELIST` is `n[1-2]`, which no program can connect to; `scontrol show hostnames` writes the names out, and all meet on the first. A fixed port works until two jobs share a node.
#
# Then the last part:
#
# 1. `srun` starts torchrun on each node, in the background (`&`). `--kill-on-bad-exit=1`: one dead task ends all, else the others wait until the time is over.
# 2. USR1 comes. The `trap` notes it, and `scancel --signal` passes it on, on most clusters only to what `srun` has started, no rank. So a small bash, `hand_down`, gives it to the ranks. They finish their step, write
#    a **checkpoint** and end with code 0.
# 3. `scontrol requeue` puts the job back into the queue. In its next life `--checkpoint.resume` goes on. A node that fails says nothing before: for that there is `--checkpoint.every`.
#
# So a run may be longer than any time limit. Another site wants the same in other words:

# %% tags=["nbval-check-output"]
elsewhere = render(replace(job, minutes=60), load("perlmutter"))
for line in difflib.unified_diff(script.splitlines(), elsewhere.splitlines(), n=0, lineterm=""):
    if line[0] in "+-" and line[:3] not in ("---", "+++") and not line[1:].startswith("# "):
        print(line[:118])

# %% [markdown]
# This site starts **one task for each rank** in place of torchrun: each rank reads its number from `SLURM_PROCID` and the address from `MASTER_ADDR`. Both ways give the same ranks. The rest
# is the site's business: how GPUs are asked for, where scratch is, which variable its network wants.
#
# **Takeaway: what to run is yours, how to ask is the site's. Kept apart, one job goes to every cluster.**
#
# ## 3. Faults that the queue would find
#
# A fault in a script costs the wait in the queue, or worse, is not noticed. Here is a script as one finds them:
#
# ```bash
# #!/bin/bash
# #SBATCH --job-name=my-first
# #SBATCH --nodes=2
# # SBATCH --gpus-per-node=2
# #SBATCH --ntasks-per-node=2
# #SBATCH --time=1:30
# #SBATCH --output=train.log
# cd /home/ada/course
# #SBATCH --mem=4G
# export MASTER_ADDR=n1
# export MASTER_PORT=29500
# srun python -m labcode.train gpt_tiny --train.out /tmp/run
# echo finished
# ```
#
# **Predict** how many faults it has.

# %% tags=["predict"]
faults_guess = 10  # one of them is seen by no rule: read the time limit

# %% tags=["nbval-check-output"]
problems = lint(l14.BAD, load("local"))
for problem in problems:
    print(f"line {problem.line}, {problem.rule}: {problem.message}\n    {problem.why}")
compare("faults", faults_guess, len(problems), within=1.2)

# %% [markdown] tags=["exercise"]
# Most of these run. They run without GPUs, with the default memory, with their log overwritten, or hang for hours: sbatch says nothing. And one fault has no rule, because it is legal: `1:30` is one minute and a half.
#
# ### Exercise 14.1 · Mend it
#
# Write the script as it was meant: 2 nodes, 2 GPUs and 2 tasks on each (one for each rank, no torchrun), 4 GB, an hour and a half. Mend until `lint` is silent.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_script = """#!/bin/bash
#SBATCH --job-name=my-first
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=1:30:00
#SBATCH --output=%x-%j.log
#SBATCH --mem=4G
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.out "runs/$SLURM_JOB_ID"
"""
### END SOLUTION

# %% tags=["check"]
check("14.1", lambda: l14.mended(my_script))

# %% [markdown] tags=["exercise"]
# ### Exercise 14.2 · Your cluster in a dozen lines
#
# *Atlas* is made up, but its documentation could be real:
#
# > Jobs run under an account, yours is `bio42`. GPU nodes are in the partition `gpu`: at most 24 hours; 64 cores and 4 A100 in each, to be asked for with `--gres=gpu:a100:N`. The network between the nodes is `ib0`; tell NCCL and gloo. Load
# > `cuda/12.4`. Results go to `$SCRATCH`.
#
# Write the profile, YAML. Two fields to begin with: `gpus: {per_node: 4, request: gres, type: a100}` and `env: {NAME: {value: ..., reason: ...}}`. The others are in `labcode/slurm/script/site.py`; a wrong name is refused with its line and
# a suggestion. Then do the same for a cluster that you have.

# %% tags=["exercise"]
### BEGIN SOLUTION
my_site = """
about: GPU nodes of Atlas
account: bio42
partition: gpu
max_minutes: 1440 # 24 hours
gpus: {per_node: 4, request: gres, type: a100}
cpus: {per_node: 64}
modules: [cuda/12.4]
scratch: $SCRATCH
env:
  NCCL_SOCKET_IFNAME: {value: ib0, reason: the network between the nodes}
  GLOO_SOCKET_IFNAME: {value: ib0, reason: the same for gloo}
"""
### END SOLUTION

# %% tags=["check"]
check("14.2", lambda: l14.site_profile(my_site))

# %% [markdown]
# The check renders a job of two nodes for your profile, lints it, and, if this machine has SLURM, starts for a second another one that emulates Atlas and asks `sbatch --test-only` whether it would take the script.
#
# **Takeaway: read a script as sbatch reads it, and let rules find what eyes pass over. A cluster is ten lines of facts.**
#
# ## 4. The same training on one node and on two
#
# A small GPT, plain DDP, two ranks. First both on one node. `submit` renders, lints and submits; `wait` follows the job to its end and raises if it does not complete.

# %%
MODEL = {"model.num_layers": 1, "model.hidden_size": 256, "model.context_length": 16}
TRAIN = {"train.global_batch": 2, "train.log_every": 1, "train.eval_every": 0, "train.sample_tokens": 0, "train.steps": 30}
def options(values):
    return tuple(f"--{name}={value}" for name, value in values.items())

one = lab.submit(Job("gpt_tiny", options(MODEL | TRAIN), nodes=1, ranks_per_node=2, name="one-node"))
one.wait(echo=False)
print(one.state)
print(*one.log().splitlines()[:3], "...", sep="\n")

# %% [markdown] tags=["exercise"]
# The first line answers the question to ask of **every** new script: is this one job of two ranks, or two jobs of one? Both run, both print a falling loss. A script that starts the ranks wrongly trains the same
# model twice and never says so.
#
# ### Exercise 14.3 · Who is where
#
# On several nodes the line names them: `4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; ...`. Write a function that finds this in a log and returns `{"n1": [0, 1], "n2": [2, 3]}`. Three lines with
# `re` or `split`; other lines have brackets too.

# %% tags=["exercise"]
def ranks_by_node(log):
    """{node: [its ranks]} from the log of a training run on several nodes."""
    ### BEGIN SOLUTION
    inside = re.search(r"ranks? on \d+ nodes \((.+?)\)", log)[1]
    pairs = (part.split(": ") for part in inside.split("; "))
    return {node: [int(rank) for rank in ranks.split(",")] for node, ranks in pairs}
    ### END SOLUTION

# %% tags=["check"]
check("14.3", lambda: l14.ranks_by_node(ranks_by_node))

# %% [markdown]
# Now the same two ranks on two nodes, and the same job otherwise. Each step ends with a ring all-reduce of the gradients. In a ring of $p$ ranks each sends
#
# $$2\,\frac{p-1}{p}\cdot 4N \ \text{bytes}$$
#
# for $N$ parameters of 4 bytes. With $p = 2$ each rank sends its whole gradient once, and now over the network.
#
# The wire between our nodes is memory, too fast to matter. So we slow it down while the job runs, to 400, 200 and 100 Mbit/s each way. **Predict**, for the 811,008 parameters of this model, the bytes
# per step, and what the wire adds to a step at 100 Mbit/s.

# %% tags=["predict"]
bytes_guess = 2 * (1 / 2) * 4 * 811_008
added_s_guess = bytes_guess / (100e6 / 8)  # 8 bits to the byte

# %%
model = GPTConfig(num_layers=1, num_heads=4, hidden_size=256, context_length=16, vocab_size=65)
sent = comm.bytes_sent("all_reduce", 2, 4 * model.num_parameters)
compare("bytes that a rank sends", bytes_guess, sent, within=1.01, unit="B")
endless = {"train.steps": 100_000} if lab.cluster else {}  # until we stop it
two = lab.submit(Job("gpt_tiny", options(MODEL | TRAIN | endless), nodes=2, ranks_per_node=1, name="two-nodes"))
RATES = ["off", "400mbit", "200mbit", "100mbit"]
found = slurm_lab.at_rates(lab, two, RATES, count=8)
print(two.log().splitlines()[0][:60])

# %% tags=["figure"]
first, second = (slurm_lab.steps(run.log()) for run in (one, two))
print(f"loss of step 1: {first[0][1]} on one node, {second[0][1]} on two")
step_s = {rate: min(seconds for *_, seconds in rows) for rate, rows in found.items()}  # other programs only ever add
print(f"a step on two nodes, the link as it is: {step_s['off'] / min(t for *_, t in first):.2f} of that on one")
wires = {rate: sent / (int(rate.removesuffix("mbit")) * 1e6 / 8) for rate in found if rate != "off"}
for rate, wire_s in wires.items():
    compare(f"added to a step at {rate}", wire_s, step_s[rate] - step_s["off"], within=1.5, unit="s")
if wires:
    compare("your prediction, 100mbit", added_s_guess, step_s["100mbit"] - step_s["off"], within=1.5, unit="s")
series = {rate.replace("mbit", " Mbit/s").replace("off", "as it is"): ([s for s, *_ in rows], [1e3 * t for *_, t in rows])
          for rate, rows in found.items()}
picture = plot.lines(series, xlabel="step", ylabel="ms per step", title="One job, its link slowed down three times",
                     reference={f"wire alone at {rate.replace('mbit', ' Mbit/s')}": 1e3 * s for rate, s in wires.items()},
                     alt="Milliseconds per step in four groups: each halving of the link's speed about doubles them, close to the bytes over the speed")
picture.axes[0].legend(frameon=True, framealpha=1)  # above the dashed lines
picture

# %% [markdown]
# The loss is the same to the last digit shown: the second node changes who sits where, not what is computed. On the link as it is two nodes are about as fast as one, since all share your cores (the ratio wanders;
# the quickest step counts). On a slow link each step pays for its bytes: it may be a little less, because DDP sends while backward still computes (lesson 04), or more, for the headers of TCP.
#
# The job still runs. `scancel --signal` sends its ranks the signal that SLURM sends before the time limit; they agree, and all stop after the same step. And, without a word, somebody pulls the plug of node n3.

# %%
if lab.cluster:
    lab.sh("scancel", "--signal=USR1", two.number)
    two.wait(echo=False)
    print(two.state)
    print(*[line[:118] for line in two.log().splitlines() if "stopped by" in line])
    lab.cluster.kill("n3")
for name, bytes_per_s in {"InfiniBand NDR, 400 Gbit/s": 50e9, "Ethernet, 10 Gbit/s": 1.25e9}.items():
    wire_s = comm.time_s("all_reduce", 16, 7e9 * 2, comm.Link(0, bytes_per_s))
    print(f"7 billion gradients of 2 bytes, 16 ranks, {name} for each: {wire_s:.1f} s per step")

# %% [markdown]
# COMPLETED, with a checkpoint. Had SLURM sent the signal, the trap of section 2 would now requeue the job, and its next life would go on after that step. The last lines are the same sum in real sizes: beside the seconds of computing, it
# decides whether two nodes are faster than one.
#
# **Takeaway: read the first line of the log before the loss. Bytes over bandwidth, computed beforehand, says what the second node will cost.**

# %% [markdown]
# ## 5. The network in the logs
#
# On GPUs the ranks talk over NCCL, which chooses a **transport** for each pair of ranks, and says nothing. With `NCCL_DEBUG=INFO` (in a `Job`: `nccl_debug="INFO"`) it tells. **The log below is an example in NCCL's documented form**, for two nodes
# of four GPUs: there is no GPU here, and gloo writes no such log.
#
# Each line has host, process, thread and GPU, and then the interface over which the ranks find each other, the network cards, the order of the **ring**, and for each channel (a ring of its own; the arrows below count them) who sends to whom `via` what:
#
# - **P2P**: from GPU to GPU, over NVLink or PCIe. (`IPC` and `CUMEM` are two ways to share the memory.)
# - **SHM**: through the memory of the host, where the GPUs cannot reach each other.
# - **NET/IB**: RDMA over InfiniBand or RoCE; with `GDRDMA` the card reads the GPU's memory itself. **NET/Socket**: TCP, through the CPU.
#
# **Predict.** Eight ranks in one ring, in order, four on each node: how many of the eight links leave a node?

# %% tags=["predict"]
leaving_guess = 2  # 3 -> 4 and 7 -> 0

# %% tags=["figure", "nbval-check-output"]
text = nccl_example.two_nodes()
for line in text.splitlines()[:9]:
    print(line.replace("gpu01:700:900 [0] NCCL INFO ", "... ")[:112])
good = nccl.parse(text)
host = {rank: place.host for rank, place in good.main.ranks.items()}
print("\nring:", good.main.rings[0], " hosts:", good.main.hosts)
print("inside a node:", *good.main.transports(between_hosts=False), " between nodes:", *good.main.transports(between_hosts=True))
compare("links that leave a node", leaving_guess, sum(host[a] != host[b] for a, b in good.main.pairs()), within=1)
plot.transports(good, title="As it should be",
                alt="Two nodes of four ranks in one ring: P2P inside each node, and two links over InfiniBand between them")

# %% [markdown]
# Now a colleague on the same cluster says that training is slow since Monday. Same nodes, same script. Only the log can tell:

# %% tags=["figure", "nbval-check-output"]
slow = nccl.parse(nccl_example.two_nodes(rdma=False))
for line in dict.fromkeys(line.partition("INFO ")[2] for line in nccl_example.two_nodes(rdma=False).splitlines()):
    if line.startswith(("NET/", "Using network")):
        print(line)
plot.transports(slow, title="Since Monday",
                alt="The same ring of two nodes, but the two links between the nodes are now TCP sockets in another colour")

# %% [markdown] tags=["exercise"]
# `No device found`: NCCL has the library for InfiniBand and sees no card, for instance in a container without `/dev/infiniband`. (With `NCCL_IB_DISABLE=1`, left over from an experiment, this line is missing too.) So it takes TCP, over the slow Ethernet, without an error. The loss is the same. Only the time is not.
#
# ### Exercise 14.4 · Between the nodes
#
# Write the function that would have noticed on Monday: all transports of links whose ends are on different hosts. A `comm` has `links`, each with `source`, `target` and `transport`, and `comm.ranks[rank].host`.

# %% tags=["exercise"]
def between(comm):
    """The transports between hosts, a set of names such as {"NET/IB"}."""
    ### BEGIN SOLUTION
    return {link.transport for link in comm.links if comm.ranks[link.source].host != comm.ranks[link.target].host}
    ### END SOLUTION

# %% tags=["check"]
check("14.4", lambda: l14.between(between))

# %% [markdown]
# **Takeaway: run the first job on a cluster with NCCL_DEBUG=INFO, and look for P2P inside a node and, between nodes, for the site's network: NET/IB, or NET/AWS Libfabric on Slingshot and EFA. NET/Socket is no error, only slow.**
#
# ## 6. The debugging drill
#
# When a job on several nodes does not start, the question is seldom what the code does. Ask in this order: are the nodes there, do they find each other by name, over the right interface, through an open port, and do they run the same code?
#
# The patient is the smallest program that can fail in all these ways: two ranks meet and add 64 numbers.

# %%
HELLO = '''import socket, sys
import torch, torch.distributed as dist
from labcode.comm import bootstrap

HIDDEN = 64
world = bootstrap.start(timeout_s=float(sys.argv[1]))
total = torch.ones(HIDDEN)
dist.all_reduce(total)
print(f"rank {world.rank} on {socket.gethostname()}: {HIDDEN} numbers, each {total[0]:g}")
bootstrap.stop()
'''
Path("runs/hello.py").write_text(HELLO)
lab.hello()

# %% [markdown]
# **First fault.** Debian's installer writes a line `127.0.1.1 own-name` into each machine's `/etc/hosts`. We write it on our nodes, and leave it to gloo to find its address. A rank then asks for its own host name and tells the others what it
# found: *reach me at 127.0.1.1*. For each of them that is itself. The **command** that shows it is `getent`, the **cure** to name the interface.
#
# **Second fault.** The cure, with the wrong name: machines with Docker have an interface `docker0`, which leads nowhere and has the same address on every machine. The **command** shows all interfaces of a node; the **cure** is the one
# whose address the other nodes know, `eth0`.

# %%
with lab.fault("name"):
    lab.hello(interface=None)
    lab.sh("getent", "ahostsv4", "n2", node="n2")
    print("\nand the cure:")
    lab.hello(interface="eth0")
print("\nthe second fault:")
lab.hello(interface="docker0")
lab.sh("ip", "-brief", "-4", "address", node="n1")

# %% [markdown]
# **Third fault.** A firewall between the nodes lets nobody through to n1 on the ports 20000 to 29999. It does not refuse, it swallows. So nothing happens, until a time-out: here 8 seconds, one minute where torchruns meet, 10 to 30 in PyTorch's groups, on a cluster that you pay for.
#
# The **command** tries the port by hand. *Connection refused* is good news: the packets arrive, there is only nobody who listens yet. Silence is the fault. **Cure**: a port from the range that the site leaves open.

# %%
with lab.fault("port"):
    lab.hello(wait_s=8)
    for port in (20017, 18017):
        lab.sh("timeout", "2", "bash", "-c", f"</dev/tcp/n1/{port}", node="n2")
    print("\nand the cure:")
    lab.hello(port=18017)

# %% [markdown]
# **Fourth fault.** Node n2 has an older copy of the program, of 96 numbers: a `pip install` that ran on one node only, a stale container image, a home folder that is not shared. The ranks meet, and then do not agree on the size of a message. With other code of the same sizes
# there would be no error at all, only wrong numbers. The **command**: the checksum of the file that each rank really runs, one line per node.

# %%
with lab.fault("code"):
    lab.hello(kill=False)  # each may speak: the first error does not end the other rank
    lab.sh("srun", "--quiet", "--nodelist=n1,n2", "--ntasks-per-node=1", "--label", "cksum", "runs/hello.py")
print("\nand the cure, the same file on both:")
lab.hello()

# %% [markdown]
# **Fifth fault.** A job wants all three nodes, and no rank ever starts. `squeue` gives the reason, `sinfo` the node. The cures are to ask for fewer nodes, or to leave this one out (`--exclude=n3`), and to tell the people who can switch it on.

# %%
lab.until(lambda: lab.cluster.states().get("n3", "").startswith("down"), timeout_s=150)
lab.sh("sbatch", "--job-name=all", "--nodes=3", "--time=1", "--output=/dev/null", "--wrap", "srun hostname")
lab.until(lambda: any(re.search("DOWN|NotAvail|Resources", job.where) for job in lab.client.queue()), timeout_s=20)
lab.sh(*QUEUE)
lab.sh("sinfo", "--Node", "--format=%N %T %E")
if lab.cluster:
    lab.cluster.boot("n3")
    print("n3 is on again; does the job end?", lab.until(lambda: not lab.client.queue()))

# %% [markdown] tags=["exercise"]
# The drill in one table. The names on the left are for the exercise.
#
# | fault | symptom | command | cure |
# |---|---|---|---|
# | `name` | refused, address 127.0.1.1 | `getent ahostsv4 $(hostname)` on each node | `GLOO_SOCKET_IFNAME`, or mend `/etc/hosts` |
# | `interface` | refused or silent, an address that is not the cluster's | `ip -brief address` on each node | `NCCL_SOCKET_IFNAME`, `GLOO_SOCKET_IFNAME` |
# | `port` | time-out, nobody refuses; torchrun: `connection to the C10d store has failed` | `timeout 2 bash -c '</dev/tcp/HOST/PORT'` | a port that the site leaves open |
# | `code` | sizes differ, a collective mismatch, or wrong numbers; the other ranks: `Connection reset` | `srun cksum FILE`, `srun pip list` | one shared environment, one image |
# | `node` | pending for ever, or NODE_FAIL | `squeue`, `sinfo --Node` | `--exclude`, and tell the site |
#
# ### Exercise 14.5 · From symptom to cause
#
# Five logs of other people's jobs. Name the fault of each, by its name in the table. Some are NCCL's or of larger jobs; the question is the same: which address, refused or silent, and how far did they come?

# %% tags=["exercise"]
for letter, symptom in l14.SYMPTOMS.items():
    print(f"{letter}:  " + symptom.replace("\n", "\n    "))
### BEGIN SOLUTION
my_diagnosis = {"A": "name", "B": "port", "C": "code", "D": "interface", "E": "node"}
### END SOLUTION

# %% tags=["check"]
check("14.5", lambda: l14.diagnosis(my_diagnosis))

# %%
lab.close()

# %% [markdown]
# **Takeaway: a refused connection shows an address, and the address shows the fault. Silence is a firewall or a dead node. Each has one command that proves it, and takes seconds.**
#
# ## From here to GPUs and SLURM
#
# On your cluster: copy `slurm/sites/generic.yaml`, fill in its ten lines, and say
#
#     python -m labcode.slurm render gpt_tiny --site my.yaml --nodes 2 --checkpoint.every 100    # read it first
#     python -m labcode.slurm submit gpt_tiny --site my.yaml --nodes 2 --checkpoint.every 100    # then send it
#
# On GPU nodes there is a rank for each GPU, and they talk over NCCL; nothing else changes. `slurm/cluster up 2` starts the nodes of this lesson in a terminal, with `slow`, `kill`, `netdown` and the rest, to break in your own way.

# %% [markdown]
# ## Recap
#
# | concept | formula or fact | in labcode |
# |---|---|---|
# | job, step, task | the script runs once, `srun` runs tasks | `slurm.script.job` |
# | script | job + site | `slurm.script.render`, `slurm.script.site` |
# | faults | rules with number and reason | `slurm.lint` |
# | submit and follow | state, log, reason of the end | `slurm.run.submit` |
# | second life | USR1, checkpoint, requeue, resume | `train.checkpoint` |
# | cost of the second node | $2\frac{p-1}{p}\cdot 4N$ bytes / bandwidth | `perf.alpha_beta` |
# | who talks over what | P2P, SHM, NET/IB, NET/Socket | `doctor.nccl_log` |
# | a cluster at home | network namespaces, real SLURM | `minislurm` |
#
# ## Sources
#
# - slurm.schedmd.com: `sbatch`, `srun`, `squeue` (reasons), `scontrol` (requeue), `sched_config` (backfill).
# - docs.pytorch.org: torchrun, `torch.distributed` (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, time-outs).
# - docs.nvidia.com/deeplearning/nccl/user-guide: NCCL_DEBUG, NCCL_IB_DISABLE, NCCL_SOCKET_IFNAME.
# - Patarasuk, Yuan 2009, doi 10.1016/j.jpdc.2008.09.002: bytes of a ring all-reduce.
# - NVIDIA DGX H100 datasheet, 2022: 400 Gb/s per GPU.
# - Debian Reference, section 5.1.1: 127.0.1.1 in /etc/hosts.
