"""The exercise of lesson 04 with a script that imports nothing but torch.

What the learner is given is one cell, a whole script with five functions to write:

    def run(folder, epochs):
        ...

    check("4.5", run)

Each function that is written is looked at by itself, on two simulated ranks (`l04_plain_probe`),
and so is `run`. Then the whole script is judged on real ones: on one rank, on two, and on two from
a checkpoint.
"""

import ast
import linecache
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from course.answer import Hint
from course.exercises import l04_plain_probe, rehearsal, scripts
from course.exercises.expect import refuse, settle
from course.exercises.l04_plain_probe import NEEDS, PROBES
from course.exercises.simulated import Outcome

SCRIPT = "train_plain.py"
FOOTER = """

if __name__ == "__main__":
    import sys
    from pathlib import Path

    run(Path("."), epochs=int(sys.argv[1]))
"""
CHECKPOINT = "plain.pt"
EPOCHS = 4
STOP = 2  # epochs before the checkpoint that a run resumes from
# bfloat16 keeps three digits of a gradient, and two ranks round other parts of it than one: the
# solution's losses differ by 0.2 % at most, and by 6 % where the optimizer's state is lost.
ROUNDING = 0.01
# the functions that handle samples, and how these come to the device
HANDLE_SAMPLES = ("loss_of", "train_epoch", "validate")
MOVES = {"to", "cuda"}
OPEN = 'raise NotImplementedError("exercise'
LINE = re.compile(
    r"(?m)^\[rank (\d+)\] epoch (\d+): train ([\d.naif]+) validation ([\d.naif]+) of (\d+)"
)


class _Epoch(NamedTuple):
    """What the script printed after an epoch.

    Args:
        number: Number of the epoch.
        train: Mean loss over the samples of the epoch.
        validation: Mean loss over the validation set.
        count: The samples that the script has counted there.
    """

    number: int
    train: float
    validation: float
    count: int


def script(function: Callable[..., Any] | str, folder: Path | str = "runs") -> None:
    """The learner's cell as a file that torchrun starts on one rank, on two, and on two again.

    Args:
        function: The cell's function `run`, or the text of the cell.
        folder: Where the file `train_plain.py` is written.
    """
    source = function if isinstance(function, str) else cell_of(function)
    lines_of = SCRIPT if isinstance(function, str) else function.__code__.co_filename
    path = Path(folder) / SCRIPT
    path.parent.mkdir(exist_ok=True)
    is_open = _open_functions(source)
    if len(is_open) < len(PROBES):
        _check_source(source)
        _look_at_functions(source, lines_of, is_open)
    if is_open:
        raise _still_open(is_open)
    path.write_text(source + FOOTER)
    (path.parent / CHECKPOINT).unlink(missing_ok=True)
    alone = _run("on 1 rank: ", path, EPOCHS, nproc=1)
    _check_epochs("on 1 rank: ", alone, range(EPOCHS))
    _check_checkpoint("on 1 rank: ", path)
    (path.parent / CHECKPOINT).unlink()
    pair = _run("on 2 ranks: ", path, STOP, nproc=2)
    _check_epochs("on 2 ranks: ", pair, range(STOP))
    _check_same_training(pair, alone)
    _check_checkpoint("on 2 ranks: ", path)
    resumed = _run("from the checkpoint: ", path, EPOCHS, nproc=2)
    _check_resumed(resumed, alone)
    # the learner's own first run begins anew
    (path.parent / CHECKPOINT).unlink()


def cell_of(function: Callable[..., Any]) -> str:
    """The text of the cell that defines a function."""
    return "".join(linecache.getlines(function.__code__.co_filename))


def _open_functions(source: str) -> list[str]:
    """The functions that are still to be written."""
    is_open = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and OPEN in ast.unparse(node).replace("'", '"'):
            is_open.append(node.name)
    return is_open


def _still_open(is_open: list[str]) -> NotImplementedError:
    """What is not done yet, with what is."""
    error = NotImplementedError("exercise: your code here")
    written = [name for name in PROBES if name not in is_open]
    if written:
        error.add_note(f"right so far: {', '.join(written)}; open: {', '.join(is_open)}")
    return error


def _look_at_functions(source: str, lines_of: str, is_open: list[str]) -> None:
    """Each function that is written, on two simulated ranks, and at last `run`, which calls all.

    One that calls an open one has to wait for that.

    Args:
        source: The text of the cell.
        lines_of: The name under which tracebacks know its lines.
        is_open: The functions that are still to be written.
    """
    with l04_plain_probe.watched():
        for name in PROBES:
            if name in is_open or NEEDS.get(name) in is_open:
                continue
            outcome = rehearsal.rehearse(source, lines_of, 2, name, call=l04_plain_probe.look)
            _explain(name, outcome)
            text = next(filter(None, outcome.results), "")
            refuse({text: text}, f"{name}: ")
        if not is_open:
            _explain("run", rehearsal.rehearse(source, lines_of, 2, call=_one_epoch))


def _explain(name: str, outcome: Outcome) -> None:
    """What went wrong on two simulated ranks, with the learner's line, if anything did."""
    case = f"{name}, on 2 ranks: "
    rehearsal.tell(case, "your cell", outcome)
    settle(outcome, case)


def _one_epoch(names: rehearsal.Names) -> None:
    names["run"](Path("."), 1)


# ---- without running it


def _check_source(source: str) -> None:
    unknown = scripts.missing_names(source, "")
    tree = ast.parse(source)
    names = set()
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    mistakes: dict[str, Any] = {
        "the script imports labcode: it is to run where there is only PyTorch": (
            bool({"labcode", "course"} & imported)
        ),
        f"the file would not know the name `{', '.join(unknown[:1])}`: it holds this cell alone": (
            unknown
        ),
    }
    mistakes["the process group is still there at the end: dist.destroy_process_group()"] = (
        "destroy_process_group" not in names
    )
    mistakes[
        "samples stay on the CPU, where no GPU finds them: inputs and targets .to(device)"
    ] = not _moves_samples(tree)
    mistakes[
        "autocast without a dtype is bfloat16 on a CPU and float16 on a GPU, where small gradients "
        "are lost: dtype=torch.bfloat16"
    ] = _has_autocast_without_dtype(tree)
    refuse(mistakes)


def _moves_samples(tree: ast.Module) -> bool:
    """Whether a function that handles samples moves anything; one that is open may yet do it."""
    for function in tree.body:
        if not isinstance(function, ast.FunctionDef) or function.name not in HANDLE_SAMPLES:
            continue
        if OPEN in ast.unparse(function).replace("'", '"'):
            return True
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and node.attr in MOVES:
                return True
    return False


def _has_autocast_without_dtype(tree: ast.Module) -> bool:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or "autocast" not in ast.unparse(node.func):
            continue
        names = [keyword.arg for keyword in node.keywords]
        if len(node.args) < 2 and "dtype" not in names:
            return True
    return False


# ---- what it printed


def _run(case: str, path: Path, epochs: int, *, nproc: int) -> list[_Epoch]:
    output = scripts.run(case, path, str(epochs), nproc=nproc)
    found = LINE.findall(output)
    speakers = {rank for rank, *_ in found}
    mistakes = {
        'nothing like "epoch 0: train 0.1234 validation 0.2345 of 101" was printed': not found,
        "more than one rank prints: let rank 0 alone do it": len(speakers) > 1,
    }
    refuse(mistakes, case)
    return [
        _Epoch(int(number), float(train), float(validation), int(count))
        for _, number, train, validation, count in found
    ]


def _check_epochs(case: str, found: list[_Epoch], expected: range) -> None:
    numbers = [epoch.number for epoch in found]
    is_finite = [math.isfinite(epoch.train + epoch.validation) for epoch in found]
    mistakes = {
        f"it printed the epochs {numbers}, expected {list(expected)}": numbers != list(expected),
        "a loss is not a number": not all(is_finite),
    }
    refuse(mistakes, case)
    is_better = found[-1].train < found[0].train
    refuse({"the loss does not fall: does the optimizer make its steps?": not is_better}, case)


def _check_same_training(pair: list[_Epoch], alone: list[_Epoch]) -> None:
    """Two ranks see the validation set once, and train as one rank does."""
    case = "on 2 ranks: "
    first = pair[0]
    reference = alone[0]
    more = first.count > reference.count
    counted = (
        f"{first.count} samples were counted for validation, and on one rank {reference.count}: "
    )
    mistakes = {
        f"{counted}some stand in the shares of both ranks": more,
        f"{counted}add up the counts of all ranks": first.count < reference.count,
    }
    refuse(mistakes, case)
    for own, other in zip(pair, alone):
        # the validation of the first epoch is that of nearly the same weights
        same_train = _is_near(own.train, other.train)
        same_validation = _is_near(own.validation, other.validation)
        trained = (
            f"epoch {own.number} has the training loss {own.train:.4f}, and on 1 rank "
            f"{other.train:.4f}: are the samples of a step the same, is each loss divided by the "
            "number of micro-batches, and does the last one send?"
        )
        validated = (
            f"epoch {own.number} has the validation loss {own.validation:.4f}, and on 1 rank "
            f"{other.validation:.4f}, though the training is the same: add up sums and counts "
            "over all ranks, and divide once"
        )
        refuse({trained: not same_train, validated: not same_validation}, case)


def _check_resumed(resumed: list[_Epoch], alone: list[_Epoch]) -> None:
    case = "from the checkpoint: "
    numbers = [epoch.number for epoch in resumed]
    expected = list(range(STOP, EPOCHS))
    mistakes = {
        f"it began anew, though {STOP} epochs were done: is the checkpoint read, and the number of "
        "epochs that stands in it?": numbers[:1] == [0],
        f"it printed the epochs {numbers}, expected {expected}": numbers != expected,
    }
    refuse(mistakes, case)
    for own, other in zip(resumed, alone[STOP:]):
        is_same = _is_near(own.train, other.train) and _is_near(own.validation, other.validation)
        other_run = (
            f"epoch {own.number} has the losses {own.train:.4f} and {own.validation:.4f}, and the "
            f"run that went through has {other.train:.4f} and {other.validation:.4f}: do weights "
            "and the optimizer's state come back, and does the sampler know the epoch?"
        )
        refuse({other_run: not is_same}, case)


def _is_near(found: float, expected: float) -> bool:
    return abs(found - expected) <= ROUNDING * abs(expected)


# ---- what it saved


def _check_checkpoint(case: str, path: Path) -> None:
    file = path.parent / CHECKPOINT
    refuse({f"there is no file {CHECKPOINT} in the folder it was given": not file.exists()}, case)
    try:
        content = torch.load(file, weights_only=True)
    except Exception as error:
        first = str(error).partition("\n")[0]
        raise Hint(f"{case}{CHECKPOINT} cannot be read with weights_only: {first}") from None
    tensors = []
    waiting = [("", content)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(name, inner) for inner in value]
        elif isinstance(value, torch.Tensor):
            tensors.append((name, value))
    names = [name for name, _ in tensors]
    halves = [name for name, tensor in tensors if tensor.dtype == torch.bfloat16]
    mistakes = {
        f"{CHECKPOINT} holds no tensor": not tensors,
        "names in the checkpoint begin with `module.`: save the model inside DDP, or nobody can "
        "load it without DDP": any(name.startswith("module.") for name in names),
        f"{', '.join(halves[:1])} is saved in bfloat16: autocast rounds copies, and the weights "
        "stay in float32": halves,
    }
    refuse(mistakes, case)
