"""Checks of lesson 14, SLURM and multi-node.

Two exercises are batch scripts, which are linted and then run: on the lab's cluster, or without
SLURM by what stands in for it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from course.answer import Exercise, Hint, due, is_stub, reason
from course.exercises.expect import refuse
from course.labs.l14_cluster import Lab, steps
from course.labs.l14_scripts import Ended, run_script, run_with_failing_ranks
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.model import BatchJob, minutes
from labcode.slurm.lint.shell import BLANK
from labcode.slurm.run.outcome import first_failure
from labcode.slurm.script.site import load

# ---- 14.1

# The line of a training log that names its ranks, and what a learner should read in it.
LOGS = {
    "2 ranks on 2 nodes (n1: 0; n2: 1), gloo on cpu; "
    "grid dp 2 x pp 1 x cp 1 x tp 1; 8 samples a step": {
        "n1": [0],
        "n2": [1],
    },
    "8 ranks on 2 nodes (gpu07: 0, 1, 2, 3; gpu11: 4, 5, 6, 7), nccl on cuda; "
    "grid dp 2 x pp 2 x cp 1 x tp 2": {
        "gpu07": [0, 1, 2, 3],
        "gpu11": [4, 5, 6, 7],
    },
    "4 ranks on 3 nodes (a-1.site: 0; b: 1, 2; c: 3), gloo on cpu; "
    "grid dp 4 x pp 1 x cp 1 x tp 1": {
        "a-1.site": [0],
        "b": [1, 2],
        "c": [3],
    },
    "4 ranks on 2 nodes (n1: 0, 2; n2: 1, 3), gloo on cpu; "  # as srun --distribution=cyclic does
    "grid dp 4 x pp 1 x cp 1 x tp 1": {
        "n1": [0, 2],
        "n2": [1, 3],
    },
    "12 ranks on 2 nodes (n1: 0, 1, 2, 3, 4, 5; n2: 6, 7, 8, 9, 10, 11), gloo on cpu": {
        "n1": [0, 1, 2, 3, 4, 5],
        "n2": [6, 7, 8, 9, 10, 11],
    },
}
BEFORE = "starting on several nodes (attempt 1: all well) ...\n"
AFTER = "\nstep 1/80 | loss 4.1744 (nats: 1) | 0.1 s/step\n"


def ranks_by_node(ranks_by_node: Callable[[str], dict[str, list[int]]]) -> None:
    """The learner's reader of the first line of a training log.

    Args:
        ranks_by_node: `ranks_by_node(log)` -> {node: [ranks]}.
    """
    for line, truth in LOGS.items():
        found = due(_read(ranks_by_node, BEFORE + line + AFTER))
        if not isinstance(found, dict):
            raise Hint(f"{str(found)[:60]}: give a dictionary, node: list of its ranks")
        case = f"{line[:60]}...: "
        names = f"your nodes are {list(found)}, the line names {list(truth)}"
        refuse({names: found.keys() != truth.keys()}, case)
        for node, ranks in truth.items():
            mine = found[node]
            if not isinstance(mine, Sequence) or isinstance(mine, str):
                raise Hint(f"the ranks of {node} are {mine!r}: make them a list")
            if not all(isinstance(rank, int) for rank in mine):
                raise Hint(f"the ranks of {node} are {list(mine)}: make them whole numbers")
            says = f"your ranks of {node} are {list(mine)}, the line says {ranks}"
            refuse({says: list(mine) != ranks}, case)


def _read(ranks_by_node: Callable[[str], Any], log: str) -> Any:
    """What the learner's reader returns; if it raises, the hint shows the log."""
    try:
        return ranks_by_node(log)
    except Exception as error:
        if is_stub(error):
            raise
        shown = " / ".join(line[:60] for line in log.splitlines())
        raise Hint(f"{reason(error)}; the lines of the log were: {shown}") from error


# ---- 14.2 and 14.3: what every script has to be

NODES = 2
MAX_MINUTES = 10
FIRST_STEPS = 10
_FIRST_LINE = re.compile(r"^(\d+) ranks? on .+", re.MULTILINE)


def _silent(text: Any) -> BatchJob:
    """The script, once it is a text in which the linter finds nothing."""
    if text is ...:
        raise NotImplementedError("exercise")
    if not isinstance(text, str):
        found = "None" if text is None else type(text).__name__
        raise Hint(f"give the script as a text, between triple quotes; found {found}")
    refuse({"the script is empty": not text.strip()})
    problems = lint(text, load("local"))
    if problems:
        first = problems[0]
        more = f" ({len(problems) - 1} more after it)" if len(problems) > 1 else ""
        raise Hint(f"lint, line {first.line}, {first.rule}: {first.message}{more}")
    return BatchJob(text)


def _check_request(script: BatchJob, ranks_per_node: int) -> None:
    """The request that the exercise speaks of."""
    nodes = script.first.number("nodes") or 1
    limit = script.minutes
    started = script.ranks_per_node
    mistakes = {
        f"the job asks for --nodes={nodes}; expected is {NODES}": nodes != NODES,
        f"the time limit is {limit} minutes; at most {MAX_MINUTES} are allowed: how does SLURM "
        "read the number that you wrote?": limit is None or limit > MAX_MINUTES,
        "no line says where the log goes, so SLURM chooses a name": (
            not script.first.value("output")
        ),
        "no line has srun: whatever stands in the script runs once, on the first node": (
            not script.sruns
        ),
        f"the script starts {started} of the ranks on a node; expected is {ranks_per_node}": (
            started not in (None, ranks_per_node)
        ),
    }
    refuse(mistakes)


_GPU_OPTIONS = {
    "gpus",
    "gpus-per-node",
    "gpus-per-socket",
    "gpus-per-task",
    "gres",
    "tres-per-task",
}


def _check_no_gpus(script: BatchJob) -> None:
    for directive in script.directives:
        of_gpus = directive.name.startswith("gpus") or "gpu" in directive.value
        if directive.name not in _GPU_OPTIONS or not of_gpus:
            continue
        asks = (
            f"line {directive.line} asks for GPUs (--{directive.name}={directive.value}), and this "
            "job needs none"
        )
        refuse({asks: not re.search(r"(^|[:=])0$", directive.value)})


def _check_fixed_share(script: BatchJob) -> None:
    """That it says how many tasks each node gets, and not only how many there are in all."""
    options = [launch.options for launch in script.sruns]
    name = "ntasks-per-node"
    on_each = script.first.option(name) or any(name in one for one in options)
    mistakes = {
        "the script fixes the number of all tasks, and not the share of each node: SLURM may put "
        "three on one node and one on the other": not on_each,
    }
    refuse(mistakes)


def _check_log_folder(script: BatchJob) -> None:
    output = script.first.value("output") or ""
    folder = Path(script.first.value("chdir") or "", output).parent
    refuse({f"the log goes to {output}, and not to the folder runs": folder.name != "runs"})


def _check_training(script: BatchJob, num_steps: int) -> None:
    """Check that the training stops after that many steps; the whole recipe would take minutes."""
    for launch in script.trainings:
        if launch.has_unknown_words or not launch.has(r"labcode\.train\b"):
            continue
        told = launch.said("train.steps")
        mistakes = {
            "the command has no --train.steps, so it trains all steps of the recipe; expected are "
            f"{num_steps}": told is None,
            f"--train.steps {told}; expected are {num_steps}": (
                told is not None and told.isdigit() and int(told) != num_steps
            ),
        }
        refuse(mistakes, f"line {launch.line}: ")


def _reason(ended: Ended) -> str:
    """Why a job did not complete, in its own words."""
    what = first_failure(ended.log).what.partition(": export")[0]  # the rest says how to mend it
    lines = [line for line in ended.log.splitlines() if line.strip()]
    own = [line for line in lines if not re.match(r"(srun|slurmstepd[-\w]*):", line)]
    # that a step was ended says nothing of why
    other = [line for line in lines if "*** STEP" not in line]
    last = re.sub(r"/\S*/", "", (own or other or [""])[-1]).partition(": export")[0]
    parts = [what] if what else []
    if last and last.removeprefix("error: ") not in what:
        parts.append(f"the last line of its log is: {last[:100]}")
    return "; ".join(parts) or "its log is empty"


_LOGIN_SHELL = re.compile(r"#!.*\s(--login|-[a-z]*l[a-z]*)\b")


def _ran(ended: Ended, script: BatchJob) -> None:
    """The job was taken, came to an end, and did not fail."""
    why = _reason(ended)
    not_found = re.search("No module named|command not found", why)
    if not_found and _LOGIN_SHELL.match(script.lines[0]):
        why += (
            "; the -l in its first line makes bash a login shell, which sets PATH afresh, so that "
            "it is no longer the PATH of this notebook"
        )
    mistakes = {
        f"sbatch refuses the script: {ended.log}": ended.state == "REFUSED",
        f"job {ended.number} ended as {ended.state}: {why}": (
            ended.state in ("FAILED", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
        ),
    }
    refuse(mistakes)


def own_script(text: str, lab: Lab) -> None:
    """The learner's batch script: two nodes, a task for each of two ranks per node, ten steps.

    Args:
        text: Text of the script.
        lab: Lab that it runs in.
    """
    script = _silent(text)
    for launch in script.trainings:
        launcher = (
            f"line {launch.line} starts torchrun, or a launcher like it, which starts the ranks; "
            "here srun is to start them: each task is a rank"
        )
        refuse({launcher: launch.is_agent})
    _check_request(script, ranks_per_node=2)
    _check_fixed_share(script)
    _check_no_gpus(script)
    _check_log_folder(script)
    _check_training(script, FIRST_STEPS)
    ended = run_script(lab, text, limit_s=240)
    _ran(ended, script)
    line = _one_training(ended)
    if lab.cluster:
        _on_two_nodes(line)
    done = [number for number, *_ in steps(ended.log)]
    last = done[-1] if done else "none"
    refuse({f"the last step in the log is {last}; expected is {FIRST_STEPS}": last != FIRST_STEPS})
    print(f"job {ended.number}: {ended.state}. The first line of its log:")
    print(line.partition("; grid")[0])
    limit = script.first.value("time") or ""
    if limit.count(":") == 1:
        print(f"Its time limit: --time={limit} is {minutes(limit):.2g} minutes.")


def _one_training(ended: Ended) -> str:
    """The first line of the log, which is of one training of four ranks."""
    lines = list(_FIRST_LINE.finditer(ended.log))
    counts = [line[1] for line in lines]
    mistakes = {
        f"the job had not ended after four minutes: {_reason(ended)}; who waits for whom?": (
            ended.state == "LATE"
        ),
        f"the log names no ranks, so nothing has trained: {_reason(ended)}": not lines,
        f"the log begins {len(lines)} trainings, of {', '.join(counts)} ranks: they do not know of "
        "each other": len(lines) > 1,
        f"the first line of the log counts ranks: {', '.join(counts)}; expected are 4": (
            counts != ["4"]
        ),
    }
    refuse(mistakes)
    return lines[0][0]


def _on_two_nodes(line: str) -> None:
    """That the first line of a log has two ranks on each of two nodes."""
    counts = [node.count(",") + 1 for node in line.partition(")")[0].split(";")]
    mistakes = {
        f"all ranks are on one node: {line[:70]}": "on 2 nodes" not in line,
        "expected are two ranks on each node, and the log says: "
        f"{line.partition(', gloo')[0][:70]}": counts != [2, 2],
    }
    refuse(mistakes)


STEPS = 120
SIGNAL_AT = 10
STOPPED = "stopped by SIGUSR1"  # in the log, by the ranks


def lasting_script(text: str, lab: Lab) -> None:
    """The learner's script that saves and requeues when it is told to stop.

    It is sent USR1 when its log shows step 10, as SLURM does before the time limit.

    Args:
        text: Text of the script.
        lab: Lab that it runs in.
    """
    script = _silent(text)
    _check_request(script, ranks_per_node=1)
    asked = script.first.value("signal") or ""
    mistakes = {
        "no line asks SLURM for a signal before the time limit": not asked,
        f"--signal={asked} goes to the ranks, and not to this script": not asked.startswith("B:"),
    }
    refuse(mistakes)
    _check_training(script, STEPS)
    _check_signal_and_requeue(script)
    folder = _fixed_folder(script)
    mistakes = {
        f"the results go to {folder}, whichever job it is: submit the script a second time, and "
        "what does --checkpoint.resume find there?": folder,
    }
    refuse(mistakes)
    ended = run_script(lab, text, limit_s=420, signal_at_step=SIGNAL_AT)
    _lasted(ended, script)
    last_before, first_after = _resumed(ended.log)
    state = _state_if_ranks_fail(text)
    print(f"job {ended.number}: {ended.state} after {ended.restarts} restart")
    print(f"told to stop, it saved after step {last_before};")
    print(f"the first line of the second attempt is of step {first_after}")
    if state:
        print(f"the same script with ranks that fail: {state}")


def _check_signal_and_requeue(script: BatchJob) -> None:
    """No line does the one or the other to what it must not."""
    submits = script.found(r"(^|[\s;&|'\"({])sbatch\s")
    if submits:
        raise Hint(
            f"line {submits[0].line} submits another job, with a number of its own: in the figure "
            "both attempts are one job"
        )
    to_itself = script.found(r"\bscancel\s[^;&|]*?(?<!\S)(--batch\b|-[a-z]*b)")
    if to_itself:
        raise Hint(
            f"line {to_itself[0].line}: whom does scancel signal with --batch? And whom was the "
            "signal to reach?"
        )


def _state_if_ranks_fail(text: str) -> str:
    """How the job ends whose ranks fail, and that nobody signals; "" if that was not found out."""
    ended = run_with_failing_ranks(text)
    if ended is None:
        return ""
    mistakes = {
        "goes back into the queue, although nobody has told it to stop": ended.restarts,
        "ends as COMPLETED: with whose exit code does it end?": ended.state == "COMPLETED",
    }
    refuse(mistakes, "the same script, with ranks that fail at once, ")
    return ended.state


# what has the same value in every job of this user
_SAME_IN_EVERY_JOB = r"\$\{?(SLURM_JOB_NAME|SLURM_SUBMIT_DIR|USER|HOME|PWD|SCRATCH|WORK)\b\}?"


_JOB_NUMBER = re.compile(r"SLURM_(ARRAY_)?JOB_?ID")
_OUTPUT_OF = re.compile(r"\$\([^()]*\)|`[^`]*`")  # a command whose output bash puts here


def _fixed_folder(script: BatchJob) -> str:
    """The folder of the results, if two jobs of this script may have the same; else ""."""
    if re.search(r"\$\{SLURM_(JOB_?ID|RESTART_COUNT):?[-=]", script.text):
        return ""  # `Launch` fills in the value after the dash, which is not the one on a cluster
    for launch in script.trainings:
        folder = launch.said("train.out") or ""
        if not folder or _JOB_NUMBER.search(folder):
            continue
        rest = _OUTPUT_OF.sub("", folder)  # the date, say
        if "$" not in re.sub(_SAME_IN_EVERY_JOB, "", rest):
            return folder.replace(BLANK, " ")
    return ""


def _lasted(ended: Ended, script: BatchJob) -> None:
    """The job stopped, was requeued once, resumed, and came to its end."""
    stopped = STOPPED in ended.log
    died = ended.state == "FAILED" and ended.signalled and ended.restarts == 0
    first = steps(_first_attempt(ended.log))
    mistakes = {
        "the job was requeued before the ranks had saved: which line waits for them, after the "
        "signal has ended the first wait?": ended.early,
        "the signal ended the job, and no rank had saved: what did the script do when it came?": (
            died and not stopped
        ),
        "the ranks saved, but the script ended as FAILED before it was requeued: with set -e, what "
        "happens at a command that returns another code than 0, such as a wait that a signal has "
        "ended?": died,
    }
    refuse(mistakes)
    _ran(ended, script)
    heard = "the ranks have saved" if stopped else "the ranks have not heard of it"
    mistakes = {
        f"the job ended before step {SIGNAL_AT}, so nobody could stop it: {_reason(ended)}": (
            not ended.signalled
        ),
        "the script was signalled and had not come to its end after seven minutes: "
        f"{heard}": ended.state == "LATE",
        "the job went back into the queue a second time, although nobody had told it to stop: it "
        "would do so for ever": ended.state == "AGAIN",
        f"the script was signalled at step {SIGNAL_AT}, and the ranks trained on to the end as if "
        "nothing had happened: arrow 2 is missing, or comes too late": (
            not stopped and bool(first) and first[-1][0] == STEPS
        ),
        "the ranks saved, and the job ended for good: arrow 4 is missing": ended.restarts == 0,
        "the job was requeued before the ranks had saved: which line waits for them?": not stopped,
    }
    refuse(mistakes)


def _first_attempt(log: str) -> str:
    """The log until the ranks of a second attempt say who they are."""
    begins = [line.start() for line in _FIRST_LINE.finditer(log)]
    return log[: begins[1]] if len(begins) > 1 else log


def _resumed(log: str) -> tuple[int, int]:
    """(the last step before the stop, the first one after it), once these follow each other."""
    stop = re.search(rf"{STOPPED} after step (\d+)", log)
    assert stop is not None
    after = [number for number, *_ in steps(log[stop.end() :])]
    if not after:
        raise Hint(f"the second attempt made no step: {_reason(Ended('', log))}")
    last_before = int(stop[1])
    mistakes = {
        f"begins again with step {after[0]}, although step {last_before} was saved: does it look "
        "into the folder that the first one wrote to?": after[0] <= last_before,
        f"ends with step {after[-1]}; expected is {STEPS}": after[-1] != STEPS,
    }
    refuse(mistakes, "the second attempt ")
    return last_before, after[0]


# ---- 14.4

SYMPTOMS = {
    "A": "rank 6: RuntimeError: Gloo connectFullMesh failed with timed out connecting:\n"
    "SO_ERROR: Connection refused, remote=[127.0.1.1]:41877",
    "B": "rank 3: DistNetworkError: The client socket has timed out after 600000ms while trying\n"
    "to connect to (gpu07, 29500).\n"
    "rank 0, on gpu07: DistStoreError: Timed out after 601 seconds waiting for clients.\n"
    "1/8 clients joined.",
    "C": "[rank0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4, "
    "OpType=BROADCAST,\nNumelIn=112, Timeout(ms)=1800000) ran for 1800010 milliseconds\n"
    "(the same on ranks 1, 2, 4, 5, 6, 7; py-spy shows rank 3 in load_vocabulary)",
    "D": "gpu11:71:93 [0] misc/socket.cc NCCL WARN socketStartConnect: "
    "Connect to 172.17.0.1<39741>\nfailed : Connection refused",
    "E": "JOBID  NAME ST NODELIST(REASON)\n"
    "812    train PD (ReqNodeNotAvail, UnavailableNodes:gpu11)",
    "F": "step 900/90000 | loss 3.2110 | 4.1 s/step     (last week 0.6 s/step, the same loss)\n"
    "gpu07:700:900 [0] NCCL INFO Using network Socket",
    "G": "rank 0: what(): op.preamble.length <= op.nbytes. 4194304 vs 3145728.\n"
    "Received data size doesn't match expected size.\n"
    "Is there a distributed collective mismatch in your code?",
}
FAULTS = {
    "A": "name",
    "B": "port",
    "C": "absent",
    "D": "interface",
    "E": "node",
    "F": "slow",
    "G": "code",
}
ASKS = {
    "A": "whose address is 127.0.1.1, and where does a rank learn its own address?",
    "B": "the name was found and nothing was refused: the packets got no answer at all",
    "C": "seven ranks wait in one call; what is the eighth doing?",
    "D": "which interface has the address 172.17.0.1, and is it the one between the nodes?",
    "E": "no rank has started yet: who says no?",
    "F": "nothing is wrong with the numbers: over what do the nodes talk?",
    "G": "the ranks met, and all made the call; they do not agree on how long a tensor is",
}


def diagnosis(answers: Mapping[str, str]) -> None:
    """The learner's fault for each symptom.

    Args:
        answers: {symptom: fault}.
    """
    if answers is ...:
        raise NotImplementedError("exercise")
    if not isinstance(answers, Mapping):
        found = "None" if answers is None else type(answers).__name__
        raise Hint(f"give a dictionary, letter: fault; found {found}")
    if any(fault is ... for fault in answers.values()):
        raise NotImplementedError("exercise")
    if set(answers) != set(FAULTS):
        named = ", ".join(map(str, answers))
        raise Hint(f"name a fault for each of {', '.join(FAULTS)}; found {named}")
    faults = sorted(FAULTS.values())
    for fault in answers.values():
        refuse({f"{fault!r} is none of the seven: {', '.join(faults)}": fault not in faults})
    for symptom, fault in FAULTS.items():
        asks = f"{symptom} is not {answers[symptom]!r}: {ASKS[symptom]}"
        refuse({asks: answers[symptom] != fault})


EXERCISES = {
    "14.1": Exercise(
        check=ranks_by_node,
        praise="whatever the nodes are called, and however many ranks they have",
        hints=(
            "other lines of the log have brackets too, or the word nodes: what has only the line "
            "that you look for?",
            "inside the brackets a semicolon separates the nodes; a colon ends the name of each",
        ),
    ),
    "14.2": Exercise(
        check=own_script,
        praise="one job of four ranks on two nodes, from a script of your own",
        hints=(
            "begin with the head of section 2, and ask of each line whether it still holds: how "
            "many tasks does a node have if every rank is a task?",
            "a rank that srun has started finds its number by itself; where to meet it finds in "
            "two variables, which it inherits only if they are exported",
            "`for problem in lint(my_script): print(problem)` says what the linter thinks",
        ),
    ),
    "14.3": Exercise(
        check=lasting_script,
        praise="a run may now be longer than any time limit",
        hints=(
            "go through the four arrows of the picture: which line of yours is arrow 1, 2, 3, 4?",
            "a trap ends the `wait` that bash is in, although the ranks still run",
            "the job should go back into the queue only if it was told to stop: let the trap set a "
            "variable",
            "both attempts must write into the same folder: which number do they share?",
        ),
    ),
    "14.4": Exercise(
        check=diagnosis,
        praise="seven of seven",
        hints=(
            "ask in the order of the section: did the ranks start, did they meet, did they all "
            "make the call, and was it only slow?",
        ),
    ),
}
