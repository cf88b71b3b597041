"""Checks of lesson 14, SLURM and multi-node.

The text of each assertion is a hint. Two exercises are batch scripts, which are linted and then
run: on the lab's cluster, or without SLURM by what stands in for it.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.parse import Script, minutes
from labcode.slurm.lint.shell import BLANK
from labcode.slurm.run.outcome import first_failure
from labcode.slurm.script.site import load
from labcode.teach.check import Exercise, due
from labcode.teach.labs.l14_cluster import Lab, steps
from labcode.teach.labs.l14_scripts import Ended, run_script, run_with_failing_ranks

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
    for line, expected in LOGS.items():
        found = due(_read(ranks_by_node, BEFORE + line + AFTER))
        assert isinstance(found, dict), (
            f"{str(found)[:60]}: give a dictionary, node: list of its ranks"
        )
        assert list(found) == list(expected), (
            f"{line[:60]}...: your nodes are {list(found)}, the line names {list(expected)}"
        )
        for node, ranks in expected.items():
            mine = found[node]
            assert isinstance(mine, Sequence) and not isinstance(mine, str), (
                f"the ranks of {node} are {mine!r}: make them a list"
            )
            assert all(isinstance(rank, int) for rank in mine), (
                f"the ranks of {node} are {list(mine)}: make them whole numbers"
            )
            assert list(mine) == ranks, (
                f"{line[:60]}...: your ranks of {node} are {list(mine)}, the line says {ranks}"
            )


def _read(ranks_by_node: Callable[[str], Any], log: str) -> Any:
    """What the learner's reader returns; if it raises, the hint shows the log."""
    try:
        return ranks_by_node(log)
    except NotImplementedError:
        raise
    except Exception as error:
        shown = " / ".join(line[:60] for line in log.splitlines())
        raise AssertionError(
            f"{type(error).__name__}: {error}; the lines of the log were: {shown}"
        ) from error


# ---- 14.2 and 14.3: what every script has to be

NODES = 2
MAX_MINUTES = 10
FIRST_STEPS = 10
_FIRST_LINE = re.compile(r"^(\d+) ranks? on .+", re.MULTILINE)


def _silent(text: Any) -> Script:
    """The script, once it is a text in which the linter finds nothing.

    Raises:
        AssertionError: It is no text, or there is a finding.
    """
    if text is ...:
        raise NotImplementedError("exercise")
    assert isinstance(text, str), (
        "give the script as a text, between triple quotes; found "
        f"{'None' if text is None else type(text).__name__}"
    )
    assert text.strip(), "the script is empty"
    problems = lint(text, load("local"))
    if problems:
        first = problems[0]
        more = f" ({len(problems) - 1} more after it)" if len(problems) > 1 else ""
        raise AssertionError(f"lint, line {first.line}, {first.rule}: {first.message}{more}")
    return Script(text)


def _asks_for(script: Script, ranks_per_node: int) -> None:
    """The request that the exercise speaks of."""
    nodes = script.number("nodes") or 1
    assert nodes == NODES, f"the job asks for --nodes={nodes}; it was to have {NODES}"
    assert script.minutes is not None and script.minutes <= MAX_MINUTES, (
        f"the time limit is {script.minutes} minutes; at most {MAX_MINUTES} were meant: "
        "how does SLURM read the number that you wrote?"
    )
    assert script.value("output"), "no line says where the log goes, so SLURM chooses a name"
    assert script.sruns, (
        "no line has srun: whatever stands in the script runs once, on the first node"
    )
    found = script.ranks_per_node
    assert found is None or found == ranks_per_node, (
        f"of the ranks, the script starts {found} on a node; {ranks_per_node} were meant"
    )


_GPU_OPTIONS = {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"}
_GPU_OPTIONS.add("tres-per-task")


def _asks_for_no_gpus(script: Script) -> None:
    for directive in script.directives:
        of_gpus = directive.name.startswith("gpus") or "gpu" in directive.value
        if directive.name not in _GPU_OPTIONS or not of_gpus:
            continue
        assert re.search(r"(^|[:=])0$", directive.value), (
            f"line {directive.line} asks for GPUs (--{directive.name}={directive.value}): this job "
            "was to have none"
        )


def _fixes_the_share(script: Script) -> None:
    """That it says how many tasks each node gets, and not only how many there are in all."""
    options = [launch.options for launch in script.sruns]
    on_each = script.option("ntasks-per-node") or any("ntasks-per-node" in one for one in options)
    assert on_each, (
        "the script fixes the number of all tasks, and not the share of each node: SLURM may put "
        "three on one node and one on the other"
    )


def _logs_to_runs(script: Script) -> None:
    output = script.value("output") or ""
    folder = Path(script.value("chdir") or "", output).parent
    assert folder.name == "runs", f"the log goes to {output}, and not to the folder runs"


def _trains_for(script: Script, num_steps: int) -> None:
    """That the training stops after so many steps; the whole recipe would take minutes."""
    for launch in script.trainings:
        if launch.has_unknown_words or not launch.has(r"labcode\.train\b"):
            continue
        told = launch.said("train.steps")
        assert told is not None, (
            f"line {launch.line}: the command has no --train.steps, so it trains all steps of the "
            f"recipe; {num_steps} were meant"
        )
        assert not told.isdigit() or int(told) == num_steps, (
            f"line {launch.line}: --train.steps {told}; {num_steps} were meant"
        )


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


def _ran(ended: Ended, script: Script) -> None:
    """The job was taken, came to an end, and did not fail."""
    assert ended.state != "REFUSED", f"sbatch refuses the script: {ended.log}"
    reason = _reason(ended)
    not_found = re.search("No module named|command not found", reason)
    if not_found and _LOGIN_SHELL.match(script.lines[0]):
        reason += (
            "; the -l in its first line makes bash a login shell, which sets PATH afresh, so that "
            "it is no longer the PATH of this notebook"
        )
    assert ended.state not in ("FAILED", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY"), (
        f"job {ended.number} ended as {ended.state}: {reason}"
    )


def own_script(text: str, lab: Lab) -> None:
    """The learner's batch script: two nodes, a task for each of two ranks per node, ten steps.

    Args:
        text: Of the script.
        lab: Where it runs.
    """
    script = _silent(text)
    agents = [launch for launch in script.trainings if launch.is_agent]
    assert not agents, (
        f"line {agents[0].line} starts torchrun, or a launcher like it, which starts the ranks; "
        "here srun is to start them: each task is a rank"
    )
    _asks_for(script, ranks_per_node=2)
    _fixes_the_share(script)
    _asks_for_no_gpus(script)
    _logs_to_runs(script)
    _trains_for(script, FIRST_STEPS)
    ended = run_script(lab, text, limit_s=240)
    _ran(ended, script)
    assert ended.state != "LATE", (
        f"the job had not ended after four minutes: {_reason(ended)}; who waits for whom?"
    )
    lines = _FIRST_LINE.findall(ended.log)
    assert lines, f"the log names no ranks, so nothing has trained: {_reason(ended)}"
    assert len(lines) == 1, (
        f"the log begins {len(lines)} trainings, of {', '.join(lines)} ranks: they do not know of "
        "each other"
    )
    assert lines[0] == "4", f"the log counts {lines[0]} in its first line; 4 ranks were meant"
    line = _FIRST_LINE.search(ended.log)
    assert line is not None
    if lab.cluster:
        _on_two_nodes(line[0])
    done = [number for number, *_ in steps(ended.log)]
    assert done and done[-1] == FIRST_STEPS, (
        f"the last step in the log is {done[-1] if done else 'none'}; {FIRST_STEPS} were meant"
    )
    print(f"job {ended.number}: {ended.state}. The first line of its log:")
    print(line[0].partition("; grid")[0])
    limit = script.value("time") or ""
    if limit.count(":") == 1:
        print(f"Its time limit: --time={limit} is {minutes(limit):.2g} minutes.")


def _on_two_nodes(line: str) -> None:
    """That the first line of a log has two ranks on each of two nodes."""
    assert "on 2 nodes" in line, f"all ranks are on one node: {line[:70]}"
    counts = [node.count(",") + 1 for node in line.partition(")")[0].split(";")]
    assert counts == [2, 2], (
        f"two ranks on each node were meant, and the log says: {line.partition(', gloo')[0][:70]}"
    )


STEPS = 120
SIGNAL_AT = 10


def lasting_script(text: str, lab: Lab) -> None:
    """The learner's script that saves and requeues when it is told to stop.

    It is sent USR1 when its log shows step 10, as SLURM does before the time limit.

    Args:
        text: Of the script.
        lab: Where it runs.
    """
    script = _silent(text)
    _asks_for(script, ranks_per_node=1)
    asked = script.value("signal") or ""
    assert asked, "no line asks SLURM for a signal before the time limit"
    assert asked.startswith("B:"), f"--signal={asked} goes to the ranks, and not to this script"
    _trains_for(script, STEPS)
    _keeps_its_number(script)
    _signals_the_ranks(script)
    folder = _fixed_folder(script)
    assert not folder, (
        f"the results go to {folder}, whichever job it is: submit the script a second time, and "
        "what does --checkpoint.resume find there?"
    )
    ended = run_script(lab, text, limit_s=420, signal_at_step=SIGNAL_AT)
    _lasted(ended, script)
    last_before, first_after = _resumed(ended.log)
    state = _state_if_ranks_fail(text)
    print(f"job {ended.number}: {ended.state} after {ended.restarts} restart")
    print(f"told to stop, it saved after step {last_before};")
    print(f"the first line of the second attempt is of step {first_after}")
    if state:
        print(f"the same script with ranks that fail: {state}")


def _keeps_its_number(script: Script) -> None:
    submits = script.found(r"(^|[\s;&|'\"({])sbatch\s")
    assert not submits, (
        f"line {submits[0].line} submits another job, with a number of its own: in the figure "
        "both attempts are one job"
    )


def _signals_the_ranks(script: Script) -> None:
    to_itself = script.found(r"\bscancel\s[^;&|]*?(?<!\S)(--batch\b|-[a-z]*b)")
    assert not to_itself, (
        f"line {to_itself[0].line}: whom does scancel signal with --batch? And whom was the signal "
        "to reach?"
    )


def _state_if_ranks_fail(text: str) -> str:
    """How the job ends whose ranks fail, and that nobody signals; "" if that was not found out."""
    ended = run_with_failing_ranks(text)
    if ended is None:
        return ""
    assert ended.restarts == 0, (
        "the same script, with ranks that fail at once, goes back into the queue, although nobody "
        "has told it to stop"
    )
    assert ended.state != "COMPLETED", (
        "the same script, with ranks that fail at once, ends as COMPLETED: with whose exit code "
        "does it end?"
    )
    return ended.state


# what has the same value in every job of this user
_SAME_IN_EVERY_JOB = r"\$\{?(SLURM_JOB_NAME|SLURM_SUBMIT_DIR|USER|HOME|PWD|SCRATCH|WORK)\b\}?"


_JOB_NUMBER = re.compile(r"SLURM_(ARRAY_)?JOB_?ID")
_OUTPUT_OF = re.compile(r"\$\([^()]*\)|`[^`]*`")  # a command whose output bash puts here


def _fixed_folder(script: Script) -> str:
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


def _lasted(ended: Ended, script: Script) -> None:
    """The job stopped, was requeued once, resumed, and came to its end."""
    assert not ended.early, (
        "the job was requeued before the ranks had saved: which line waits for them, after the "
        "signal has ended the first wait?"
    )
    _ran_or_was_killed(ended, script)
    stopped = "stopped by SIGUSR1" in ended.log
    assert ended.signalled, (
        f"the job ended before step {SIGNAL_AT}, so nobody could stop it: {_reason(ended)}"
    )
    assert ended.state != "LATE", (
        "the script was signalled and had not come to its end after seven minutes: "
        f"{'the ranks have saved' if stopped else 'the ranks have not heard of it'}"
    )
    assert ended.state != "AGAIN", (
        "the job went back into the queue a second time, although nobody had told it to stop: it "
        "would do so for ever"
    )
    trained_on = steps(_first_attempt(ended.log))[-1][0] == STEPS
    assert stopped or not trained_on, (
        f"the script was signalled at step {SIGNAL_AT}, and the ranks trained on to the end as if "
        "nothing had happened: arrow 2 is missing, or comes too late"
    )
    assert ended.restarts > 0, "the ranks saved, and the job ended for good: arrow 4 is missing"
    assert stopped, "the job was requeued before the ranks had saved: which line waits for them?"


def _first_attempt(log: str) -> str:
    """The log until the ranks of a second attempt say who they are."""
    begins = [line.start() for line in _FIRST_LINE.finditer(log)]
    return log[: begins[1]] if len(begins) > 1 else log


def _ran_or_was_killed(ended: Ended, script: Script) -> None:
    """As `_ran`; a script that dies of the signal is told so."""
    if ended.state == "FAILED" and ended.signalled and ended.restarts == 0:
        stopped = "stopped by SIGUSR1" in ended.log
        assert stopped, (
            "the signal ended the job, and no rank had saved: what did the script do when it came?"
        )
        raise AssertionError(
            "the ranks saved, but the script ended as FAILED before it was requeued: with "
            "set -e, what happens at a command that returns another code than 0, such as a wait "
            "that a signal has ended?"
        )
    _ran(ended, script)


def _resumed(log: str) -> tuple[int, int]:
    """(the last step before the stop, the first one after it), once these follow each other."""
    stop = re.search(r"stopped by SIGUSR1 after step (\d+)", log)
    assert stop is not None
    after = steps(log[stop.end() :])
    last_before = int(stop[1])
    assert after, f"the second attempt made no step: {_reason(Ended('', log))}"
    first_after = after[0][0]
    assert first_after > last_before, (
        f"the second attempt begins again with step {first_after}, although step {last_before} was "
        "saved: does it look into the folder that the first one wrote to?"
    )
    assert after[-1][0] == STEPS, (
        f"the second attempt ends with step {after[-1][0]}; {STEPS} were meant"
    )
    return last_before, first_after


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
    assert isinstance(answers, Mapping), (
        "give a dictionary, letter: fault; found "
        f"{'None' if answers is None else type(answers).__name__}"
    )
    assert set(answers) == set(FAULTS), (
        f"name a fault for each of {', '.join(FAULTS)}; found {', '.join(map(str, answers))}"
    )
    if any(fault is ... for fault in answers.values()):
        raise NotImplementedError("exercise")
    faults = sorted(FAULTS.values())
    given = {str(fault) for fault in answers.values()}
    unknown = sorted(given.difference(faults))
    assert not unknown, f"{unknown[0]!r} is none of the seven: {', '.join(faults)}"
    for symptom, fault in FAULTS.items():
        given_fault = answers[symptom]
        assert given_fault == fault, f"{symptom} is not {given_fault!r}: {ASKS[symptom]}"


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
