"""Takes a picture of JupyterLab on a lesson, as `make lab` shows it.

python -m tools.screenshot NOTEBOOK "text of a cell" PICTURE [--scale 2] [--dark] [--width 1440]
python -m tools.screenshot solutions/04_data_parallel_by_hand.ipynb "times_as_much = (" x.png
"""

import argparse
import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TOKEN = "screenshot"
NOTEBOOK_IS_OPEN = (
    "() => window.jupyterapp?.shell.currentWidget?.content?.widgets?.length > 3"  # cells
)
SCROLL_TO_CELL = """async (text) => {
    const notebook = window.jupyterapp.shell.currentWidget;
    await notebook.context.ready;
    const cells = notebook.content.widgets;
    const at = cells.findIndex(cell => cell.model.sharedModel.getSource().includes(text));
    notebook.content.activeCellIndex = at;
    for (let i = 0; i < 5; i++) {
        await notebook.content.scrollToItem(at, 'start');
        await new Promise(resolve => setTimeout(resolve, 600));
    }
}"""


def free_port() -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def wait_until_up(url: str, attempts: int = 600) -> None:
    """Return when a page can be had; after all attempts too, and the browser then shows why."""
    for _ in range(attempts):
        try:
            with urllib.request.urlopen(url):
                return
        except OSError:
            time.sleep(0.2)


@contextlib.contextmanager
def server(*, dark: bool = False, root: Path = ROOT) -> Iterator[str]:
    """A JupyterLab on the course that leaves the user's own settings alone; gives the address.

    Args:
        dark: Choose the dark theme.
        root: The course, or a copy of it.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as home:
        workspace = "default-37a8.jupyterlab-workspace"
        shutil.copy(ROOT / "tools" / "jupyter" / "workspace.json", Path(home) / workspace)
        if dark:
            themes = Path(home) / "@jupyterlab" / "apputils-extension"
            themes.mkdir(parents=True)
            settings = {"theme": "JupyterLab Dark"}
            (themes / "themes.jupyterlab-settings").write_text(json.dumps(settings))
        command = [
            sys.executable,
            "-m",
            "jupyterlab",
            f"--config={root / 'tools' / 'jupyter' / 'jupyter_server_config.py'}",
            f"--ServerApp.port={port}",
            f"--IdentityProvider.token={TOKEN}",
            "--ServerApp.open_browser=False",
            "--LabApp.expose_app_in_browser=True",
            f"--LabApp.workspaces_dir={home}",
            f"--LabApp.user_settings_dir={home}",
        ]
        silent = subprocess.DEVNULL
        lab = subprocess.Popen(command, cwd=root, stdout=silent, stderr=silent)
        try:
            wait_until_up(f"http://localhost:{port}/api?token={TOKEN}")
            yield f"http://localhost:{port}"
        finally:
            lab.terminate()
            lab.wait(30)


def shoot(
    notebook: str,
    text: str,
    picture: str,
    *,
    scale: float = 1,
    dark: bool = False,
    width: int = 1280,
) -> None:
    """Scroll to the cell whose source holds `text` and save what is on the screen as a PNG.

    Args:
        notebook: Path from the root of the course.
        text: What only this cell holds.
        picture: Path of the PNG to write.
        scale: Dots of the screen for each pixel of the page.
        dark: Whether to use the dark theme.
        width: Width of the window, in pixels of the page.
    """
    from playwright.sync_api import sync_playwright

    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        raise SystemExit(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    with server(dark=dark) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": width, "height": 860}, device_scale_factor=scale)
        page.set_default_timeout(120_000)
        page.goto(f"{address}/lab/tree/{notebook}?token={TOKEN}")
        page.wait_for_function(NOTEBOOK_IS_OPEN)
        page.evaluate(SCROLL_TO_CELL, text)
        page.wait_for_timeout(1500)
        page.screenshot(path=picture)
        browser.close()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.screenshot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("notebook", help="path from the root of the course")
    parser.add_argument("text", help="of the cell to scroll to")
    parser.add_argument("picture", help="the PNG to write")
    parser.add_argument("--scale", type=float, default=1, help="2: as on a screen of high density")
    parser.add_argument("--dark", action="store_true", help="the dark theme")
    parser.add_argument("--width", type=int, default=1280, help="of the window (default 1280)")
    options = parser.parse_args()
    shoot(
        options.notebook,
        options.text,
        options.picture,
        scale=options.scale,
        dark=options.dark,
        width=options.width,
    )


if __name__ == "__main__":
    main()
