"""What a change touches: the lessons, and the test files whose subject it is.

A change is everything since the commit that it starts from. Of the tests of the release tier that
prove what it touches a landing runs as many as it has time for (tests/choice.py), and `make
test-changed` all; the others have their turn.
"""

import ast
import fnmatch
import functools
import json
import re
import subprocess
from pathlib import Path

import pytest
from choice import ITSELF, NOT, THROUGH

from tools import course_map

ROOT = Path(__file__).resolve().parents[1]
QUOTED = "nbval-check-output"  # the tag of a cell whose stored output is compared

# {tests: what they tell a story of}; a test file that changed itself runs as well
SUBJECTS = {
    "tests/slurm/*": [
        "labcode/slurm/*",
        "labcode/minislurm/*",
        "labcode/runtime/launch*.py",
        "labcode/train/signals.py",
        "labcode/run/*.py",
    ],
    "tests/slurm/test_slurm_lab.py": ["labcode/runtime/bootstrap.py", "labcode/runtime/meeting.py"],
    "tests/faults/*": [
        "labcode/run/*.py",
        "labcode/train/build.py",
        "labcode/train/loop.py",
        "labcode/train/checkpoint/*",
        "labcode/runtime/bootstrap.py",
        "labcode/runtime/meeting.py",
    ],
    "tests/ranks/test_restarts.py": [
        "labcode/runtime/launch*.py",
        "labcode/run/*.py",
        "labcode/train/checkpoint/*",
    ],
    "tests/ranks/test_bad_steps.py": ["labcode/train/step.py", "labcode/train/guard.py"],
    "tests/ranks/test_float16.py": ["labcode/train/step.py", "labcode/train/loss_scale.py"],
    "tests/ranks/test_training_memory.py": ["labcode/perf/*memory*.py"],
    "tests/ranks/test_checkpoint.py": [
        "labcode/train/checkpoint/*",
        "labcode/parallel/boxes.py",
    ],
    "tests/ranks/test_background_save.py": ["labcode/train/checkpoint/*"],
    "tests/ranks/test_parallel_parity.py": ["labcode/parallel/*", "labcode/models/*"],
    "tests/ranks/test_compile.py": ["labcode/models/parallelize.py"],
    "tests/ranks/test_fp8.py": ["labcode/precision/*"],
    "tests/ranks/test_debug.py": ["labcode/precision/*"],
    "tests/ranks/test_parts.py": ["labcode/train/step.py", "labcode/measure/steps.py"],
    "tests/ranks/test_calibrate.py": [
        "labcode/run/calibrate.py",
        "labcode/measure/device_speed.py",
    ],
    "tests/unit/test_slurm_local.py": ["labcode/slurm/run/*", "labcode/runtime/launch*.py"],
    "tests/unit/test_hub_config.py": [
        "labcode/perf/hub_config.py",
        "labcode/perf/transformer.py",
    ],
    "tests/unit/test_loader.py": ["labcode/data/loader.py", "course/pool/fork_server.py"],
    "tests/ranks/test_dry_run.py": ["labcode/perf/*", "labcode/run/dry_run.py"],
    # the answers that need real processes; the others are tried in every run
    "tests/exercises/*": [
        "course/answer.py",
        "course/check.py",
        "course/exercises/contract.py",
        "course/exercises/expect.py",
        "course/exercises/simulated/*",
        "course/exercises/solution.py",
    ],
    "tests/notebooks/test_book_pages.py": ["book/*", "tools/book*.py", "solutions/*.ipynb"],
    "tests/notebooks/test_browser.py": ["tools/jupyter/*", "tools/build_notebooks.py"],
    "tests/notebooks/test_tensorboard.py": ["tools/jupyter/*"],
}


class Change:
    """What is different from the commit that a change starts from.

    Args:
        paths: The files that changed, from the repository's root.
        start: That commit; None: nothing is known of what was there before.
    """

    def __init__(self, paths: set[str], start: str | None = None) -> None:
        self.paths = paths
        self._start = start
        self.lessons = {number: self._lesson(number) for number in lessons()}

    def touches(self, item: pytest.Item) -> int:
        """How the change touches what a test proves: NOT, THROUGH something else, or ITSELF."""
        file = item.nodeid.partition("::")[0]
        touched = NOT
        for tests, subjects in SUBJECTS.items():
            if fnmatch.fnmatch(file, tests) and self._any(subjects):
                touched = THROUGH
        number = lesson_of(item)
        if number is None:
            return ITSELF if file in self.paths else touched
        # a student version is held by a rule as well: its turn is behind the solutions
        is_solution = item.originalname.startswith("test_solution")
        own = self.lessons[number]
        return max(touched, own if is_solution else min(own, THROUGH))

    def _any(self, patterns: list[str]) -> bool:
        for path in self.paths:
            if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
                return True
        return False

    def _lesson(self, number: str) -> int:
        """How the change touches a lesson; its prose is no part of what runs."""
        (notebook,) = (ROOT / "solutions").glob(f"{number}_*.ipynb")
        path = notebook.relative_to(ROOT).as_posix()
        if path in self.paths and executed(notebook.read_text()) != executed(self._before(path)):
            return ITSELF
        own = [
            f"course/exercises/l{number}*",
            f"course/labs/l{number}*",
            f"tests/exercises/{number}.py",
        ]
        return THROUGH if self._any([*own, *imported(number)]) else NOT

    def _before(self, path: str) -> str:
        """A file as it was before the change; empty if it was not there."""
        return "\n".join(git("show", f"{self._start}:{path}")) if self._start else ""


def executed(notebook: str) -> list[tuple[str, object]]:
    """What a run of a notebook depends on: its code, and the outputs that it has to give again.

    Args:
        notebook: The file's text; empty for none.
    """
    if not notebook:
        return []
    found = []
    for cell in json.loads(notebook)["cells"]:
        if cell["cell_type"] == "code":
            is_quoted = QUOTED in cell["metadata"].get("tags", [])
            found.append(("".join(cell["source"]), cell["outputs"] if is_quoted else None))
    return found


def lessons() -> list[str]:
    """The numbers of all lessons, such as "04"."""
    return sorted(
        path.name.partition("_")[0] for path in (ROOT / "solutions").glob("[0-9][0-9]*_*.py")
    )


@functools.cache
def imported(number: str) -> list[str]:
    """The files of the library that a lesson imports by name, but for what teaches and draws."""
    (source,) = (ROOT / "solutions").glob(f"{number}_*.py")
    code = [line for line in source.read_text().splitlines() if not line.startswith(("%", "!"))]
    found = set()
    for node in ast.walk(ast.parse("\n".join(code))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in [node.module, *names]:
                found.add(name.replace(".", "/") + ".py")
    return sorted(path for path in found if path.startswith("labcode/") and (ROOT / path).exists())


def lesson_of(item: pytest.Item) -> str | None:
    """The number of the lesson that a test executes, or whose answers it tries."""
    if not hasattr(item, "callspec"):
        return None
    source = item.callspec.params.get("source")
    if isinstance(source, Path):
        return source.name.partition("_")[0]
    exercise = item.callspec.params.get("exercise")
    if isinstance(exercise, str) and re.match(r"\d+\.\d+", exercise):
        return course_map.source_of_exercise(exercise).name.partition("_")[0]
    return None


def git(*arguments: str) -> list[str]:
    """The lines that git printed; none if it could not."""
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def base() -> str | None:
    """The commit that this change starts from.

    It is where the branch left origin/main. In a fresh clone of main, where nothing is ahead of
    that, it is the newest commit that is four hours old.
    """
    (head,) = git("rev-parse", "HEAD") or [""]
    left = git("merge-base", "HEAD", "origin/main")
    if left and left[0] != head:
        return left[0]
    older = git("rev-list", "-1", "--before=4 hours ago", "HEAD")
    return older[0] if older else None


def since_base() -> Change:
    """What has changed since the base, also what is not committed; everything without git."""
    start = base()
    changed = git("diff", "--name-only", start) if start else git("ls-files")
    return Change({*changed, *git("ls-files", "--others", "--exclude-standard")}, start)
