"""`make handout`: the course for learners, without what gives answers away, in build/handout.

A folder and a zip of it: the student notebooks, the library, what `make setup` and `make lab` need,
SLURM's profiles and the pictures. Left out are solutions, tests (they hold right and wrong
answers), the instructor's pages, benchmarks and the tools of authors. The links to solutions go
from the notebooks, and what git does not know is not copied. labcode stays whole: it holds the
library's own version of what learners write, which the lessons show behind each exercise; the files
`course/labs/l*_by_hand.py` are closest to answers, and later cells of the lessons need them.
The checks run the solutions, which are there for them in a packed file that nobody reads by chance.

python -m tools.handout [FOLDER]

Held by: tests/unit/test_handout.py
"""

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from course.exercises import solution
from tools import build_notebooks, course_map, fingerprint, lesson_source
from tools.decorate import Headline

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "build" / "handout"
NAME = "training-at-scale"
# What learners get; a folder means all that git knows below it.
KEPT = ("notebooks", "labcode", "course", "slurm", "images", "tools/jupyter", ".gitignore")
KEPT += ("book/glossary.md", "pyproject.toml", "constraints.txt", "environment.yml", "CITATION.cff")
GUIDE = ("your_framework", "training", "clusters", "ddp", "failures")  # pages of book/guide
SHOW_SOLUTIONS = ("images/lesson.gif",)  # with predictions
KEPT_RULES = ("help", "setup", "lab", "shell")  # of the Makefile; the stamp that they need as well
TO_SOLUTION = re.compile(r"(?: &nbsp;\|&nbsp; )?\[Solution of this lesson\]\([^)]*\)")
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same zip from the same files


def files(root: Path) -> list[str]:
    """What is copied as it is, from the root; all of it is known to git.

    Raises:
        ValueError: This is no checkout.
    """
    command = ["git", "ls-files", "-z", "--", *KEPT]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ValueError(f"git ls-files failed in {root}: make the handout in a checkout")
    kept = []
    for name in filter(None, done.stdout.split("\0")):
        if not name.endswith(".ipynb") and name not in SHOW_SOLUTIONS:
            kept.append(name)
    return kept


def student_notebook(source: Path, course: Sequence[Headline]) -> NotebookNode:
    """The student notebook of a source, without the link to its solution.

    Built anew: what somebody has written into the one in notebooks/ is not handed out.
    """
    text = source.read_text(encoding="utf-8")
    _, notebook = lesson_source.notebooks_of(text, source.name, course)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = TO_SOLUTION.sub("", cell.source)
    notebook.metadata.lesson["built"] = fingerprint.of_cells(notebook)
    return notebook


def makefile(text: str) -> str:
    """The Makefile with the rules of learners alone."""
    kept = []
    text = text.partition("\n")[2]  # the first line speaks of tests
    for block in text.split("\n\n"):
        rule = re.search(r"(?m)^([\w$()/.-]+):(?!=)", block)
        name = rule[1] if rule else ""
        if ".PHONY:" in block:
            kept.append(re.sub(r"\.PHONY:.*", f".PHONY: {' '.join(KEPT_RULES)}", block))
        elif name in ("", *KEPT_RULES) or "$(STAMP)" in name:
            kept.append(block)
    return "\n\n".join(kept).rstrip("\n") + "\n"


def course_page(text: str) -> str:
    """COURSE.md without what leads to the solutions, or needs git."""
    text = re.sub(r"\[solved\]\([^)]*\)", "", text)
    text = re.sub(r"(?m)^\*Solved\* .*\n", "", text)
    text, _, _ = text.partition("- **Begin a lesson anew.**")
    return (
        f"{text}- **Begin a lesson anew.** Put your notebook aside, and take the lesson out of the "
        "zip once more.\n"
    )


def guide_page(text: str) -> str:
    """A page of the guide without links to what learners do not get."""
    return re.sub(r"\[([^\]]*)\]\(\.\./\.\./[^)]*\)", r"\1", text)


def readme() -> str:
    """The page of the handout."""
    return (
        "# Training at Scale\n\nA course on training neural networks on many processors at once. "
        "You need Linux or macOS, Python 3.11 or later and `make`; about 6 GB of disk on Linux.\n\n"
        "    make lab      # sets up .venv, opens JupyterLab on lesson 00\n\n"
        "`python -m labcode` prints the lessons, which exercises you have done and what comes "
        'next. `hint("4.1")` shows a hint in a notebook, a further one at each call.\n\n'
        "`python -m labcode.doctor` checks the installation. These commands work in the terminal "
        "of JupyterLab, and in a shell after `make shell`.\n\n"
        "[COURSE.md](COURSE.md) has the map of the course and short ways through it. More: "
        "[training runs](book/guide/training.md), [GPUs and clusters](book/guide/clusters.md), "
        "[what happens when something fails](book/guide/failures.md).\n"
    )


def write(out: Path, root: Path = ROOT) -> Path:
    """Write the folder anew, and the zip beside it.

    Returns:
        The zip.
    """
    if out.exists():
        shutil.rmtree(out)
    for name in files(root):
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (root / name).is_dir():  # a link to a folder; not every zip program knows links
            shutil.copytree(root / name, target)
        else:
            shutil.copy2(root / name, target)
    lessons = course_map.lessons(root)
    (out / "notebooks").mkdir(exist_ok=True)
    course = build_notebooks.headlines(root)
    for lesson in lessons:
        notebook = student_notebook(root / "solutions" / f"{lesson.stem}.py", course)
        nbformat.write(notebook, out / lesson.notebook)
    text = course_page((root / "COURSE.md").read_text(encoding="utf-8"))
    (out / "COURSE.md").write_text(text, encoding="utf-8")
    (out / "README.md").write_text(readme(), encoding="utf-8")
    (out / "book" / "guide").mkdir()
    for name in GUIDE:
        page = Path("book", "guide", f"{name}.md")
        text = guide_page((root / page).read_text(encoding="utf-8"))
        (out / page).write_text(text, encoding="utf-8")
    (out / solution.PACKED.relative_to(solution.ROOT)).write_bytes(solution.packed(root))
    text = makefile((root / "Makefile").read_text(encoding="utf-8"))
    (out / "Makefile").write_text(text, encoding="utf-8")
    return pack(out)


def pack(folder: Path) -> Path:
    """A zip of a folder, beside it; programs stay programs, and dates are left out."""
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                entry = zipfile.ZipInfo(f"{NAME}/{file.relative_to(folder)}", LONG_AGO)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = file.stat().st_mode << 16
                packed.writestr(entry, file.read_bytes())
    return path


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tools.handout", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", nargs="?", type=Path, default=OUT, help="written anew")
    out = parser.parse_args(arguments).folder
    if out.exists() and out != OUT:
        print(f"{out} exists: name a new folder", file=sys.stderr)
        return 2
    try:
        packed = write(out)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{out} and {packed.name}, {packed.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
