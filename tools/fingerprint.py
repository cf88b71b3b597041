"""Hashes that a built notebook carries in its metadata, under `lesson`.

sha256   of the source that it was built from
built    of the cells as they were built: they differ once somebody has edited or run them
ran      of the code as it was last run to its end by the builder (student notebooks)
"""

import hashlib
import json
from typing import Any

from nbformat import NotebookNode


def of_cells(notebook: NotebookNode) -> str:
    """The hash of what a reader sees and changes: kinds, texts, tags and outputs of all cells."""
    seen = []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        outputs = cell.get("outputs", [])
        seen.append([cell.cell_type, cell.source, tags, outputs, cell.get("execution_count")])
    return _sha256(seen)


def of_code(notebook: NotebookNode) -> str:
    """The hash of what is executed: the code cells, without outputs."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return _sha256(code)


def is_edited(notebook: NotebookNode) -> bool:
    """Whether somebody has edited or run a student notebook since it was built.

    One without a hash counts as edited: nobody knows, and answers that are lost do not come back.
    """
    return notebook.metadata.get("lesson", {}).get("built") != of_cells(notebook)


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
