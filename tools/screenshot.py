"""Takes `images/lesson_in_use.png`: JupyterLab on an executed lesson, as the README shows it.

python -m tools.screenshot solutions/04_data_parallel.ipynb "distance_guess = 1.0" images/lesson_in_use.png
"""

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TOKEN = "screenshot"


@contextlib.contextmanager
def server():
    """A JupyterLab on the course, with its settings kept out of the user's own; gives the address."""
    with socket.socket() as probe, tempfile.TemporaryDirectory() as home:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
        probe.close()
        config = ROOT / "tools" / "jupyter" / "jupyter_server_config.py"
        options = [
            f"--ServerApp.port={port}",
            f"--IdentityProvider.token={TOKEN}",
            "--ServerApp.open_browser=False",
        ]
        options += [
            "--LabApp.expose_app_in_browser=True",
            f"--LabApp.workspaces_dir={home}",
            f"--LabApp.user_settings_dir={home}",
        ]
        command = [sys.executable, "-m", "jupyterlab", "--config", str(config), *options]
        lab = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            for _ in range(300):
                with (
                    contextlib.suppress(OSError),
                    urllib.request.urlopen(f"http://localhost:{port}/api?token={TOKEN}"),
                ):
                    break
                time.sleep(0.2)
            yield f"http://localhost:{port}"
        finally:
            lab.terminate()
            lab.wait(30)


def shoot(notebook: str, text: str, picture: str) -> None:
    """Scroll to the cell whose source holds `text` and save what is on the screen as a PNG."""
    from playwright.sync_api import sync_playwright

    browser_path = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser_path is None:
        raise SystemExit(f"no browser is installed (looked for {', '.join(BROWSERS)})")
    with server() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(f"{address}/lab/tree/{notebook}?token={TOKEN}&reset")
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.content?.widgets?.length > 3"
        )
        page.evaluate(
            """async (text) => {
                const content = window.jupyterapp.shell.currentWidget.content;
                await window.jupyterapp.shell.currentWidget.context.ready;
                const at = content.widgets.findIndex(widget => widget.model.sharedModel.getSource().includes(text));
                content.activeCellIndex = at;
                for (let i = 0; i < 5; i++) {
                    await content.scrollToItem(at, 'start');
                    await new Promise(resolve => setTimeout(resolve, 600));
                }
            }""",
            text,
        )
        page.wait_for_timeout(1500)
        page.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    if len(sys.argv) != 4:
        raise SystemExit(__doc__)
    shoot(*sys.argv[1:])
