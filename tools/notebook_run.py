"""Running a notebook with this interpreter's own kernel, and tidying what it printed."""

import os
import re
import sys
import tempfile
from pathlib import Path

from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from traitlets import default

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 300  # hang detection: a whole lesson is meant to take 90 s

ANSI = re.compile(r"\x1b\[[0-9;]*m")


class OwnKernelManager(AsyncKernelManager):
    """Starts the `python3` kernel of the environment that runs this, whatever the user has installed elsewhere."""

    @default("kernel_spec_manager")
    def _own_specs(self):
        return KernelSpecManager(
            kernel_dirs=[os.path.join(sys.prefix, "share", "jupyter", "kernels")]
        )


class RunError(RuntimeError):
    """A cell that failed: the message names the cell, its code and the error."""


def run(notebook, timeout_s: float = CELL_TIMEOUT_S, folder: str | None = None):
    """Execute a notebook in place, in a scratch folder that is removed afterwards, or in `folder`.

    Raises:
        RunError: A cell raised (and is not tagged `raises-exception`), took too long, or killed the kernel.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory(prefix="lesson-") as scratch:
        client = NotebookClient(
            notebook,
            kernel_manager_class=OwnKernelManager,
            kernel_name="python3",
            extra_arguments=[
                "--IPKernelApp.log_level=40"
            ],  # errors only: no advice about encryption
            timeout=timeout_s,
            record_timing=False,
            resources={"metadata": {"path": folder or scratch}},
        )
        try:
            client.execute()
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise RunError(_explain(notebook, error, timeout_s)) from None
    return tidy(notebook)


def _explain(notebook, error, timeout_s):
    """`cell 7: ValueError: ...`, the lines of the cell, and the end of the traceback."""
    code = [
        (number, cell) for number, cell in enumerate(notebook.cells, 1) if cell.cell_type == "code"
    ]
    raised = [pair for pair in code if any(out.output_type == "error" for out in pair[1].outputs)]
    begun = [pair for pair in code if pair[1].execution_count]
    number, cell = ((raised if isinstance(error, CellExecutionError) else begun) or code)[-1]
    shown = "\n".join(f"    | {line}" for line in cell.source.splitlines())
    if not isinstance(error, CellExecutionError):
        what = (
            f"no end after {timeout_s:g} s"
            if isinstance(error, CellTimeoutError)
            else "the kernel died"
        )
        return f"cell {number}: {what}\n{shown}"
    output = next((out for out in cell.outputs if out.output_type == "error"), None)
    trace = ANSI.sub("", "\n".join(output.traceback)) if output else ""
    tail = "\n".join(f"    {line}" for line in trace.splitlines()[-15:])
    return f"cell {number}: {error.ename}: {error.evalue}\n{shown}\n{tail}"


def tidy(notebook):
    """Remove from the outputs what differs between machines and runs: paths, addresses, widgets, versions."""
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [_tidy_output(output) for output in _joined(cell.outputs)]
    return notebook


def _joined(outputs):
    """Outputs without widgets; the pieces of one stream in one, with carriage returns carried out."""
    kept, streams = [], {}
    for output in outputs:
        if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
            continue
        if output.output_type == "stream" and output.name in streams:
            streams[output.name].text += output.text
            continue
        if output.output_type == "stream":
            streams[output.name] = output
        kept.append(output)
    for output in streams.values():
        output.text = re.sub(r"(?m)^.*\r(?=[^\n])", "", output.text)
    return kept


def _tidy_output(output):
    if output.output_type == "stream":
        output.text = _tidy_text(output.text)
    elif output.output_type == "error":
        output.evalue = _tidy_text(output.evalue)
        output.traceback = [_tidy_text(line) for line in output.traceback]
    else:
        for kind, value in output.data.items():
            if kind.startswith("text/") and isinstance(value, str):
                output.data[kind] = _tidy_text(value)
    return output


def _tidy_text(text):
    for path, name in ((sys.prefix, ".venv"), (str(ROOT), "."), (str(Path.home()), "~")):
        if len(path) > 1:  # a home of "/" would match everywhere
            text = text.replace(path, name)
    text = re.sub(r"[^\s\"'(<]*/lesson-\w{8}", "<scratch>", text)
    text = re.sub(r"[^\s\"'(<]*/ipykernel_\d+/\d+\.py", "<cell>", text)
    return re.sub(r"\b0x[0-9a-f]{6,}", "0x...", text)
