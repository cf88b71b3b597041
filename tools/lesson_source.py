"""A lesson's source, `solutions/NN_topic.py` (jupytext py:percent), turned into its two notebooks, without running anything.

### BEGIN SOLUTION ... ### END SOLUTION   left out of the student notebook; a stub takes its place
tag `predict`                             the student notebook keeps the names, each set to `...`
tag `solution-only`                       the whole cell is left out of the student notebook
"""

import ast
import hashlib
import re

import jupytext
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = 'raise NotImplementedError("exercise: your code here")'
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


class LessonError(ValueError):
    """A source that cannot be built: one line that says where and what to do."""


def notebooks_of(text: str, name: str):
    """The solution notebook (without outputs) and the student notebook of one source.

    Cell ids come from the content of the cell, so a cell keeps its id when others change around it.

    Args:
        text: The py:percent source.
        name: File name of the source, for messages and for the notebook's metadata.

    Raises:
        LessonError: Unbalanced markers, a solution in a markdown cell, or a cell that is not Python.
    """
    solution, student, seen = [], [], {}
    for number, cell in enumerate(jupytext.reads(text, fmt="py:percent").cells, 1):
        tags = cell.metadata.get("tags", [])
        key = f"{cell.cell_type}\n{cell.source}"
        seen[key] = seen.get(key, 0) + 1
        cell_id = hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest()[:12]
        where = f"{name}, cell {number}"
        blanked = _blanked(cell, tags, where)
        solution.append(_cell(cell.cell_type, _without_markers(cell.source), tags, cell_id))
        if "solution-only" not in tags:
            student.append(_cell(cell.cell_type, blanked, tags, cell_id))
    digest = hashlib.sha256(text.encode()).hexdigest()
    return _notebook(solution, name, digest), _notebook(student, name, digest)


def solution_lines(text: str) -> list[str]:
    """The lines between the markers and in predict cells, stripped: what the student notebook must not show."""
    lines = []
    for cell in jupytext.reads(text, fmt="py:percent").cells:
        tags = cell.metadata.get("tags", [])
        if "predict" in tags:
            lines += cell.source.splitlines()
        else:
            blocks = _blocks(cell.source, "source")
            lines += [line for kind, block, _ in blocks if kind == "solution" for line in block]
    return [line.strip() for line in lines if line.strip()]


def _cell(kind, source, tags, cell_id):
    make = new_code_cell if kind == "code" else new_markdown_cell
    return make(source, id=cell_id, metadata={"tags": list(tags)} if tags else {})


def _notebook(cells, name, digest):
    metadata = {
        "kernelspec": dict(KERNELSPEC),
        "language_info": {"name": "python"},
        "lesson": {"source": name, "sha256": digest},
    }
    notebook = new_notebook(cells=cells, metadata=metadata)
    notebook.nbformat_minor = 5
    return notebook


def _without_markers(source):
    return "\n".join(line for line in source.splitlines() if line.strip() not in (BEGIN, END))


def _blocks(source, where):
    """The source cut at the markers: (kind, lines, number of the first line), kind "text" or "solution"."""
    blocks, kind, lines, start = [], "text", [], 1
    for number, line in enumerate(source.splitlines(), 1):
        if line.strip() in (BEGIN, END):
            wanted = BEGIN if kind == "text" else END
            if line.strip() != wanted:
                raise LessonError(
                    f"{where}, line {number}: found '{line.strip()}' where '{wanted}' was due"
                )
            blocks.append((kind, lines, start))
            kind, lines, start = ("solution" if kind == "text" else "text"), [], number + 1
        elif re.search(r"#+\s*(BEGIN|END)\s+SOLUTION", line, re.IGNORECASE):
            raise LessonError(
                f"{where}, line {number}: write the marker alone on its line, as '{BEGIN}' or '{END}'"
            )
        else:
            lines.append(line)
    if kind == "solution":
        raise LessonError(f"{where}: '{BEGIN}' without '{END}'")
    return [*blocks, (kind, lines, start)]


def _blanked(cell, tags, where):
    """The cell as the student sees it."""
    blocks = _blocks(cell.source, where)
    solved = [block for block in blocks if block[0] == "solution"]
    if cell.cell_type != "code":
        if solved:
            raise LessonError(
                f"{where}: a solution in a markdown cell; tag the cell 'solution-only' instead"
            )
        return cell.source
    if not solved and "predict" not in tags:
        return cell.source
    tree = _parse(cell.source, where)
    if "predict" in tags:
        return _unset(tree, 1, len(cell.source.splitlines()), "", "your prediction")
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    original, lines = cell.source.splitlines(), []
    for kind, block, start in blocks:
        if kind == "text":
            lines += block
            continue
        marker = original[start - 2]
        indent = marker[: len(marker) - len(marker.lstrip())]
        code = next(
            (
                start + i
                for i, line in enumerate(block)
                if line.strip() and not line.strip().startswith("#")
            ),
            None,
        )
        if code is None:
            raise LessonError(f"{where}, line {start}: an empty solution")
        inside = any(node.lineno < start and code <= node.end_lineno for node in functions)
        lines += (
            [indent + STUB]
            if inside
            else _unset(tree, start, start + len(block) - 1, indent, "your answer").splitlines()
        )
    return "\n".join(lines)


def _parse(source, where):
    """The cell as a syntax tree; magics count as comments, so that line numbers stay."""
    plain = re.sub(r"(?m)^(\s*)[%!].*$", r"\1pass", source)
    try:
        return ast.parse(plain)
    except SyntaxError as error:
        raise LessonError(f"{where}, line {error.lineno}: {error.msg}") from None


def _unset(tree, first, last, indent, comment):
    """`name = ...` for each name that lines first..last bind outside a function; `...` if they bind none."""
    names = []

    def visit(node):
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
            if named and first <= child.lineno <= last:
                names.append(child.name)
            elif isinstance(child, FUNCTIONS):
                continue  # what a function binds is its own
            elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                if first <= child.lineno <= last and not isinstance(
                    node, (ast.For, ast.comprehension, ast.NamedExpr)
                ):
                    names.append(child.id)
            elif not isinstance(child, ast.Lambda):
                visit(child)

    visit(tree)
    lines = [f"{indent}{name} = ...  # {comment}" for name in dict.fromkeys(names)]
    return "\n".join(lines or [f"{indent}...  # {comment}"])
