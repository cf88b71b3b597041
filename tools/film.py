"""`python -m tools.film [GIF]`: images/lesson.gif, a lesson as a learner meets it, from a real run.

Opens lesson 04 of a handout in JupyterLab, in an installed Chromium, runs its cells on real ranks,
types a wrong answer, reads the hint, mends it, and predicts a number. Nothing is staged: each frame
is a picture of the page. Takes about a minute. The GIF carries a hash of the cells that it shows,
and `make check` says when the lesson has others: then run it again.

Held by: tests/unit/test_images.py
"""

import argparse
import hashlib
import io
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from nbformat import NotebookNode
from PIL import Image

from tools import build_notebooks, handout, screenshot

if TYPE_CHECKING:
    from playwright.sync_api import Page

ROOT = Path(__file__).resolve().parents[1]
GIF = ROOT / "images" / "lesson.gif"
STEM = "04_data_parallel_by_hand"
LESSON = f"notebooks/{STEM}.ipynb"
# What the film shows of it: the head, and cells that hold these texts with their neighbours.
HEAD = 3
PICTURE = "plot.data_parallel("
EXERCISE = "def average_gradients"
LOSSES = "plot.losses_of_ranks("
QUESTION = "distance_left = ..."
WIDTH = 1000
HEIGHT = 620
COLOURS = 64
READ_MS = 2600  # a frame with something to read
TYPE_MS = 450
FIND = """text => window.jupyterapp.shell.currentWidget.content.widgets.findIndex(
    cell => cell.model.sharedModel.getSource().includes(text))"""
KINDS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map(
    cell => cell.model.type)"""
SHOW = """async ([at, where]) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = at;
    notebook.deselectAll();
    for (let i = 0; i < 3; i++) {
        await notebook.scrollToItem(at, where);
        await new Promise(resolve => setTimeout(resolve, 300));
    }
}"""
WRITE = """([at, source]) => window.jupyterapp.shell.currentWidget.content.widgets[at]
    .model.sharedModel.setSource(source)"""
RUN = """at => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.activeCellIndex = at;
    notebook.deselectAll();
    window.jupyterapp.commands.execute('notebook:run-cell');
}"""
READY = """at => {
    const cell = window.jupyterapp.shell.currentWidget.content.widgets[at].model;
    return cell.executionCount !== null && cell.executionState !== 'running';
}"""
ERROR = """at => {
    const outputs = window.jupyterapp.shell.currentWidget.content.widgets[at].model.outputs;
    for (const output of outputs.toJSON()) {
        if (output.output_type === 'error') return `${output.ename}: ${output.evalue}`;
    }
    return '';
}"""
FORGET = """at => {
    window.jupyterapp.shell.currentWidget.content.widgets[at].model.sharedModel.execution_count =
        null;
}"""
HEADER = (
    "def average_gradients(model, group):\n"
    '    """Replace every gradient by its mean over the group."""\n'
)
TYPED = (
    "    for param in model.parameters():\n",
    "        if param.grad is not None:\n",
    "            dist.all_reduce(param.grad, group=group)\n",
)
MENDED = "            param.grad /= group.size()\n"
PREDICTED = "# PREDICT: put your answer in the place of each `...`, run this cell, then go on.\n"


class Film:
    """The pages of a learner's hour, each with the time that it is shown."""

    def __init__(self, page: "Page") -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.times_ms: list[int] = []

    def take(self, ms: int) -> None:
        """A picture of the page as it is now."""
        self.page.wait_for_timeout(300)
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        self.frames.append(picture.quantize(COLOURS, dither=Image.Dither.NONE))
        self.times_ms.append(ms)

    def find(self, text: str) -> int:
        """The number of the first cell whose source holds a text."""
        at = self.page.evaluate(FIND, text)
        if at < 0:
            raise SystemExit(f"{LESSON} has no cell with {text!r}: change tools/film.py")
        return at

    def show(self, at: int, where: str = "start") -> None:
        """Scroll a cell to the start, center or end of the window."""
        self.page.evaluate(SHOW, [at, where])

    def run(self, at: int) -> None:
        """Run a cell and wait for its end.

        Raises:
            SystemExit: It raises an error, which no cell of the film is meant to.
        """
        self.page.evaluate(FORGET, at)
        self.page.evaluate(RUN, at)
        self.page.wait_for_function(READY, arg=at)
        error = self.page.evaluate(ERROR, at)
        if error:
            raise SystemExit(f"cell {at} of {LESSON} raises {error}")

    def write(self, at: int, source: str) -> None:
        """Put this source into a cell."""
        self.page.evaluate(WRITE, [at, source])

    def save(self, path: Path, shown: str) -> None:
        """Save a GIF that begins again forever.

        Args:
            path: Path of the file.
            shown: The hash of what it shows, which it carries as its comment.
        """
        self.frames[0].save(
            path,
            save_all=True,
            append_images=self.frames[1:],
            duration=self.times_ms,
            loop=0,
            comment=shown.encode(),
        )


def student_notebook() -> NotebookNode:
    """The lesson as learners get it, built from its source now."""
    source = ROOT / "solutions" / f"{STEM}.py"
    return handout.student_notebook(source, build_notebooks.headlines(ROOT))


def hash_of_shown(notebook: NotebookNode) -> str:
    """A hash of the cells that the film shows.

    Raises:
        ValueError: The lesson has no such cell any more.
    """
    sources = [cell.source for cell in notebook.cells]
    shown = sources[:HEAD]
    for text in (PICTURE, EXERCISE, LOSSES, QUESTION):
        at = next((i for i, source in enumerate(sources) if text in source), None)
        if at is None:
            raise ValueError(f"{LESSON} has no cell with {text!r}: change tools/film.py")
        shown += sources[at - 1 : at + 2]
    return hashlib.sha256("\0".join(shown).encode()).hexdigest()[:16]


def is_stale(path: Path, notebook: NotebookNode) -> bool:
    """Whether a film is missing, or shows other cells than the lesson has now."""
    if not path.exists():
        return True
    with Image.open(path) as film:
        carried = film.info.get("comment", b"")
    return carried != hash_of_shown(notebook).encode()


def shoot(film: Film) -> None:
    """The scenes, in order."""
    exercise = film.find(EXERCISE)
    film.show(0)
    film.take(READ_MS)
    for at, kind in enumerate(film.page.evaluate(KINDS)):
        if kind == "code" and at < exercise:
            film.run(at)
    film.show(film.find(PICTURE))
    film.take(READ_MS)
    film.show(exercise - 1)
    film.take(READ_MS)
    source = HEADER
    for line in TYPED:
        source += line
        film.write(exercise, source)
        film.take(TYPE_MS)
    film.run(exercise)
    film.run(exercise + 1)
    film.take(READ_MS + 1500)
    film.write(exercise, source + MENDED)
    film.take(TYPE_MS)
    film.run(exercise)
    film.run(exercise + 1)
    film.take(READ_MS)
    figure = film.find(LOSSES)
    film.run(figure)
    film.show(figure)
    film.take(READ_MS)
    question = film.find(QUESTION)
    film.show(question - 1)
    film.take(READ_MS)
    film.write(question, PREDICTED + "distance_left = 0.5  # they come closer?")
    film.take(TYPE_MS)
    film.run(question)
    film.run(question + 1)
    film.show(question + 1, "end")  # the prediction beside its measurement
    film.take(READ_MS + 1500)


def main() -> None:
    """The command line."""
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(prog="python -m tools.film", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("gif", nargs="?", type=Path, default=GIF)
    path = parser.parse_args().gif
    browser_path = next(filter(None, map(shutil.which, screenshot.BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"no browser is installed (looked for {', '.join(screenshot.BROWSERS)})")
    with tempfile.TemporaryDirectory() as folder:
        course = Path(folder) / "course"
        handout.write(course)  # builds the lesson from its source, as `student_notebook` does
        # a handout has only what git knows
        shutil.copytree(ROOT / "labcode", course / "labcode", dirs_exist_ok=True)
        os.environ["PYTHONPATH"] = str(course)  # the kernel takes labcode from there
        with screenshot.server(root=course) as address, sync_playwright() as playwright:
            flags = ["--no-sandbox", "--disable-gpu"]
            browser = playwright.chromium.launch(executable_path=browser_path, args=flags)
            page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.set_default_timeout(180_000)
            page.goto(f"{address}/lab/tree/{LESSON}?token={screenshot.TOKEN}")
            page.wait_for_function(screenshot.NOTEBOOK_IS_OPEN)
            page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            page.wait_for_timeout(2000)
            film = Film(page)
            shoot(film)
            film.save(path, hash_of_shown(student_notebook()))
            browser.close()
    print(f"{path}: {len(film.frames)} frames, {path.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
