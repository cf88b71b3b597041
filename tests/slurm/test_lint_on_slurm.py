"""What the rules about batch scripts say is what SLURM does: a wrong script, and the right one.

Each pair is linted, which finds the fault in the first alone, and then run on a real SLURM, which
says `wrong` of the first and `right` of the second. NOT_HERE has the rules that this cluster cannot
show, with the reason.
"""

import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from faults import waiting

from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.rules import RULES

pytestmark = pytest.mark.release

# stands for any training: says who it is, waits for a signal if it is told to, and "saves"
TRAIN = """\
import os, signal, sys, time
got = []
signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
who = [os.environ.get(name, "?") for name in ("SLURM_PROCID", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")]
print("rank {} of {} sees {}".format(*who), "on", os.uname().nodename, flush=True)
if "fail" in sys.argv and who[0] == "1":
    sys.exit(1)
if "linger" in sys.argv:
    print("up", flush=True)
    until = time.monotonic() + 8
    while time.monotonic() < until and not got:
        time.sleep(0.05)
    time.sleep(1)
    print("saved" if got else "heard nothing", flush=True)
if "long" in sys.argv:
    time.sleep(5)
    print("still there", flush=True)
"""
# stands for torchrun where only its words and its place matter
AGENT = '#!/bin/sh\necho "agent on $(uname -n): $*"\n'
# what conda's program says where its shell function is missing
CONDA = "#!/bin/sh\necho \"CondaError: Run 'conda init' before 'conda activate'\"\nexit 1\n"
TASKS = "#SBATCH --nodes=2 --ntasks-per-node={}\n"
EACH = "#SBATCH --nodes=2\n"
B = "#SBATCH --signal=B:USR1@60\n"
TO_ALL = "trap 'scancel --signal=USR1 $SLURM_JOB_ID' USR1\n"
MINE = "scontrol show job $SLURM_JOB_ID | grep -o '{}=[^ ]*'\n"
TORCHRUN = "{python} -m torch.distributed.run"


@dataclass(frozen=True)
class Pair:
    """Two scripts and what becomes of them.

    Args:
        wrong: The script with the fault, without its first line.
        shown: Regular expression: what sbatch, the log and the state say of it.
        right: The script without.
        instead: What is said of that.
        signal: Words of scancel that send the signal as SLURM does before the time limit.
    """

    wrong: str
    shown: str
    right: str
    instead: str
    signal: tuple[str, ...] = ()


TO_SCRIPT = ("--batch", "--signal=USR1")
TO_STEPS = ("--signal=USR1",)
PAIRS = {
    "S01": Pair(
        "# SBATCH --nodes=2\necho $SLURM_NNODES nodes\n",
        "^1 nodes",
        "#SBATCH --nodes=2\necho $SLURM_NNODES nodes\n",
        "^2 nodes",
    ),
    "S02": Pair(
        "set -e\n#SBATCH --nodes=2\necho $SLURM_NNODES nodes\n",
        "^1 nodes",
        "#SBATCH --nodes=2\nset -e\necho $SLURM_NNODES nodes\n",
        "^2 nodes",
    ),
    "S04": Pair(
        "#SBATCH --gpu-per-node=1\nhostname\n",
        "unrecognized option",
        "#SBATCH --gpus-per-node=1\nhostname\n",
        "COMPLETED",
    ),
    "S04, an underscore": Pair(
        "#SBATCH --ntasks_per_node=2\nhostname\n",
        "unrecognized option",
        "#SBATCH --ntasks-per-node=2\nhostname\n",
        "COMPLETED",
    ),
    "S05": Pair(
        "#SBATCH --nodes=1\n#SBATCH -N 2\necho $SLURM_NNODES nodes\n",
        "^2 nodes",
        "#SBATCH --nodes=1\necho $SLURM_NNODES nodes\n",
        "^1 nodes",
    ),
    "S06": Pair(
        "#SBATCH --output=$HOME/logs/%j.out\nhostname\n",
        "FAILED",
        "#SBATCH --output=%j.log\nhostname\n",
        "COMPLETED",
    ),
    "S08": Pair(
        EACH + MINE.format("TimeLimit"),
        "TimeLimit=00:10:00",  # the partition's default
        EACH + "#SBATCH --time=3\n" + MINE.format("TimeLimit"),
        "TimeLimit=00:03:00",
    ),
    "S09": Pair(
        "#SBATCH --time=2h\nhostname\n",
        "Invalid --time",
        "#SBATCH --time=2:00:00\nhostname\n",
        "COMPLETED",
    ),
    "S12": Pair(
        "#SBATCH --requeue\necho attempt ${SLURM_RESTART_COUNT:-0}\n"
        "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || scontrol requeue $SLURM_JOB_ID\nsleep 1\n",
        r"\Aattempt 1\n",
        "#SBATCH --requeue --open-mode=append\necho attempt ${SLURM_RESTART_COUNT:-0}\n"
        "[ ${SLURM_RESTART_COUNT:-0} = 1 ] || scontrol requeue $SLURM_JOB_ID\nsleep 1\n",
        r"\Aattempt 0\n(.*\n)*attempt 1\n",
    ),
    "S14": Pair(
        "#SBATCH --signal=USR1@60\ntrap 'echo caught' USR1\nsrun python train.py linger &\n"
        "wait\nwait\n",
        r"\A(?!(.*\n)*caught)(.*\n)*saved",
        B + "trap 'echo caught' USR1\nsrun python train.py linger &\nwait\nwait\n",
        "caught",
        TO_STEPS,
    ),
    "S15": Pair(
        B + "srun python train.py linger\n",
        r"\A(?!(.*\n)*saved)(.*\n)*.*FAILED",
        B + TO_ALL + "srun python train.py linger &\nwait $! || wait $!\n",
        r"saved\n(.*\n)*.*COMPLETED",
        TO_SCRIPT,
    ),
    "S18": Pair(
        EACH + "#SBATCH --ntasks=4 --gpus-per-node=2\necho $SLURM_TASKS_PER_NODE\n",
        "^3,1",
        TASKS.format(2) + "#SBATCH --gpus-per-node=2\necho $SLURM_TASKS_PER_NODE\n",
        r"^2\(x2\)",
    ),
    "S20": Pair(
        "srun -K python nothing.py\necho done\n",
        "COMPLETED",
        "set -euo pipefail\nsrun -K python nothing.py\necho done\n",
        "FAILED",
    ),
    "S21": Pair(
        TASKS.format(1) + "srun python train.py long fail\n",
        "still there",
        TASKS.format(1) + "srun -K python train.py long fail\n",
        r"\A(?!(.*\n)*still there)",
    ),
    "S22": Pair(
        EACH + "./torchrun --nnodes=2 train.py\n",
        r"\A(?!(.*\n)*agent on n2)(.*\n)*agent on n1",
        EACH + "srun -K ./torchrun --nnodes=2 --rdzv-endpoint=$HEAD:0 train.py\n",
        "agent on n2",
    ),
    "S23": Pair(
        EACH + f"srun -K {TORCHRUN} --standalone train.py\n",
        r"rank \d of 1 ",
        EACH + f"srun -K {TORCHRUN} --nnodes=2 --rdzv-backend=c10d --rdzv-endpoint=n1:$((30000 + "
        "SLURM_JOB_ID)) train.py\n",
        r"rank \d of 2 ",
    ),
    "S23, too few agents": Pair(
        EACH + f"srun -n1 {TORCHRUN} --nnodes=2 --rdzv-backend=c10d --rdzv-conf=join_timeout=3 "
        "--rdzv-endpoint=localhost:$((30000 + SLURM_JOB_ID)) train.py\n",
        "RendezvousTimeoutError",
        EACH + f"srun {TORCHRUN} --nnodes=2 --rdzv-backend=c10d --rdzv-conf=join_timeout=60 "
        "--rdzv-endpoint=n1:$((30000 + SLURM_JOB_ID)) train.py\n",
        r"rank \d of 2 ",
    ),
    "S24": Pair(
        "#SBATCH --ntasks-per-node=2\nsrun -K ./torchrun --standalone --nproc-per-node=2 a.py\n",
        "(agent on n1.*\n){2}",
        "#SBATCH --ntasks-per-node=1\nsrun -K ./torchrun --standalone --nproc-per-node=2 a.py\n",
        r"\A(?!(agent on .*\n){2})",
    ),
    "S27": Pair(
        B + TO_ALL + "python train.py linger\n",
        "heard nothing",
        B + TO_ALL + "srun python train.py linger &\nwait $! || wait $!\n",
        "saved",
        TO_SCRIPT,
    ),
    "S40": Pair(
        "#SBATCH --ntasks-per-node=4 --gpus-per-node=2\nsrun -K python train.py\n",
        "(.* sees 0,1 .*\n){4}",
        "#SBATCH --ntasks-per-node=2 --gpus-per-node=2\nsrun -K python train.py\n",
        r"\A(.* sees 0,1 .*\n){2}(?!rank)",
    ),
    "S41": Pair(
        EACH + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
        r"\A(.* sees 0,1 .*\n){2}(?!rank)",
        TASKS.format(2) + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
        r"\A(.* sees 0,1 .*\n){4}",
    ),
    "S53, a task for each GPU": Pair(
        "#SBATCH --ntasks-per-node=2 --gres=gpu:2\npython train.py\n",
        r"\A(rank .*\n){1}(?!rank)",
        "#SBATCH --ntasks-per-node=2 --gres=gpu:2\nsrun -K python train.py\n",
        r"\A(rank .*\n){2}",
    ),
    "S53": Pair(
        EACH + "python train.py\n",
        r"\A(?!(.*\n)*.* on n2)(.*\n)*.* on n1",
        EACH + "srun -K python train.py\n",
        " on n2",
    ),
    "S55": Pair(
        EACH + "srun -K ./torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=n1 t.py\n",
        r"n2: .*--node-rank=0 ",
        EACH + "srun -K bash -c './torchrun --nnodes=2 --node-rank=$SLURM_NODEID --master-addr=n1 "
        "t.py'\n",
        r"n2: .*--node-rank=1 ",
    ),
    "S57": Pair(
        "srun -K python train.py long &\n",
        r"\A(?!(.*\n)*still there)",
        "srun -K python train.py long &\nwait\n",
        "still there",
    ),
    "S58": Pair(
        "#SBATCH --gres=gpu:1\nexport CUDA_VISIBLE_DEVICES=5\npython train.py\n",
        "sees 5 ",
        "#SBATCH --gres=gpu:1\npython train.py\n",
        r"sees \d ",
    ),
    "S59": Pair(
        "#SBATCH --mem=4\n" + MINE.format("MinMemoryNode"),
        "MinMemoryNode=4M",
        "#SBATCH --mem=4G\n" + MINE.format("MinMemoryNode"),
        "MinMemoryNode=4G",
    ),
    "S60": Pair(
        "#SBATCH --export=FOO=1\necho mine: $OF_THE_USER\n",
        "^mine:$",
        "#SBATCH --export=ALL,FOO=1\necho mine: $OF_THE_USER\n",
        "^mine: yes$",
    ),
    "S61": Pair(
        EACH
        + 'export MASTER_ADDR=$SLURM_JOB_NODELIST\ngetent hosts "$MASTER_ADDR" || echo no host\n',
        "no host",
        EACH + 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        'getent hosts "$MASTER_ADDR" || echo no host\n',
        r"\A10\.",
    ),
    "S62, GPUs of the job and of its tasks": Pair(
        "#SBATCH --ntasks=2 --gpus=1 --gpus-per-task=1\nhostname\n",
        "requested tasks differ",
        "#SBATCH --ntasks=2 --gpus=2 --gpus-per-task=1\nhostname\n",
        "COMPLETED",
    ),
    "S62": Pair(
        "#SBATCH --mem=1G --mem-per-cpu=100M\nhostname\n",
        "mutually exclusive",
        "#SBATCH --mem=1G\nhostname\n",
        "COMPLETED",
    ),
    "S63": Pair(
        "#SBATCH --ntasks=2 --gpus-per-task=1\nsrun -K python train.py\n",
        r"\A(.* sees \d .*\n){2}",
        "#SBATCH --ntasks-per-node=2 --gpus-per-node=2\nsrun -K python train.py\n",
        r"\A(.* sees 0,1 .*\n){2}",
    ),
    "S64": Pair(
        "#SBATCH --signal=USR1@60\npython train.py linger\n",
        "heard nothing",
        "#SBATCH --signal=USR1@60\nsrun python train.py linger\n",
        "saved",
        TO_STEPS,
    ),
    "S66": Pair(
        "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\nsrun -K python train.py\n",
        r"\A(?!(.*\n)*.* on n2)(.*\n)*.* on n1",
        "#SBATCH --nodes=1\n#SBATCH hetjob\n#SBATCH --nodes=1\n"
        "srun -K --het-group=0,1 python train.py\n",
        " on n2",
    ),
    "S67": Pair(
        EACH + "set -u\nexport OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\necho on\n",
        "SLURM_CPUS_PER_TASK: unbound variable",
        EACH + "#SBATCH -c 1\nset -u\nexport OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK\necho on\n",
        "^on$",
    ),
    "S68": Pair(
        EACH + "srun -K --nodes=4 python train.py\n",
        "Only allocated 2 nodes asked for 4",
        EACH + "srun -K --nodes=2 python train.py\n",
        " on n2",
    ),
    "S69": Pair(
        "srun python train.py long &\nsrun hostname\nwait\n",
        "step creation temporarily disabled",
        "srun --overlap python train.py long &\nsrun --overlap hostname\nwait\n",
        r"\A(?!(.*\n)*.*disabled)(.*\n)*n1\n",
    ),
    "S69, the memory of the job": Pair(
        "#SBATCH --ntasks=2 --mem=900M\nsrun -n1 -c1 python train.py long &\n"
        "srun -n1 -c1 hostname &\nwait\n",
        "step creation temporarily disabled",
        "#SBATCH --ntasks=2 --mem=900M\nsrun -n1 -c1 --mem=300M python train.py long &\n"
        "srun -n1 -c1 --mem=300M hostname &\nwait\n",
        r"\A(?!(.*\n)*.*disabled)(.*\n)*n1\n",
    ),
    "S69, the GPUs of the job": Pair(
        "#SBATCH --ntasks=2 --mem=900M --gres=gpu:2\n"
        "srun -n1 --exact --mem=300M python train.py long &\n"
        "srun -n1 --exact --mem=300M hostname &\nwait\n",
        "step creation temporarily disabled",
        "#SBATCH --ntasks=2 --mem=900M --gres=gpu:2\n"
        "srun -n1 --exact --mem=300M --gres=gpu:1 python train.py long &\n"
        "srun -n1 --exact --mem=300M --gres=gpu:1 hostname &\nwait\n",
        r"\A(?!(.*\n)*.*disabled)(.*\n)*n1\n",
    ),
    "S69, in a loop": Pair(
        "for one in a b; do\n    srun python train.py long &\ndone\nwait\n",
        "step creation temporarily disabled",
        "for one in a b; do\n    srun --overlap python train.py long &\ndone\nwait\n",
        r"\A(?!(.*\n)*.*disabled)(.*\n)*still there\n",
    ),
    "S70": Pair(
        TASKS.format(2) + "srun -K --ntasks-per-node=1 python train.py\n",
        r"(rank .*\n){4}",
        TASKS.format(2) + "srun -K --ntasks=2 python train.py\n",
        r"\A(rank .*\n){2}(?!rank)",
    ),
    "S70, nodes without a task": Pair(
        "#SBATCH --nodes=2 --ntasks=1\necho $SLURM_NNODES nodes\n",
        "^1 nodes",
        "#SBATCH --nodes=2 --ntasks=2\necho $SLURM_NNODES nodes\n",
        "^2 nodes",
    ),
    "S70, a number beside a maximum": Pair(
        "#SBATCH --nodes=1 --ntasks=1 --ntasks-per-node=2\nsrun -K python train.py\n",
        r"\A(rank .*\n){1}(?!rank)",
        "#SBATCH --nodes=1 --ntasks=2 --ntasks-per-node=2\nsrun -K python train.py\n",
        r"\A(rank .*\n){2}",
    ),
    "S71": Pair(
        "#SBATCH --signal=USR1@60\nsrun -K bash -c 'python train.py linger; echo end'\n",
        "User defined signal 1",
        "#SBATCH --signal=USR1@60\nsrun -K bash -c 'cd .; exec python train.py linger'\n",
        "saved\n(.*\n)*.*COMPLETED",
        TO_STEPS,
    ),
    "S72": Pair(
        "#SBATCH --nodes=1 --exclusive -c 1\nsrun -K -c 1 python train.py\n",
        r"\A(rank .*\n){4}",
        "#SBATCH --nodes=1 --exclusive -c 1\nsrun -K -n 1 -c 1 python train.py\n",
        r"\A(rank .*\n){1}(?!rank)",
    ),
    "S73": Pair(
        "PATH=$PWD:$PATH\nconda activate env\n",
        "Run 'conda init' before 'conda activate'",
        "PATH=$PWD:$PATH\nsource conda.sh\nconda activate env\n",
        "^activate env in this shell$",
    ),
    "S74": Pair(
        EACH + "srun -K ./mpirun python train.py\n",
        r"\A(agent on .*\n){2}",
        EACH + "./mpirun python train.py\n",
        r"\A(agent on .*\n){1}(?!agent)",
    ),
}
NOT_HERE = {
    "S03": "a script of text alone: held by the next test",
    "S11": "an array: held by a test of its own",
    "S16": "SLURM looks at the clock every half minute",
    "S25": "a name of another cluster",
    "S26": "two jobs, and the port of one machine",
    "S28": "held by tests/slurm/test_preemption.py",
    "S29": "labcode's own; held by tests/slurm/test_preemption.py",
    "S35": "needs a cluster that binds cores",
    "S43": "compares with the job that the script was made for",
    "S46": "NCCL's and PyTorch's; held by tests/unit/test_variables.py",
    "S47": "a site's numbers; held by the next test",
    "S51": "held by tests/slurm/test_preemption.py",
    "S52": "labcode's own",
    "S56": "a time-out of minutes",
    "S65": "an array: held by a test of its own",
    "S75": "needs pyxis or Apptainer",
}


def test_each_rule_is_confirmed_or_says_why_it_is_not():
    numbers = {rule.number for rule in RULES}
    shown = {name[:3] for name in PAIRS}
    assert shown | set(NOT_HERE) == numbers
    assert not shown & set(NOT_HERE)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(TRAIN)
    for name, text in (("torchrun", AGENT), ("mpirun", AGENT), ("conda", CONDA)):
        program = tmp_path / name
        program.write_text(text)
        program.chmod(0o755)
    (tmp_path / "conda.sh").write_text('conda() { echo "$* in this shell"; }\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OF_THE_USER", "yes")
    return tmp_path


def submitted(cluster, name, text, shebang="#!/bin/bash\n"):
    """(The job's number, "") or (None, what sbatch said against it)."""
    Path(name).write_text(shebang + text)
    log = () if "--output" in text else (f"--output={name}.out",)
    said = cluster.exec(["sbatch", "--parsable", *log, name], check=False)
    return (said.stdout.strip(), "") if said.returncode == 0 else (None, said.stderr)


def states(cluster, number):
    said = cluster.exec(["scontrol", "--oneliner", "show", "job", number], check=False).stdout
    return re.findall(r"JobState=(\w+)", said)


def told(cluster, name, text, signal=()):
    """What sbatch, the log and the last state say of a script."""
    number, refused = submitted(cluster, name, text)
    if number is None:
        return refused
    log = Path(f"{name}.out")
    if signal:
        up = waiting.comes(lambda: log.exists() and "up\n" in log.read_text(), 60, 0.1)
        assert up, states(cluster, number)
        cluster.exec(["scancel", *signal, number])
    over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY"}
    ended = waiting.comes(lambda: set(states(cluster, number)) <= over, 120, 0.2)
    assert ended, states(cluster, number)
    time.sleep(0.2)  # the log is written by another node
    written = log.read_text() if log.exists() else ""
    return written + "\n" + " ".join(states(cluster, number))


@pytest.mark.parametrize("name", PAIRS)
def test_slurm_does_what_the_rule_says(cluster2, folder, name):
    pair = PAIRS[name]
    number = name[:3]
    wrong, right = (text.replace("{python}", sys.executable) for text in (pair.wrong, pair.right))
    assert number in {problem.rule for problem in lint("#!/bin/bash\n" + wrong)}
    assert number not in {problem.rule for problem in lint("#!/bin/bash\n" + right)}
    signals = [pair.signal, pair.signal]
    if number == "S14":  # there the right script gets the signal
        signals[1] = TO_SCRIPT
    for which, text, expected, signal in zip(
        ("wrong", "right"), (wrong, right), (pair.shown, pair.instead), signals
    ):
        said = told(cluster2, which, text, signal)
        assert re.search(expected, said, re.MULTILINE), f"{which}: {said}"


def test_sbatch_refuses_what_the_rules_of_the_first_line_and_of_the_site_refuse(cluster2, folder):
    for text, shebang, message in (
        ("hostname\n", "", "does not look like a batch script"),
        ("hostname\r\n", "#!/bin/bash\r\n", "DOS line breaks"),
        ("#SBATCH --gres=gpu:9\n", "#!/bin/bash\n", "node configuration is not available"),
        ("#SBATCH --nodes=9\n", "#!/bin/bash\n", "More processors requested|not available"),
    ):
        number, said = submitted(cluster2, "refused", text, shebang)
        assert number is None and re.search(message, said), said


def completed(cluster, script):
    """The number of a job that has come to its end."""
    number, refused = submitted(cluster, "array", script)
    ended = waiting.comes(lambda: set(states(cluster, number)) == {"COMPLETED"}, 120, 0.5)
    assert ended, refused or states(cluster, number)
    return number


def test_the_number_of_the_last_task_is_that_of_the_array(cluster2, folder):
    again = (
        "#SBATCH --array=0-1 --requeue --open-mode=append --output=%A_%a.out\n"
        "echo attempt ${SLURM_RESTART_COUNT:-0}\nsleep 1\n"
        "if [ $SLURM_ARRAY_TASK_ID-${SLURM_RESTART_COUNT:-0} = 1-0 ]; then\n"
        "    scontrol requeue {}\nfi\nsleep 2\n"
    )
    for number_of, attempts in (
        ("$SLURM_JOB_ID", 2),
        ("${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}", 1),
    ):
        script = again.replace("{}", number_of)
        rules = {problem.rule for problem in lint("#!/bin/bash\n#SBATCH --time=3\n" + script)}
        assert rules == ({"S65"} if attempts == 2 else set())
        number = completed(cluster2, script)
        first = Path(f"{number}_0.out").read_text()
        assert len(re.findall("^attempt", first, re.MULTILINE)) == attempts, first


def test_tasks_of_an_array_whose_log_has_no_task_share_it(cluster2, folder):
    for log, files in (("%A.log", 1), ("%A_%a.log", 2)):
        script = f"#SBATCH --array=0-1 --output={log}\necho $SLURM_ARRAY_TASK_ID\n"
        rules = {problem.rule for problem in lint("#!/bin/bash\n#SBATCH --time=3\n" + script)}
        assert rules == ({"S11"} if files == 1 else set())
        number = completed(cluster2, script)
        assert len(list(folder.glob(f"{number}*.log"))) == files
