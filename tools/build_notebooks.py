"""Build the notebooks of the course from their sources.

python -m tools.build_notebooks [NN ...]            build what is stale
python -m tools.build_notebooks [NN ...] --check    only say what is stale, and what was edited
python -m tools.build_notebooks [NN ...] --force    execute all; replace edited notebooks as well

For each `solutions/NN_topic.py`: the solution notebook beside it, executed, the student notebook in
`notebooks/`, and the solutions that later cells use, as a module (`tools.by_hand`). A lesson whose
code did not change is not executed again, and a file whose content did not change is not written.
A student notebook that somebody has edited or run is never touched; with --force it is kept beside
the new one.
"""

import argparse
import copy
import sys
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from course import catalog
from tools import by_hand, fingerprint
from tools.decorate import Headline, headline
from tools.lesson_source import LessonError, notebooks_of
from tools.notebook_run import (
    CELL_TIMEOUT_S,
    ROOT,
    RunError,
    open_exercise_problems,
    output_problems,
    run,
)


def sources(root: Path, wanted: list[str]) -> list[Path]:
    """The lesson sources, all or those whose name begins with one of `wanted` ("04", "04_data").

    Raises:
        LessonError: A wanted lesson does not exist.
    """
    found = sorted((root / "solutions").glob("[0-9][0-9]*_*.py"))
    for prefix in wanted:
        if not any(path.stem.startswith(prefix) for path in found):
            exist = ", ".join(path.stem for path in found) or "none yet"
            raise LessonError(f"no lesson begins with {prefix!r}: the sources are {exist}")
    if not wanted:
        return found
    return [path for path in found if path.stem.startswith(tuple(wanted))]


def targets(source: Path) -> tuple[Path, Path]:
    """The solution notebook and the student notebook of a source."""
    student = source.parents[1] / "notebooks" / f"{source.stem}.ipynb"
    return source.with_suffix(".ipynb"), student


def headlines(root: Path) -> list[Headline]:
    """What the lessons are called and how long they take, in order."""
    return [headline(path.stem, path.read_text()) for path in sources(root, [])]


def notebooks(source: Path) -> tuple[NotebookNode, NotebookNode]:
    """The solution notebook (without outputs) and the student notebook that a source gives now.

    Raises:
        LessonError: The source cannot be cut into notebooks.
    """
    return notebooks_of(source.read_text(), source.name, headlines(source.parents[1]))


def build(source: Path, *, force: bool = False, timeout_s: float = CELL_TIMEOUT_S) -> str:
    """Build both notebooks of a lesson and say what was done, in a few words.

    No notebook is written when a cell fails.

    Raises:
        LessonError: The source cannot be cut into notebooks.
        RunError: A cell failed, in the solution or in the student version.
    """
    solution, student = notebooks(source)
    module = by_hand.module_of(source)
    if module is not None:
        by_hand.target(source).write_text(module)  # the cells import it
    solution_path, student_path = targets(source)
    old_solution = _read(solution_path)
    old_student = _read(student_path)

    executed = True
    if old_solution is not None and not force and _outputs_fit(old_solution, solution):
        _take_outputs(solution, old_solution)
        executed = False
    else:
        run(solution, timeout_s)
    problems = output_problems(solution)
    if problems:
        raise RunError("; ".join(problems))

    code = fingerprint.of_code(student)
    recorded = old_student is not None and code_last_run(old_student) == code
    if executed and (force or not recorded):
        run_student(student, timeout_s)
        recorded = True
    if recorded:
        student.metadata.lesson["ran"] = code

    words = ["executed" if executed else "kept outputs"]
    written = _write(solution_path, solution)
    if old_student is None or state(old_student, student) != "edited":
        written |= _write(student_path, student)
    elif force:
        aside = catalog.put_aside(student_path)
        written |= _write(student_path, student)
        words.append(f"your edited notebook is now {aside.name}")
    else:
        words.append("left the edited student notebook alone")
    words.append("written" if written else "nothing changed")
    return ", ".join(words)


def run_student(student: NotebookNode, timeout_s: float = CELL_TIMEOUT_S) -> None:
    """Run a copy of a student notebook to its end, with every exercise still open.

    Raises:
        RunError: A cell failed, or a check did not say that its exercise is not done yet.
    """
    try:
        done = run(copy.deepcopy(student), timeout_s)
    except RunError as error:
        raise RunError(f"student version, {error}") from None
    problems = output_problems(done) + open_exercise_problems(done)
    if problems:
        raise RunError("student version, " + "; ".join(problems))


def code_last_run(student: NotebookNode) -> str | None:
    """The hash of the code that `run_student` last ran for this notebook."""
    return student.metadata.get("lesson", {}).get("ran")


def state(stored: NotebookNode, fresh: NotebookNode) -> str:
    """What became of a stored student notebook: "current", "stale" or "edited".

    Args:
        stored: The notebook as it lies in `notebooks/`.
        fresh: What its source gives now.
    """
    if fingerprint.of_cells(stored) == fingerprint.of_cells(fresh):
        is_current = not _difference(stored, fresh, ignored=("ran",))
        return "current" if is_current else "stale"
    return "edited" if fingerprint.is_edited(stored) else "stale"


def stale(source: Path) -> list[str]:
    """What is wrong with the notebooks of a source; empty when they are up to date.

    Nothing is executed. A student notebook that somebody has edited is theirs, and right.
    """
    solution, student = notebooks(source)
    solution_path, student_path = targets(source)
    problems = []
    module = by_hand.target(source)
    if (module.read_text() if module.exists() else None) != by_hand.module_of(source):
        problems.append(f"{module.name} is not what its source gives")
    for path, fresh in ((solution_path, solution), (student_path, student)):
        stored = _read(path)
        if stored is None:
            problems.append(f"{path.name} is missing in {path.parent.name}/")
        elif fresh is solution:
            wrong = _difference(stored, solution) or output_problems(stored)
            problems += [f"solutions/{path.name}: {line}" for line in wrong]
        elif state(stored, student) == "stale":
            wrong = _difference(stored, student, ignored=("ran",))
            problems += [f"notebooks/{path.name}: stale, {line}" for line in wrong]
    return problems


def edited(source: Path) -> list[str]:
    """The student notebook of a source, if somebody has edited or run it."""
    _, student = notebooks(source)
    _, path = targets(source)
    stored = _read(path)
    if stored is None or state(stored, student) != "edited":
        return []
    return [f"notebooks/{path.name}: edited or run since it was built, left alone"]


def orphans(root: Path) -> list[str]:
    """Notebooks without a source; a learner's own copies are none of the builder's business."""
    known = {path.stem for path in sources(root, [])}
    problems = []
    for folder in ("notebooks", "solutions"):
        for path in sorted((root / folder).glob("[0-9][0-9]*_*.ipynb")):
            if path.stem not in known and catalog.KEPT not in path.name:
                problems.append(f"{folder}/{path.name} has no source solutions/{path.stem}.py")
    return problems


def _read(path: Path) -> NotebookNode | None:
    return nbformat.read(path, as_version=4) if path.exists() else None


def _write(path: Path, notebook: NotebookNode) -> bool:
    """Write a notebook if that changes the file; says whether it did."""
    text = nbformat.writes(notebook, indent=1) + "\n"
    nbformat.validate(notebook)
    if path.exists() and path.read_text() == text:
        return False
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return True


def _code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _outputs_fit(old: NotebookNode, fresh: NotebookNode) -> bool:
    """Whether stored outputs are those of the same code, and complete."""
    old_cells = _code_cells(old)
    new_cells = _code_cells(fresh)
    old_code = [(cell.source, cell.metadata.get("tags")) for cell in old_cells]
    new_code = [(cell.source, cell.metadata.get("tags")) for cell in new_cells]
    if old_code != new_code:
        return False
    expected = [cell.metadata.get("raises") for cell in new_cells]
    for cell, error in zip(old_cells, expected, strict=True):
        if error:
            cell.metadata["raises"] = error  # other words for the error need no other run
    return not output_problems(old)


def _take_outputs(fresh: NotebookNode, old: NotebookNode) -> None:
    """Copy the outputs over; the caller made sure that the code cells are the same."""
    for new, stored in zip(_code_cells(fresh), _code_cells(old), strict=True):
        new.outputs = stored.outputs
        new.execution_count = stored.execution_count


def _difference(
    stored: NotebookNode, fresh: NotebookNode, ignored: tuple[str, ...] = ()
) -> list[str]:
    """The first thing in which a stored notebook is not what its source gives, in one line.

    Outputs are not looked at, nor what JupyterLab writes into the metadata of a saved notebook.
    """
    if len(stored.cells) != len(fresh.cells):
        return [f"has {len(stored.cells)} cells, its source gives {len(fresh.cells)}"]
    for number, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True), 1):
        for what in ("cell_type", "source", "id"):
            if old.get(what) != new.get(what):
                return [f"cell {number} differs from its source in {what}"]
        for what in ("tags", "raises"):
            if old.metadata.get(what) != new.metadata.get(what):
                return [f"cell {number} differs from its source in metadata, {what}"]
    old_lesson = dict(stored.metadata.get("lesson", {}))
    for what in ignored:
        old_lesson.pop(what, None)
    if old_lesson != fresh.metadata.lesson:
        return ["its metadata is not what its source gives"]
    return []


def _check(paths: list[Path], root: Path, everything: bool, strict: bool) -> int:
    problems = orphans(root) if everything else []
    touched = []
    for path in paths:
        try:
            problems += stale(path)
            touched += edited(path)
        except LessonError as error:
            problems.append(str(error))
    for line in (*problems, *touched):
        print(line)
    summary = f"{len(problems)} problems; run `make notebooks`" if problems else "all up to date"
    if touched:
        summary += f"; {len(touched)} edited (--force puts them aside and builds new ones)"
    print(f"{len(paths)} lessons: {summary}")
    if problems or (strict and touched):
        return 1
    return 0


def _build(paths: list[Path], force: bool, timeout_s: float) -> int:
    failed = 0
    for number, path in enumerate(paths, 1):
        start = time.perf_counter()
        print(f"[{number}/{len(paths)}] {path.stem:32s} ", end="", flush=True)
        try:
            done = build(path, force=force, timeout_s=timeout_s)
        except (LessonError, RunError) as error:
            failed += 1
            why = str(error).removeprefix(path.name + ", ")
            print(f"FAILED, nothing written\n  {path.name}, {why}")
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
    parser.add_argument(
        "--strict", action="store_true", help="with --check: an edited notebook fails too"
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="execute even what did not change; put edited notebooks aside and build them anew",
    )
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
    if options.check:
        return _check(paths, root, not options.lesson, options.strict)
    return _build(paths, options.force, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
