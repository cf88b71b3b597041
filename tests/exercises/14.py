"""Answers to the exercises of lesson 14, SLURM and multi-node.

The scripts run without SLURM, on what stands in for it; tests/slurm/test_slurm_lab.py submits some
of them to a real one.
"""

import re

from answers import Answers

from labcode.teach.exercises import l14
from labcode.teach.labs.l14_cluster import Lab

# ---- 14.1 ranks by node


def with_regex(log):
    inside = re.search(r"ranks? on \d+ nodes \((.+?)\)", log)[1]
    found = {}
    for node, ranks in re.findall(r"([\w.-]+): ([\d, ]+)", inside):
        found[node] = [int(rank) for rank in ranks.split(",")]
    return found


def with_split(log):
    line = next(line for line in log.splitlines() if " ranks on " in line)
    inside = line.split(" nodes (")[1].split(")")[0]
    found = {}
    for part in inside.split(";"):
        node, ranks = part.split(":")
        found[node.strip()] = []
        for rank in ranks.split(","):
            found[node.strip()].append(int(rank))
    return found


def with_find(log):
    """Character by character, as one writes it who knows neither."""
    start = log.index("(", log.index(" ranks on "))
    inside = log[start + 1 : log.index(")", start)]
    return {
        part.strip().partition(": ")[0]: list(map(int, part.partition(": ")[2].split(", ")))
        for part in inside.split("; ")
    }


def line_with_nodes(log):
    """The first line in which that word is."""
    line = next(line for line in log.splitlines() if "nodes" in line)
    return with_split(line)


def first_bracket(log):
    inside = log[log.index("(") + 1 : log.index(")")]
    return {part.split(": ")[0]: [0] for part in inside.split("; ")}


RANKS_BY_NODE = Answers(
    solves="ranks_by_node",
    takes_ranks=False,
    real=True,
    right={"a regular expression": with_regex, "split": with_split, "find": with_find},
    wrong={
        "the first bracket of the log": (first_bracket, "the line names"),
        "text in place of numbers": (
            lambda log: {k: [str(rank) for rank in v] for k, v in with_split(log).items()},
            "whole numbers",
        ),
        "text in place of a list": (
            lambda log: {k: ", ".join(map(str, v)) for k, v in with_split(log).items()},
            "make them a list",
        ),
        "nodes called n only": (
            lambda log: {k: v for k, v in with_split(log).items() if re.fullmatch(r"n\d+", k)},
            "the line names",
        ),
        "a list of nodes": (lambda log: list(with_split(log)), "give a dictionary"),
        "one rank for each node": (
            lambda log: {k: v[:1] for k, v in with_split(log).items()},
            "the line says",
        ),
        "every bracket": (
            lambda log: {
                part.split(": ")[0]: [int(rank) for rank in part.split(": ")[1].split(", ")]
                for part in log[log.index("(") + 1 : log.index(")")].split("; ")
            },
            "starting on several nodes (attempt 1",
        ),
        "single digits": (
            lambda log: {
                k: [int(d) for r in v for d in str(r)] for k, v in with_split(log).items()
            },
            "the line says",
        ),
        "the first line with nodes": (line_with_nodes, "starting on several nodes (attempt 1"),
        "from the first rank of a node to its last": (
            lambda log: {k: list(range(min(v), max(v) + 1)) for k, v in with_split(log).items()},
            "your ranks of n1 are [0, 1, 2], the line says [0, 2]",
        ),
        "forgets to return": (lambda log: with_split(log).clear(), "it returned None"),
    },
)


# ---- 14.2 a script of one's own


def on_stand_in(answer, ranks):
    """The check cell of a script, on a machine without SLURM."""
    return answer, Lab(None)


OWN = """\
#!/bin/bash
#SBATCH --job-name=own
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=00:10:00
#SBATCH --output=runs/%x-%j.log
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 10
"""
SHORT = """\
#!/usr/bin/env bash
#SBATCH -J own -N 2
#SBATCH --ntasks-per-node 2
#SBATCH -t 10
#SBATCH -o runs/own-%j.out

set -e -o pipefail
nodes=( $(scontrol show hostnames $SLURM_JOB_NODELIST) )
MASTER_ADDR=${nodes[0]}
MASTER_PORT=$(expr 20000 + $SLURM_JOB_ID % 10000)
export MASTER_ADDR MASTER_PORT
export OMP_NUM_THREADS=1

srun -K \\
    python -m labcode.train gpt_tiny \\
    --train.steps=10 --train.out=runs/$SLURM_JOB_ID
echo done
"""
WITH_TORCHRUN = """\
#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
#SBATCH --time=5
#SBATCH --output=%x-%j.log
set -euo pipefail
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
port=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 --cpus-per-task=2 python -m torch.distributed.run \\
    --nnodes="$SLURM_NNODES" --nproc-per-node=2 --rdzv-id="$SLURM_JOB_ID" \\
    --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" \\
    -m labcode.train gpt_tiny --train.steps 10
"""


def without(text, line):
    """The text without the lines that contain `line`."""
    return "".join(kept for kept in text.splitlines(keepends=True) if line not in kept)


def with_directive(option):
    """OWN with one more directive."""
    return OWN.replace("#SBATCH --time", f"#SBATCH {option}\n#SBATCH --time")


SUM_IN_SHORT = """\
#SBATCH -J x -N 2 -n 4 -t 00:10:00
#SBATCH -o runs/%j.out
set"""


OWN_SCRIPT = Answers(
    solves="my_script",
    takes_ranks=False,
    real=True,
    cell=on_stand_in,
    right={
        "a task for each rank": OWN,
        "short options": SHORT,
        # srun is the last command, so that the job ends with its exit code
        "no strict mode": without(OWN, "set -euo"),
        "no GPU, in so many words": with_directive("--gpus-per-node=0"),
        "the share as an option of srun": OWN.replace(
            "#SBATCH --ntasks-per-node=2\n", "#SBATCH --ntasks=4\n"
        ).replace("srun --kill", "srun --ntasks-per-node=2 --kill"),
        "the log with a dot": OWN.replace("=runs/%x", "=./runs/%x"),
    },
    wrong={
        "no text": (42, "give the script as a text"),
        "None": (None, "give the script as a text"),
        "torchrun": (WITH_TORCHRUN, "each task is a rank"),
        "torchrun by another name": (
            WITH_TORCHRUN.replace("python -m torch.distributed.run", "torchrun"),
            "each task is a rank",
        ),
        "the list of nodes as an address": (
            re.sub(r"ADDR=.*", "ADDR=$SLURM_JOB_NODELIST", OWN),
            "S61",
        ),
        "the list of nodes in braces": (
            re.sub(r"ADDR=.*", 'ADDR="${SLURM_NODELIST}"', OWN),
            "S61",
        ),
        "ranks that do not end together": (
            OWN.replace(" --kill-on-bad-exit=1", ""),
            "(srun python -m labcode.train",
        ),
        "all on one line": (
            re.sub(r"(ADDR=.*)\n(export .*)\nsrun --kill-on-bad-exit=1", r"\1; \2; srun", OWN),
            "(srun python -m labcode.train",
        ),
        "a comment in place of a directive": (
            OWN.replace("#SBATCH --nodes", "# SBATCH --nodes"),
            "S01",
        ),
        "no time limit": (without(OWN, "--time"), "S08"),
        "ten hours": (OWN.replace("00:10:00", "10:00:00"), "the time limit is 600.0 minutes"),
        "a fixed port": (re.sub(r"PORT=.*", "PORT=29500", OWN), "S26"),
        "a fixed address": (re.sub(r"ADDR=.*", "ADDR=n1", OWN), "S25"),
        "without srun": (OWN.replace("srun --kill-on-bad-exit=1 ", ""), "S53"),
        "one task on each node": (
            OWN.replace("node=2", "node=1"),
            "starts 1 on a node; 2 were meant",
        ),
        "one node": (OWN.replace("nodes=2", "nodes=1"), "asks for --nodes=1"),
        "nothing is exported": (OWN.replace("export ", ""), "MASTER_ADDR and MASTER_PORT"),
        "a misspelt module": (OWN.replace("labcode.train", "labcode.trian"), "No module named"),
        "an unknown option": (OWN.replace("train.steps", "train.step"), "train.step"),
        "all steps of the recipe": (
            OWN.replace(" --train.steps 10", ""),
            "the command has no --train.steps",
        ),
        "the sum of the tasks": (
            OWN.replace("--ntasks-per-node=2", "--ntasks=4"),
            "and not the share of each node",
        ),
        "the sum in short options": (
            re.sub(r"(?s)#SBATCH --job.*?\nset", SUM_IN_SHORT, OWN),
            "and not the share of each node",
        ),
        "GPUs of a node": (with_directive("--gpus-per-node=2"), "asks for GPUs (--gpus-per-node=2"),
        "GPUs as a resource": (with_directive("--gres=gpu:2"), "asks for GPUs (--gres=gpu:2"),
        "GPUs of the job": (with_directive("--gpus=4"), "asks for GPUs (--gpus=4"),
        "a GPU with a name": (with_directive("-G a100:1"), "asks for GPUs (--gpus=a100:1"),
        "the log beside the script": (
            OWN.replace("=runs/%x", "=%x"),
            "and not to the folder runs",
        ),
        "too few steps": (OWN.replace("steps 10", "steps 3"), "10 were meant"),
        "trains nothing": (
            OWN.replace("python -m labcode.train gpt_tiny --train.steps 10", "python --version"),
            "the log names no ranks",
        ),
    },
)


# ---- 14.3 a script that lasts

LASTING = """\
#!/bin/bash
#SBATCH --job-name=lasting
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=00:10:00
#SBATCH --output=runs/%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail

export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

stopped=no
trap 'stopped=yes' USR1

srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 120 \\
    --train.out "runs/$SLURM_JOB_ID" --checkpoint.every 100 --checkpoint.resume &
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
_START, _END = LASTING.split("stopped=no\n")
IN_THE_TRAP = (
    _START
    + """\
on_signal() {
    scancel --signal=USR1 $SLURM_JOB_ID
    while kill -0 $ranks 2>/dev/null; do
        wait $ranks || true
    done
    scontrol requeue $SLURM_JOB_ID
    exit 0
}
trap on_signal USR1
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps=120 \\
    --train.out=runs/again-$SLURM_JOB_ID --checkpoint.every=50 --checkpoint.resume &
ranks=$!
wait $ranks
"""
)
WITHOUT_ERREXIT = (
    _START
    + """\
set +e
trap 'echo time is over; told=1; scancel -s USR1 "$SLURM_JOB_ID"' SIGUSR1
code=0
srun -K python -m labcode.train gpt_tiny --train.steps 120 --train.out runs/long-${SLURM_JOB_ID} \\
    --checkpoint.every 50 --checkpoint.resume &
ranks=$!
wait $ranks || code=$?
wait
[ -n "${told:-}" ] && scontrol requeue "$SLURM_JOB_ID" && exit 0
exit $code
"""
)
_FOLDER_LATER = """\
folder=runs/lasting-$SLURM_JOB_ID
srun"""
_FOLDER_BY_COMMAND = "folder=runs/$(printf %06d $SLURM_JOB_ID)"
REQUEUES_IN_TRAP = (
    _START
    + """\
stopped=no
trap 'stopped=yes; scancel --signal=USR1 $SLURM_JOB_ID; scontrol requeue $SLURM_JOB_ID' USR1
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 120 \\
    --train.out runs/$SLURM_JOB_ID --checkpoint.every 100 --checkpoint.resume &
ranks=$!
status=0
wait $ranks || status=$?
if [[ $stopped == yes ]]; then
    status=0
    wait $ranks || status=$?
fi
exit $status
"""
)
ONE_WAIT = (
    _START
    + """\
stopped=no
trap 'stopped=yes; scancel --signal=USR1 $SLURM_JOB_ID' USR1
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 120 \\
    --train.out runs/$SLURM_JOB_ID --checkpoint.every 100 --checkpoint.resume &
pid=$!
status=0
wait $pid || status=$?
if [ $stopped = yes ]; then scontrol requeue $SLURM_JOB_ID; fi
"""
)
HIDES_A_CRASH = (
    _START
    + """\
stopped=no
trap 'stopped=yes; scancel --signal=USR1 $SLURM_JOB_ID' USR1
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps 120 \\
    --train.out runs/$SLURM_JOB_ID --checkpoint.every 100 --checkpoint.resume &
pid=$!
while kill -0 $pid 2>/dev/null; do wait $pid || true; done
[ "$stopped" = no ] || scontrol requeue "$SLURM_JOB_ID"
"""
)
SECOND_WAIT = """\
    status=0
    wait "$ranks" || status=$?
    if"""

LASTING_SCRIPT = Answers(
    solves="my_lasting_script",
    takes_ranks=False,
    real=True,
    cell=on_stand_in,
    right={
        "a variable": LASTING,
        "all of it in the trap": IN_THE_TRAP,
        "without set -e": WITHOUT_ERREXIT,
        "the folder from a command": LASTING.replace(
            "\nsrun", f"\n{_FOLDER_BY_COMMAND}\nsrun"
        ).replace('"runs/$SLURM_JOB_ID"', '"$folder"'),
        "the folder in a variable": LASTING.replace("\nsrun", f"\n{_FOLDER_LATER}").replace(
            '"runs/$SLURM_JOB_ID"', '"$folder"'
        ),
    },
    wrong={
        "the log is emptied": (without(LASTING, "open-mode"), "S12"),
        "the signal goes to the ranks": (LASTING.replace("B:USR1", "USR1"), "S14"),
        "no signal is asked for": (without(LASTING, "--signal=B"), "no line asks SLURM"),
        "nobody listens": (without(LASTING, "trap "), "S15"),
        "resume forgotten": (LASTING.replace(" --checkpoint.resume", ""), "S29"),
        "srun in the foreground": (
            _START + "trap 'scontrol requeue $SLURM_JOB_ID' USR1\nsrun -K python -m labcode.train "
            "gpt_tiny --train.out runs/a --checkpoint.every 50 --checkpoint.resume\n",
            "S27",
        ),
        "the ranks are not told": (without(LASTING, "scancel"), "arrow 2 is missing"),
        "nobody puts it back": (
            without(LASTING, "scontrol requeue").replace(
                "    if [[ $status == 0 ]]; then\n    fi\n", ""
            ),
            "arrow 4 is missing",
        ),
        "requeued too early": (
            LASTING.replace(SECOND_WAIT, "    status=0\n    if"),
            "requeued before the ranks had saved",
        ),
        "requeued in the trap": (REQUEUES_IN_TRAP, "requeued before the ranks had saved"),
        "one wait": (ONE_WAIT, "requeued before the ranks had saved"),
        "a fixed folder": (
            LASTING.replace('"runs/$SLURM_JOB_ID"', "runs/lasting"),
            "submit the script a second time",
        ),
        "a folder with the name of the job": (
            LASTING.replace('$SLURM_JOB_ID" --ch', '$SLURM_JOB_NAME" --ch'),
            "submit the script a second time",
        ),
        "a folder with the day": (
            LASTING.replace('"runs/$SLURM_JOB_ID"', "runs/last-$(date +%F)"),
            "the results go to runs/last-$(date +%F), whichever job it is",
        ),
        "a folder with the day, in a variable": (
            LASTING.replace("\nsrun", "\nout=runs/$(date +%F)\nsrun").replace(
                '"runs/$SLURM_JOB_ID"', '"$out"'
            ),
            "the results go to runs/$(date +%F), whichever job it is",
        ),
        "hides a crash": (HIDES_A_CRASH, "ends as COMPLETED: with whose exit code"),
        "requeued after a crash": (
            LASTING.replace(
                'exit "$status"',
                'if [[ $status != 0 ]]; then scontrol requeue "$SLURM_JOB_ID"; fi\nexit "$status"',
            ),
            "with ranks that fail at once, goes back into the queue",
        ),
        "signals itself": (
            LASTING.replace("scancel --signal", "scancel --batch --signal"),
            "whom does scancel signal with --batch",
        ),
        "signals itself, in the trap": (
            LASTING.replace("'stopped=yes'", "'stopped=yes; scancel -b -s USR1 $SLURM_JOB_ID'"),
            "whom does scancel signal with --batch",
        ),
        "submits a new job": (
            LASTING.replace('scontrol requeue "$SLURM_JOB_ID"', "sbatch $0"),
            "both attempts are one job",
        ),
        "all steps of the recipe": (
            LASTING.replace("--train.steps 120", ""),
            "the command has no --train.steps",
        ),
        "None": (None, "give the script as a text"),
        "requeued without being told": (
            LASTING.replace("[[ $stopped == yes ]]", "true").replace(
                'scancel --signal=USR1 "$SLURM_JOB_ID"',
                'scancel --signal=USR1 "$SLURM_JOB_ID" || true',
            ),
            "went back into the queue a second time",
        ),
        "a folder for each attempt": (
            LASTING.replace('"runs/$SLURM_JOB_ID"', '"runs/${SLURM_RESTART_COUNT:-0}"'),
            "does it look into the folder",
        ),
        "a wait that ends the script": (
            LASTING.replace('wait "$ranks" || status=$?\nif', 'wait "$ranks"\nif'),
            "what did the script do when it came",
        ),
    },
)


# ---- 14.4 from symptom to cause

SEVEN = dict(l14.FAULTS)

DIAGNOSIS = Answers(
    solves="my_diagnosis",
    takes_ranks=False,
    real=True,
    right={
        "in order": SEVEN,
        "in another order": dict(reversed(SEVEN.items())),
        "letter by letter": {letter: l14.FAULTS[letter] for letter in "GFEDCBA"},
    },
    wrong={
        "two swapped": (SEVEN | {"A": "interface", "D": "name"}, "A is not 'interface'"),
        "the watchdog taken for a firewall": (SEVEN | {"C": "port"}, "what is the eighth doing"),
        "slow taken for broken": (SEVEN | {"F": "code"}, "over what do the nodes talk"),
        "the last wrong": (SEVEN | {"G": "port"}, "how long a tensor is"),
        "one forgotten": (
            {letter: fault for letter, fault in SEVEN.items() if letter != "C"},
            "for each of",
        ),
        "a word of one's own": (SEVEN | {"B": "firewall"}, "none of the seven"),
        "a list": (list(SEVEN.values()), "give a dictionary"),
        "None": (None, "give a dictionary"),
        "one of them None": (SEVEN | {"B": None}, "none of the seven"),
    },
)

ANSWERS = {
    "14.1": RANKS_BY_NODE,
    "14.2": OWN_SCRIPT,
    "14.3": LASTING_SCRIPT,
    "14.4": DIAGNOSIS,
}
