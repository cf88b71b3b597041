"""What a learner sees: lesson 00 in JupyterLab, as `make lab` configures it, in a real browser."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path

import nbformat
import pytest
import websocket
from faults.waiting import comes, free_port, until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import build_notebooks  # noqa: E402  (tools/ is not installed)

TOKEN = "a-token-for-the-test"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-dev-shm-usage",
]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
HANG_S = 300
ALL_RAN_OR_ONE_FAILED = """() => {
    const widgets = window.jupyterapp.shell.currentWidget.content.widgets;
    const cells = widgets.map(widget => widget.model).filter(model => model.type === 'code');
    const failed = cell => !(cell.getMetadata('tags') ?? []).includes('raises-exception')
        && cell.outputs.toJSON().some(output => output.output_type === 'error');
    const ran = cell => cell.executionCount !== null && cell.executionState !== 'running';
    return cells.some(failed) || cells.every(ran);
}"""

pytestmark = [
    pytest.mark.timeout(2 * HANG_S),
    pytest.mark.skipif(
        BROWSER is None, reason=f"no browser is installed (looked for {', '.join(BROWSERS)})"
    ),
]


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Hands a redirect back instead of following it."""

    def redirect_request(self, *_):
        return None


def status(url):
    """The HTTP status and the text of a page; 0 while nobody answers."""
    try:
        with urllib.request.build_opener(NoRedirect).open(url, timeout=90) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, ""
    except OSError:
        return 0, ""


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A running server on a copy of the course: (address, folder of the copy)."""
    folder, home = tmp_path_factory.mktemp("course"), tmp_path_factory.mktemp("home")
    runs = Path("labcode", "assets", "reference_runs")
    shutil.copytree(ROOT / runs, folder / runs)
    shutil.copy(ROOT / "COURSE.md", folder)
    for part in ("notebooks", "solutions", "tools"):
        shutil.copytree(
            ROOT / part,
            folder / part,
            ignore=shutil.ignore_patterns("runs", "__pycache__", ".ipynb_checkpoints"),
        )
    for source in build_notebooks.sources(ROOT, []):  # student versions as built, without answers
        _, student = build_notebooks.notebooks(source)
        nbformat.write(student, folder / "notebooks" / f"{source.stem}.ipynb")
    port, log = free_port(), (home / "lab.log").open("w")
    options = [
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={TOKEN}",
    ]
    options += ["--ServerApp.open_browser=False", "--LabApp.expose_app_in_browser=True"]
    # as conda does it, whose Python would then be first
    (home / ".bashrc").write_text("PATH=/usr/bin:/bin:$PATH; OF_THE_USER=1\n")
    config = folder / "tools" / "jupyter" / "jupyter_server_config.py"
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--config", str(config), *options],
        cwd=folder,
        env={**os.environ, "HOME": str(home), "JUPYTER_PLATFORM_DIRS": "0"}
        | {"SHELL": "/bin/bash"},
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    address = f"http://localhost:{port}"
    try:
        answers = f"{address}/api/status?token={TOKEN}"
        is_there = comes(lambda: status(answers)[0] == 200 or server.poll() is not None, 280, 0.2)
        assert is_there and server.poll() is None, (home / "lab.log").read_text()[-3000:]
        yield address, folder
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # the server stops its kernels and TensorBoard
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        log.close()


@pytest.fixture(scope="module")
def page(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=FLAGS)
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(HANG_S * 1000)
        yield page
        browser.close()


def open_notebook(page, url):
    """Open a notebook and wait until its kernel is there."""
    page.goto(url)
    page.wait_for_function(
        "() => window.jupyterapp?.shell.currentWidget?.content?.widgets?.length > 3"
    )
    page.evaluate("() => window.jupyterapp.shell.currentWidget.context.ready")
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.ready")


def is_modified(page):
    """Whether JupyterLab would ask to save the notebook, now that its kernel has said all."""
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.info")
    page.wait_for_timeout(1000)
    return page.evaluate("() => window.jupyterapp.shell.currentWidget.context.model.dirty")


def only(folder, pattern):
    (found,) = sorted(folder.glob(pattern))
    return found


def test_lesson_00_runs_in_jupyterlab(lab, page):
    address, folder = lab
    notebook = only(folder, "notebooks/00_*.ipynb")
    open_notebook(page, f"{address}/?token={TOKEN}")  # the bare address leads to the first lesson
    assert (
        page.evaluate("() => window.jupyterapp.shell.currentWidget.context.path")
        == f"notebooks/{notebook.name}"
    )
    kernel = page.evaluate(
        "() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.name"
    )
    assert kernel == "python3"
    assert not is_modified(page)
    panels = page.evaluate(
        """() => {
            const widgets = [...window.jupyterapp.shell.widgets('left')];
            return widgets.map(widget => [widget.id, widget.isVisible]);
        }"""
    )
    assert dict(panels)["table-of-contents"], "the table of contents is open"
    entries = page.locator(".jp-TableOfContents-content").inner_text()
    assert "Exercise 0.1" in entries
    page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
    # after a cell that is meant to raise, the command ends before the cells do
    page.wait_for_function(ALL_RAN_OR_ONE_FAILED)
    figures = page.evaluate(
        """() => {
            const images = [...document.querySelectorAll('.jp-OutputArea img[alt]')];
            return images.map(image => [image.alt, image.width]);
        }"""
    )
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")

    ran = nbformat.read(notebook, as_version=4)
    code = [cell for cell in ran.cells if cell.cell_type == "code"]
    expected = [cell for cell in code if "raises-exception" in cell.metadata.get("tags", [])]
    errors = [
        out.evalue
        for cell in code
        if cell not in expected
        for out in cell.outputs
        if out.output_type == "error"
    ]
    assert errors == []
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    drawn = str([cell.outputs for cell in code]).count("<img alt=")
    assert drawn >= 3 and all(len(alt.split()) >= 4 and width > 100 for alt, width in figures)
    assert len(figures) == drawn


@pytest.mark.release
def test_stored_figures_show_before_anything_is_run(lab, page):
    """A notebook that this machine has never run is not trusted; its figures show anyway."""
    address, folder = lab
    notebook = only(folder, "solutions/00_*.ipynb")
    open_notebook(page, f"{address}/lab/tree/solutions/{notebook.name}?token={TOKEN}&reset")
    assert not is_modified(page)
    stored = notebook.read_text().count("<img alt=")
    shown, badges = page.evaluate(
        """async () => {  // cells are drawn when they come into view, and may go again
            const content = window.jupyterapp.shell.currentWidget.content;
            const seen = {}, badges = {};
            for (let i = 0; i < content.widgets.length; i++) {
                await content.scrollToItem(i);
                await new Promise(requestAnimationFrame);
                for (const img of document.querySelectorAll('.jp-OutputArea img[alt]')) {
                    await img.decode();
                    seen[img.alt] = img.naturalWidth;
                }
                for (const span of document.querySelectorAll('.jp-OutputArea span[style]'))
                    badges[span.innerText.trim()] = getComputedStyle(span).backgroundColor;
            }
            return [seen, badges];
        }"""
    )
    assert len(shown) == stored >= 3 and all(width > 100 for width in shown.values())
    assert badges["✓ right"] == "rgb(26, 127, 55)"  # not trusted, and in colour all the same


WHERE_IS_THE_SECTION = """id => {
    const notebook = window.jupyterapp.shell.currentWidget?.content;
    const cell = notebook?.widgets?.find?.(widget => widget.model.id === id);
    if (!cell || !cell.node.isConnected) return null;
    const below = cell.node.getBoundingClientRect().top - notebook.node.getBoundingClientRect().top;
    return [cell.node.querySelector('h2')?.innerText, below];
}"""


@pytest.mark.release
def test_a_link_to_a_section_lands_on_it_though_the_lesson_was_closed(lab, page):
    """JupyterLab alone scrolls once, and the section moves away as the cells above it are drawn."""
    address, _ = lab
    for number in ("04", "09"):
        page.goto(f"{address}/lab/tree/COURSE.md?token={TOKEN}&reset")
        link = f".jp-RenderedMarkdown a[href*='/{number}_'][href$='#cell-id=section-4']"
        page.wait_for_selector(link, state="attached")
        page.evaluate("link => document.querySelector(link).click()", link)
        seen = []

        def is_at_rest(seen=seen):
            seen.append(page.evaluate(WHERE_IS_THE_SECTION, "section-4"))
            last = seen[-10:]
            return len(last) == 10 and last[0] is not None and last.count(last[0]) == 10

        until(is_at_rest, 60, 0.2)
        heading, below = seen[-1]
        assert heading.startswith("4. ") and -5 < below < 50, seen[-1]


def test_the_tab_of_a_solution_says_so(lab, page):
    address, _ = lab
    tabs = {}
    for folder in ("notebooks", "solutions"):
        page.goto(
            f"{address}/lab/tree/{folder}/05_ddp_buckets_overlap_hooks.ipynb?token={TOKEN}&reset"
        )
        shown = ".lm-TabBar-tab.lm-mod-current .lm-TabBar-tabLabel:has-text('05_ddp')"
        tabs[folder] = page.wait_for_selector(shown).inner_text()
    assert tabs == {
        "notebooks": "05_ddp_buckets_overlap_hooks.ipynb",
        "solutions": "solution 05_ddp_buckets_overlap_hooks.ipynb",
    }


@pytest.mark.release
def test_tensorboard_is_behind_the_token_and_shows_runs_that_come_later(lab, page):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    address, folder = lab
    assert status(f"{address}/tensorboard/")[0] in (302, 403)
    code, text = status(f"{address}/tensorboard/?token={TOKEN}")
    assert code == 200 and "TensorBoard" in text
    runs = f"{address}/tensorboard/data/runs?token={TOKEN}"
    later = {"terminal/later", "notebooks/later"}
    reference = {"reference/gpt_tiny/tensorboard", "reference/vit_tiny/tensorboard"}
    assert not (folder / "runs").exists() and not later & set(json.loads(status(runs)[1]))
    for place in ("runs", "notebooks/runs"):
        writer = EventFileWriter(str(folder / place / "later"))
        writer.add_event(Event(wall_time=1.0, step=1))
        writer.close()
    until(lambda: later | reference <= set(json.loads(status(runs)[1] or "[]")), 280, 0.5)
    page.goto(f"{address}/lab?token={TOKEN}&reset")
    page.wait_for_selector(".jp-LauncherCard:has-text('TensorBoard')")


def started(lab, what, **options):
    """A new terminal or kernel of the server, as the server describes it."""
    body = json.dumps(options).encode()
    asked = urllib.request.Request(f"{lab[0]}/api/{what}?token={TOKEN}", body, method="POST")
    with urllib.request.urlopen(asked, timeout=HANG_S) as answer:
        return json.load(answer)


def connected(lab, path):
    address = lab[0].replace("http", "ws")
    return websocket.create_connection(f"{address}/{path}?token={TOKEN}", HANG_S)


def typed(lab, line, last):
    """What a terminal of JupyterLab shows after somebody has typed a line."""
    name = started(lab, "terminals", cwd="notebooks")["name"]  # beside what is open
    with closing(connected(lab, f"terminals/websocket/{name}")) as terminal:
        terminal.send(json.dumps(["stdin", f"{line}\r"]))
        shown = ""
        while last not in shown:
            kind, *text = json.loads(terminal.recv())
            if kind == "stdout":
                shown += text[0]
        return shown


def executed(lab, code):
    """What a cell with this code prints first."""
    kernel = started(lab, "kernels")["id"]
    header = {"msg_id": "1", "username": "", "session": "1", "version": "5.3"}
    request = {
        "header": {**header, "msg_type": "execute_request"},
        "parent_header": {},
        "metadata": {},
        "content": {"code": code, "silent": False},
        "channel": "shell",
    }
    with closing(connected(lab, f"api/kernels/{kernel}/channels")) as channels:
        channels.send(json.dumps(request))
        while True:
            message = json.loads(channels.recv())
            if message["msg_type"] in ("stream", "error"):
                return message["content"].get("text", "")


def test_the_commands_of_readme_and_lessons_are_found_in_the_terminal(lab):
    """All programs that they name, after what a user's own settings do to PATH."""
    pages = [ROOT / "README.md", ROOT / "COURSE.md", *(ROOT / "book" / "guide").glob("*.md")]
    modules = set()
    for page in (*pages, *(ROOT / "solutions").glob("*.py")):
        modules |= set(re.findall(r"python -m (labcode(?:\.\w+)*)", page.read_text()))
    assert {"labcode", "labcode.train", "labcode.slurm", "labcode.doctor"} <= modules
    commands = [f"python -m {module} --help" for module in sorted(modules)]
    commands += ["torchrun --help", "tensorboard --help"]
    line = "; ".join(f'{command} >/dev/null || echo "no: {command}"' for command in commands)
    shown = typed(
        lab,
        f"{line}; command -v python torchrun; echo in $PWD; echo $OF_THE_USER all $((40 + 2))",
        "1 all 42",
    )
    # the line itself is shown as well, as it was typed
    assert re.findall(r"(?m)^no: .*", shown) == []
    programs = str(Path(sys.executable).parent)
    assert f"{programs}/python\r" in shown and f"{programs}/torchrun\r" in shown
    assert f"in {lab[1]}\r" in shown


def test_the_programs_of_the_course_are_found_after_an_exclamation_mark(lab):
    programs = Path(sys.executable).parent
    assert executed(lab, "!command -v torchrun").strip() == str(programs / "torchrun")


def test_a_stranger_gets_nothing(lab):
    address, _ = lab
    assert status(f"{address}/api/contents")[0] == 403
    assert status(f"{address}/lab")[0] == 302
