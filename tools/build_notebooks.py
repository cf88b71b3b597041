"""Build the notebooks of the course from their sources: `python -m tools.build_notebooks [NN ...] [--check] [--force]`.

For each `solutions/NN_topic.py`: the solution notebook beside it, executed, and the student notebook in `notebooks/`.
A lesson whose code did not change is not executed again, and a file whose content did not change is not written.
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from tools.lesson_source import LessonError, notebooks_of
from tools.notebook_run import CELL_TIMEOUT_S, ROOT, RunError, run


def sources(root: Path, wanted: list[str]) -> list[Path]:
    """The lesson sources, all or those whose name begins with one of `wanted` ("04", "04_data_parallel").

    Raises:
        LessonError: A wanted lesson does not exist.
    """
    found = sorted((root / "solutions").glob("[0-9][0-9]_*.py"))
    for prefix in wanted:
        if not any(path.stem.startswith(prefix) for path in found):
            exist = ", ".join(path.stem for path in found) or "none yet"
            raise LessonError(f"no lesson begins with {prefix!r}: the sources are {exist}")
    return [
        path
        for path in found
        if not wanted or any(path.stem.startswith(prefix) for prefix in wanted)
    ]


def targets(source: Path) -> tuple[Path, Path]:
    """The solution notebook and the student notebook of a source."""
    return source.with_suffix(".ipynb"), source.parents[1] / "notebooks" / f"{source.stem}.ipynb"


def build(source: Path, *, force: bool = False, timeout_s: float = CELL_TIMEOUT_S) -> str:
    """Build both notebooks of a lesson and say what was done, in a few words.

    Nothing is written when a cell fails.

    Raises:
        LessonError: The source cannot be cut into notebooks.
        RunError: A cell failed.
    """
    solution, student = notebooks_of(source.read_text(), source.name)
    solution_path, student_path = targets(source)
    old = _read(solution_path)
    executed = force or old is None or _code(old) != _code(solution) or _output_problems(old)
    if executed:
        run(solution, timeout_s)
    else:
        _take_outputs(solution, old)
    problems = _output_problems(solution)
    if problems:
        raise RunError("; ".join(problems))
    written = [_write(solution_path, solution), _write(student_path, student)]
    return ("executed" if executed else "kept outputs") + (
        ", written" if any(written) else ", nothing changed"
    )


def stale(source: Path) -> list[str]:
    """What is wrong with the notebooks of a source, without executing anything; empty when they are up to date."""
    solution, student = notebooks_of(source.read_text(), source.name)
    problems = []
    for path, fresh in zip(targets(source), (solution, student), strict=True):
        stored = _read(path)
        if stored is None:
            problems.append(f"{path.name} is missing in {path.parent.name}/")
            continue
        wrong = _difference(stored, fresh)
        if not wrong:
            outputs = fresh is solution
            wrong = _output_problems(stored) if outputs else _leftovers(stored)
        problems += [f"{path.parent.name}/{path.name}: {line}" for line in wrong]
    return problems


def orphans(root: Path) -> list[str]:
    """Notebooks without a source."""
    known = {path.stem for path in sources(root, [])}
    paths = [
        path
        for folder in ("notebooks", "solutions")
        for path in sorted((root / folder).glob("*.ipynb"))
    ]
    return [
        f"{path.parent.name}/{path.name} has no source solutions/{path.stem}.py"
        for path in paths
        if path.stem not in known
    ]


def _read(path):
    return nbformat.read(path, as_version=4) if path.exists() else None


def _write(path, notebook):
    text = nbformat.writes(notebook, indent=1) + "\n"
    nbformat.validate(notebook)
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return True


def _code(notebook):
    return [
        (cell.source, cell.metadata.get("tags"))
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def _take_outputs(fresh, old):
    """Copy the outputs over; the caller made sure that the code cells are the same."""
    pairs = zip(
        *([cell for cell in nb.cells if cell.cell_type == "code"] for nb in (fresh, old)),
        strict=True,
    )
    for new, stored in pairs:
        new.outputs, new.execution_count = stored.outputs, stored.execution_count


def _difference(stored, fresh):
    if len(stored.cells) != len(fresh.cells):
        return [f"has {len(stored.cells)} cells, its source gives {len(fresh.cells)}"]
    for number, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True), 1):
        for what in ("cell_type", "source", "metadata", "id"):
            if old.get(what) != new.get(what):
                return [f"cell {number} differs from its source in {what}"]
    return (
        [] if stored.metadata == fresh.metadata else ["its metadata is not what its source gives"]
    )


def _output_problems(notebook):
    problems = []
    for number, cell in enumerate(notebook.cells, 1):
        if cell.cell_type != "code":
            continue
        errors = [output.ename for output in cell.outputs if output.output_type == "error"]
        expected = "raises-exception" in cell.metadata.get("tags", [])
        if cell.execution_count is None:
            problems.append(f"cell {number} was not executed")
        if errors and not expected:
            problems.append(f"cell {number} holds an error, {errors[0]}")
        if expected and not errors:
            problems.append(f"cell {number} is tagged raises-exception but raised nothing")
    return problems


def _leftovers(notebook):
    full = [
        n
        for n, cell in enumerate(notebook.cells, 1)
        if cell.get("outputs") or cell.get("execution_count")
    ]
    return [f"cell {full[0]} has an output, a student notebook has none"] if full else []


def _check(paths, root, everything):
    problems = orphans(root) if everything else []
    for path in paths:
        try:
            problems += stale(path)
        except LessonError as error:
            problems.append(str(error))
    for line in problems:
        print(line)
    state = f"{len(problems)} problems; run `make notebooks`" if problems else "all up to date"
    print(f"{len(paths)} lessons: {state}")
    return 1 if problems else 0


def _build(paths, force, timeout_s):
    failed = 0
    for number, path in enumerate(paths, 1):
        start = time.perf_counter()
        print(f"[{number}/{len(paths)}] {path.stem:32s} ", end="", flush=True)
        try:
            done = build(path, force=force, timeout_s=timeout_s)
        except (LessonError, RunError) as error:
            failed += 1
            print(
                f"FAILED, nothing written\n  {path.name}, {str(error).removeprefix(path.name + ', ')}"
            )
        else:
            print(f"{time.perf_counter() - start:5.1f} s  {done}")
    return 1 if failed else 0


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Build the notebooks from solutions/*.py")
    parser.add_argument("lesson", nargs="*", help="number or beginning of the name; none: all")
    parser.add_argument(
        "--check", action="store_true", help="only say what is stale; executes and writes nothing"
    )
    parser.add_argument("--force", action="store_true", help="execute even what did not change")
    parser.add_argument(
        "--timeout",
        type=float,
        default=CELL_TIMEOUT_S,
        help="seconds for one cell (default %(default)s)",
    )
    options = parser.parse_args(arguments)
    try:
        paths = sources(root, options.lesson)
    except LessonError as error:
        print(error)
        return 1
    return (
        _check(paths, root, not options.lesson)
        if options.check
        else _build(paths, options.force, options.timeout)
    )


if __name__ == "__main__":
    sys.exit(main())
