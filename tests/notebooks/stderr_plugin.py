"""A pytest plugin for the nbval runs of `test_lessons.py`: what a cell writes to stderr is told, and not compared.

No sentence of a lesson quotes stderr, and a busy machine writes there what a quiet one does not (a warning of a library
that had to wait). It becomes a warning of the test, so that it is seen.
"""

import warnings

from nbval.plugin import IPyNbCell

MARK = "written to stderr by"
_compare = IPyNbCell.compare_outputs


def compare_outputs(cell, test, ref, skip_compare=None):
    for output in test:
        if output.output_type == "stream" and output.name == "stderr":
            warnings.warn(f"{MARK} cell {cell.cell_num}: {output.text!r}", stacklevel=1)
    return _compare(cell, test, ref, (*(skip_compare or cell.parent.skip_compare), "stderr"))


IPyNbCell.compare_outputs = compare_outputs
