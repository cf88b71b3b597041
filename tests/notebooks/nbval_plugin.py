"""A pytest plugin for the nbval runs of `test_lessons.py`.

What a cell writes to stderr is told, and not compared. No sentence of a lesson quotes stderr, and a
busy machine writes there what a quiet one does not (a warning of a library that had to wait). It
becomes a warning of the test, so that it is seen.

A cell that is broken on purpose must raise the error that it names: nbval accepts any, or none.

Every check of an exercise must say that the solution's answer is right, in this execution.
"""

import warnings

from nbformat import from_dict
from nbval.plugin import IPyNbCell

from tools.notebook_run import check_problems, error_matches

MARK = "written to stderr by"
_compare = IPyNbCell.compare_outputs
_run = IPyNbCell.runtest


def compare_outputs(cell, test, ref, skip_compare=None):
    for output in test:
        if output.output_type == "stream" and output.name == "stderr":
            warnings.warn(f"{MARK} cell {cell.cell_num}: {output.text!r}", stacklevel=1)
    return _compare(cell, test, ref, (*(skip_compare or cell.parent.skip_compare), "stderr"))


def runtest(cell):
    _run(cell)
    outputs = from_dict(cell.test_outputs)
    problem = check_problems(cell.cell.source, outputs)
    if problem:
        cell.raise_cell_error(problem)
    expected = cell.cell.metadata.get("raises")
    if expected is None:
        return
    errors = [output for output in outputs if output.output_type == "error"]
    raised = [f"{error.ename}: {error.evalue}" for error in errors]
    if not raised or not error_matches(expected, raised[0]):
        cell.raise_cell_error(f"The cell should raise {expected!r}, but raised {raised}")


IPyNbCell.compare_outputs = compare_outputs
IPyNbCell.runtest = runtest
