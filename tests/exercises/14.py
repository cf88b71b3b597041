"""Answers to the exercises of lesson 14, SLURM and multi-node.

The scripts run without SLURM, on what stands in for it; tests/slurm/test_slurm_lab.py submits the
lesson's solutions to a real one.
"""

from answers import Answers, changed

from course.labs.l14_cluster import Lab

# ---- 14.1 ranks by node


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


PATTERN = r'r"ranks on \d+ nodes \((.+?)\)"'
PARTS = 'inside.split("; ")'
RANKS = '[int(rank) for rank in ranks.split(", ")]'

RANKS_BY_NODE = Answers(
    solves="ranks_by_node",
    takes_ranks=False,
    right={"split": with_split, "find": with_find},
    wrong={
        "the first bracket of the log": (
            changed(rf'{PATTERN} => r"\((.+?)\)"'),
            "starting on several nodes (attempt 1",
        ),
        "the first line with nodes": (
            changed('inside = => log = log[: log.index("\\n", log.index("nodes"))]\n    inside ='),
            "starting on several nodes (attempt 1",
        ),
        "nodes called n only": (
            changed(f'{PARTS} => re.findall(r"n\\d: [\\d, ]+", inside)'),
            "the line names ['gpu07', 'gpu11']",
        ),
        "text in place of numbers": (changed("int(rank) => rank"), "whole numbers"),
        "text in place of a list": (changed(f"{RANKS} => ranks"), "make them a list"),
        "a list of nodes": (changed("return found => return list(found)"), "give a dictionary"),
        "one rank for each node": (
            changed(f"{RANKS} => [int(ranks[0])]"),
            "your ranks of gpu07 are [0], the line says [0, 1, 2, 3]",
        ),
        "single digits": (
            changed(f'{RANKS} => [int(digit) for digit in re.findall(r"\\d", ranks)]'),
            "your ranks of n2 are [6, 7, 8, 9, 1, 0, 1, 1], the line says",
        ),
        "from the first rank of a node to its last": (
            changed(f"{RANKS} => list(range(int(ranks[0]), int(ranks[-1]) + 1))"),
            "your ranks of n1 are [0, 1, 2], the line says [0, 2]",
        ),
        "forgets to return": (changed("return found => pass"), "it returned None"),
    },
)


# ---- 14.2 a script of one's own


def on_stand_in(answer, ranks):
    """The check cell of a script, on a machine without SLURM."""
    return answer, Lab(None)


SHORT = """\
#!/usr/bin/env bash
#SBATCH -J own -N 2
#SBATCH --ntasks-per-node 2
#SBATCH -t 10
#SBATCH -o ./runs/own-%j.out

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
ADDRESS = "MASTER_ADDR=$first_node"
PORT = "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))"
SHARE = "--ntasks-per-node=2"
TRAIN = "python -m labcode.train gpt_tiny --train.steps 10"
BY_TORCHRUN = (
    "--cpus-per-task=2 torchrun --nnodes=$SLURM_NNODES --nproc-per-node=2 "
    "--rdzv-id=$SLURM_JOB_ID --rdzv-backend=c10d --rdzv-endpoint=$MASTER_ADDR:$MASTER_PORT "
    "-m labcode.train gpt_tiny --train.steps 10"
)


def with_directive(option):
    """One directive more."""
    return changed(f"#SBATCH --time => #SBATCH {option}\n#SBATCH --time")


OWN_SCRIPT = Answers(
    solves="my_script",
    takes_ranks=False,
    real=True,
    cell=on_stand_in,
    right={
        "short options": SHORT,
        # srun is the last command, so that the job ends with its exit code
        "no strict mode": changed("set -euo pipefail\n => "),
        "no GPU, in so many words": with_directive("--gpus-per-node=0"),
        "the share as an option of srun": changed(
            f"{SHARE} => --ntasks=4", f"srun --kill => srun {SHARE} --kill"
        ),
    },
    wrong={
        "None": (None, "give the script as a text"),
        "torchrun": (
            changed(
                f"{SHARE} => --ntasks-per-node=1\n#SBATCH --cpus-per-task=2",
                f"{TRAIN} => {BY_TORCHRUN}",
            ),
            "each task is a rank",
        ),
        "the list of nodes as an address": (
            changed(f"{ADDRESS} => MASTER_ADDR=$SLURM_JOB_NODELIST"),
            "S61",
        ),
        "a fixed address": (changed(f"{ADDRESS} => MASTER_ADDR=n1"), "S25"),
        "a fixed port": (changed(f"{PORT} => MASTER_PORT=29500"), "S26"),
        "ranks that do not end together": (
            changed(" --kill-on-bad-exit=1 => "),
            "(srun python -m labcode.train",
        ),
        "a comment in place of a directive": (
            changed("#SBATCH --nodes => # SBATCH --nodes"),
            "S01",
        ),
        "no time limit": (changed("#SBATCH --time=00:10:00\n => "), "S08"),
        "ten hours": (changed("00:10:00 => 10:00:00"), "the time limit is 600.0 minutes"),
        "without srun": (changed("srun --kill-on-bad-exit=1 python => python"), "S53"),
        "one task on each node": (
            changed(f"{SHARE} => --ntasks-per-node=1"),
            "starts 1 of the ranks on a node; expected is 2",
        ),
        "one node": (changed("--nodes=2 => --nodes=1"), "asks for --nodes=1"),
        "the sum of the tasks": (
            changed(f"{SHARE} => --ntasks=4"),
            "and not the share of each node",
        ),
        "nothing is exported": (changed("export  => "), "MASTER_ADDR and MASTER_PORT"),
        "a misspelt module": (changed("labcode.train => labcode.trian"), "No module named"),
        "all steps of the recipe": (
            changed(" --train.steps 10 => "),
            "the command has no --train.steps",
        ),
        "too few steps": (changed("steps 10 => steps 3"), "--train.steps 3; expected are 10"),
        "GPUs of a node": (with_directive("--gpus-per-node=2"), "asks for GPUs (--gpus-per-node=2"),
        "GPUs as a resource": (with_directive("--gres=gpu:2"), "asks for GPUs (--gres=gpu:2"),
        "a GPU with a name": (with_directive("-G a100:4"), "asks for GPUs (--gpus=a100:4"),
        "the log beside the script": (changed("=runs/%x => =%x"), "and not to the folder runs"),
        "trains nothing": (changed(f"{TRAIN} => python --version"), "the log names no ranks"),
    },
)


# ---- 14.3 a script that lasts

TRAINS = (
    "srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.steps=120 "
    "--checkpoint.every=50 --checkpoint.resume --train.out=runs/long-$SLURM_JOB_ID"
)
BODY = r"""stopped=no
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
IN_THE_TRAP = f"""\
on_signal() {{
    scancel --signal=USR1 $SLURM_JOB_ID
    while kill -0 $ranks 2>/dev/null; do
        wait $ranks || true
    done
    scontrol requeue $SLURM_JOB_ID
    exit 0
}}
trap on_signal USR1
{TRAINS} &
ranks=$!
wait $ranks
"""
WITHOUT_ERREXIT = f"""\
set +e
trap 'echo time is over; told=1; scancel -s USR1 "$SLURM_JOB_ID"' SIGUSR1
code=0
{TRAINS} &
ranks=$!
wait $ranks || code=$?
wait
[ -n "${{told:-}}" ] && scontrol requeue "$SLURM_JOB_ID" && exit 0
exit $code
"""
TRAP = "trap 'stopped=yes' USR1"
FOLDER = '"runs/$SLURM_JOB_ID"'
SCANCEL = 'scancel --signal=USR1 "$SLURM_JOB_ID"'
SECOND_WAIT = '    wait "$ranks" || status=$?\n    if'
REQUEUE = 'scontrol requeue "$SLURM_JOB_ID"'
REQUEUE_IF = f"    if [[ $status == 0 ]]; then\n        {REQUEUE}\n    fi\n"

LASTING_SCRIPT = Answers(
    solves="my_lasting_script",
    takes_ranks=False,
    real=True,
    cell=on_stand_in,
    right={
        "all of it in the trap": changed(f"{BODY} => {IN_THE_TRAP}"),
        "without set -e": changed(f"{BODY} => {WITHOUT_ERREXIT}"),
        "the folder in a variable, from a command": changed(
            "srun --kill => folder=runs/$(printf %06d $SLURM_JOB_ID)\nsrun --kill",
            f'{FOLDER} => "$folder"',
        ),
    },
    wrong={
        "None": (None, "give the script as a text"),
        "the log is emptied": (changed("#SBATCH --open-mode=append\n => "), "S12"),
        "the signal goes to the ranks": (changed("B:USR1 => USR1"), "S14"),
        "no signal is asked for": (
            changed("#SBATCH --signal=B:USR1@120\n => "),
            "no line asks SLURM",
        ),
        "nobody listens": (changed(f"{TRAP}\n => "), "S15"),
        "resume forgotten": (changed(" --checkpoint.resume => "), "S29"),
        "srun in the foreground": (
            changed(f"{BODY} => trap 'scontrol requeue $SLURM_JOB_ID' USR1\n{TRAINS}\n"),
            "S27",
        ),
        "all steps of the recipe": (
            changed("--train.steps 120 => "),
            "the command has no --train.steps",
        ),
        "submits a new job": (changed(f"{REQUEUE} => sbatch $0"), "both attempts are one job"),
        "signals itself": (
            changed("scancel --signal => scancel --batch --signal"),
            "whom does scancel signal with --batch",
        ),
        "a fixed folder": (
            changed(f"{FOLDER} => runs/lasting"),
            "the results go to runs/lasting, whichever job it is",
        ),
        "a folder with the name of the job": (
            changed(f'{FOLDER} => "runs/$SLURM_JOB_NAME"'),
            "submit the script a second time",
        ),
        "a folder with the day, in a variable": (
            changed("srun --kill => out=runs/$(date +%F)\nsrun --kill", f'{FOLDER} => "$out"'),
            "the results go to runs/$(date +%F), whichever job it is",
        ),
        "the ranks are not told": (changed(f"    {SCANCEL}\n => "), "arrow 2 is missing"),
        "nobody puts it back": (changed(f"{REQUEUE_IF} => "), "arrow 4 is missing"),
        "requeued too early": (
            changed(f"{SECOND_WAIT} =>     if"),
            "requeued before the ranks had saved",
        ),
        "requeued in the trap": (
            changed(
                f"    {SCANCEL}\n => ",
                f"{REQUEUE_IF} => ",
                f"'stopped=yes' => 'stopped=yes; {SCANCEL}; {REQUEUE}'",
            ),
            "requeued before the ranks had saved",
        ),
        "a wait that ends the script": (
            changed('wait "$ranks" || status=$?\nif => wait "$ranks"\nif'),
            "what did the script do when it came",
        ),
        "hides a crash": (
            changed('exit "$status"\n => '),
            "ends as COMPLETED: with whose exit code",
        ),
        "requeued after a crash": (
            changed(f'exit "$status" => [[ $status == 0 ]] || {REQUEUE}\nexit "$status"'),
            "with ranks that fail at once, goes back into the queue",
        ),
        "requeued without being told": (
            changed("[[ $stopped == yes ]] => true", f"{SCANCEL} => {SCANCEL} || true"),
            "went back into the queue a second time",
        ),
        "a folder for each attempt": (
            changed(f'{FOLDER} => "runs/${{SLURM_RESTART_COUNT:-0}}"'),
            "does it look into the folder",
        ),
    },
)


# ---- 14.4 from symptom to cause

FAULTS = ("name", "port", "absent", "interface", "node", "slow", "code")
SEVEN = dict(zip("ABCDEFG", FAULTS))

DIAGNOSIS = Answers(
    solves="my_diagnosis",
    takes_ranks=False,
    right={"two lists": SEVEN, "in another order": dict(reversed(SEVEN.items()))},
    wrong={
        "two swapped": (
            changed('"name" => "other"', '"interface" => "name"', '"other" => "interface"'),
            "A is not 'interface'",
        ),
        "the watchdog taken for a firewall": (
            changed('"absent" => "port"'),
            "what is the eighth doing",
        ),
        "slow taken for broken": (changed('"slow" => "code"'), "over what do the nodes talk"),
        "the last wrong": (changed('"code" => "port"'), "how long a tensor is"),
        "one forgotten": (changed('    "C": "absent",\n => '), "for each of"),
        "a word of one's own": (changed('"port" => "firewall"'), "none of the seven"),
        "one of them None": (changed('"port" => None'), "none of the seven"),
        "a list": (list(FAULTS), "give a dictionary"),
        "None": (None, "give a dictionary"),
    },
)

ANSWERS = {
    "14.1": RANKS_BY_NODE,
    "14.2": OWN_SCRIPT,
    "14.3": LASTING_SCRIPT,
    "14.4": DIAGNOSIS,
}
