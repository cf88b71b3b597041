"""Running a notebook with this interpreter's own kernel, and tidying what it printed."""

import copy
import os
import re
import sys
import tempfile
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode
from traitlets import default

from tools.lesson_source import LANGUAGE

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 300  # hang detection: a whole lesson is meant to take 90 s
WIDGET = "application/vnd.jupyter.widget-view+json"
ANSI = re.compile(r"\x1b\[[0-9;]*m")
PICTURE = re.compile(r"(data:image/png;base64,[^\"]*)")
CHECK = re.compile(r"\bcheck\(\s*[\"']([\w.]+)[\"']")


class OwnKernelManager(AsyncKernelManager):
    """Starts the `python3` kernel of this environment, whatever else the user has installed."""

    @default("kernel_spec_manager")
    def _own_specs(self) -> KernelSpecManager:
        kernels = os.path.join(sys.prefix, "share", "jupyter", "kernels")
        return KernelSpecManager(kernel_dirs=[kernels])


class RunError(RuntimeError):
    """A cell that failed: the message names the cell, its code and the error."""


def run(
    notebook: NotebookNode, timeout_s: float = CELL_TIMEOUT_S, folder: str | None = None
) -> NotebookNode:
    """Execute a notebook in place, in a scratch folder that is removed afterwards, or in `folder`.

    Raises:
        RunError: A cell raised (and is not tagged `raises-exception`), took too long, or killed the
            kernel.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            cell.execution_count = None
    with tempfile.TemporaryDirectory(prefix="lesson-") as scratch:
        client = NotebookClient(
            notebook,
            kernel_manager_class=OwnKernelManager,
            kernel_name="python3",
            extra_arguments=["--IPKernelApp.log_level=40"],  # errors only: no advice on encryption
            timeout=timeout_s,
            record_timing=False,
            resources={"metadata": {"path": folder or scratch}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise RunError(_explain(notebook, error, timeout_s)) from None
    return tidy(notebook)


def output_problems(notebook: NotebookNode) -> list[str]:
    """What is wrong with the outputs of an executed notebook; empty when all is well."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type == "code":
            problems += [f"cell {number} {problem}" for problem in _cell_problems(cell)]
    return problems


def _cell_problems(cell: NotebookNode) -> list[str]:
    problems = []
    errors = [output for output in cell.outputs if output.output_type == "error"]
    expected = cell.metadata.get("raises")
    if cell.execution_count is None:
        problems.append("was not executed")
    if errors and not expected:
        problems.append(f"holds an error, {errors[0].ename}")
    if expected and not errors:
        problems.append(f"is tagged raises-exception but raised nothing, not {expected!r}")
    if expected and errors:
        raised = f"{errors[0].ename}: {errors[0].evalue}"
        if not error_matches(expected, raised):
            problems.append(f"should raise {expected!r}, but raised {raised[:300]!r}")
    return problems


def error_matches(expected: str, raised: str) -> bool:
    """Whether an error begins with the words that are expected of it; `...` stands for any words.

    Args:
        expected: "ValueError: dp*pp" or "RankError: rank 1: RuntimeError: ... timed out".
        raised: "ValueError: dp*pp*cp*tp = 6 but ...", the name of the error and its whole message.
    """
    words = [re.escape(part.strip()) for part in expected.split("...")]
    return re.match(".*".join(words), raised, re.DOTALL) is not None


def text_of(outputs: list[NotebookNode]) -> str:
    """All that a code cell printed or showed, as plain text; each output begins a line."""
    shown = []
    for output in outputs:
        if output.output_type == "stream":
            shown.append(output.text)
        else:
            shown.append(output.get("data", {}).get("text/plain", ""))
    return "\n".join(text.rstrip("\n") for text in shown)


def verdicts(outputs: list[NotebookNode]) -> list[str]:
    """The lines in which checks say what they found, such as "[v] 4.1 right"."""
    return [line for line in text_of(outputs).splitlines() if re.match(r"\[.\] ", line)]


def check_problems(source: str, outputs: list[NotebookNode]) -> str:
    """What is wrong with the checks of a cell that has the solution; empty if all say `[v]`.

    Args:
        source: The code of the cell.
        outputs: What its execution gave.
    """
    checks = CHECK.findall(source)
    marks = [line[:3] for line in verdicts(outputs)]
    if not checks or marks == ["[v]"] * len(checks):
        return ""
    return f"check {', '.join(checks)} does not say [v]: {text_of(outputs)[:1000]!r}"


def open_exercise_problems(notebook: NotebookNode) -> list[str]:
    """The checks of an executed student notebook that do not say "not done yet"."""
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        checks = CHECK.findall(cell.source) if cell.cell_type == "code" else []
        if not checks:
            continue
        if verdicts(cell.outputs) != [f"[ ] {check} not done yet" for check in checks]:
            text = text_of(cell.outputs)
            problems.append(f"cell {number}, with its exercise open, printed {text!r}")
    return problems


def _explain(
    notebook: NotebookNode,
    error: CellExecutionError | CellTimeoutError | DeadKernelError,
    timeout_s: float,
) -> str:
    """`cell 7: ValueError: ...`, the lines of the cell, and the end of the traceback."""
    number, cell = _failed_cell(notebook, isinstance(error, CellExecutionError))
    shown = "\n".join(f"    | {line}" for line in cell.source.splitlines())
    if isinstance(error, CellTimeoutError):
        return f"cell {number}: no end after {timeout_s:g} s\n{shown}"
    if isinstance(error, DeadKernelError):
        return f"cell {number}: the kernel died\n{shown}"
    output = _first_error(cell)
    trace = ANSI.sub("", "\n".join(output.traceback)) if output else ""
    tail = "\n".join(f"    {line}" for line in trace.splitlines()[-15:])
    return f"cell {number}: {error.ename}: {error.evalue}\n{shown}\n{tail}"


def _failed_cell(notebook: NotebookNode, has_raised: bool) -> tuple[int, NotebookNode]:
    """The last cell that raised, or else the last one that was begun, with its number."""
    last = (0, notebook.cells[-1])
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        if last[0] == 0:
            last = (number, cell)
        was_here = _first_error(cell) is not None if has_raised else bool(cell.execution_count)
        if was_here:
            last = (number, cell)
    return last


def _first_error(cell: NotebookNode) -> NotebookNode | None:
    return next((output for output in cell.outputs if output.output_type == "error"), None)


def tidy(notebook: NotebookNode) -> NotebookNode:
    """Remove what differs between machines and runs: paths, addresses, widgets, versions."""
    notebook.metadata["language_info"] = copy.deepcopy(LANGUAGE)
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_tidy_output(output) for output in _joined(cell.outputs)]
    return notebook


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Outputs without widgets; what is printed is in one piece up to the next thing shown.

    How a stream is cut into messages differs from run to run. Carriage returns are carried out.
    """
    kept = []
    streams: dict[str, NotebookNode] = {}
    for output in outputs:
        data = output.get("data", {})
        was_status = data.get("text/plain", "...") == "" and data.get("text/html", "...") == ""
        if WIDGET in data or was_status:
            continue
        if output.output_type != "stream":
            streams = {}
        elif output.name in streams:
            streams[output.name].text += output.text
            continue
        else:
            streams[output.name] = output
        kept.append(output)
    for output in kept:
        if output.output_type == "stream":
            output.text = re.sub(r"(?m)^.*\r(?=[^\n])", "", output.text)
    return kept


def _tidy_output(output: NotebookNode) -> NotebookNode:
    if output.output_type == "stream":
        output.text = _tidy_text(output.text)
    elif output.output_type == "error":
        output.evalue = _tidy_text(output.evalue)
        output.traceback = [_tidy_text(line) for line in output.traceback]
    else:
        for kind, value in output.data.items():
            if kind.startswith("text/") and isinstance(value, str):
                output.data[kind] = _tidy_text(value)
            elif kind == "image/png":
                output.data[kind] = value.strip()
    return output


def _tidy_text(text: str) -> str:
    pieces = PICTURE.split(text)
    # Not the pictures: in half a million letters without a blank the search takes minutes.
    for i in range(0, len(pieces), 2):
        pieces[i] = _tidy_words(pieces[i])
    return "".join(pieces)


def _tidy_words(text: str) -> str:
    for path, name in ((sys.prefix, ".venv"), (str(ROOT), "."), (str(Path.home()), "~")):
        if len(path) > 1:  # a home of "/" would match everywhere
            text = text.replace(path, name)
    text = re.sub(r"[^\s\"'(<]*/lesson-\w{8}", "<scratch>", text)
    text = re.sub(r"[^\s\"'(<]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    return re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text)
