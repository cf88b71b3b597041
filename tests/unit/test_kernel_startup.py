"""A kernel of `make lab` before its first cell: what it says to a `%%px` cell without ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from jupyter_lsp import LanguageServerManager
from traitlets.config import PyFileConfigLoader

FOLDER = Path(__file__).resolve().parents[2] / "tools" / "jupyter"

CELLS = """
from IPython.testing.globalipapp import start_ipython
shell = start_ipython()
names = set(shell.user_ns)
shell.safe_execfile(sys.argv[1], shell.user_ns, raise_exceptions=True)
print(sorted(set(shell.user_ns) - names - {"__file__"}))
shell.run_cell("%%px\\nprint(1)")
shell.run_cell("%px print(1)")
"""


def test_a_px_cell_of_a_new_kernel_says_which_cell_to_run_first():
    startup = str(FOLDER / "kernel_startup.py")
    command = [sys.executable, "-c", f"import sys\n{CELLS}", startup]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said = [line for line in (done.stdout + done.stderr).splitlines() if "UsageError" in line]
    assert len(said) == 2
    for line in said:
        assert line.startswith("UsageError: this kernel has no ranks: run the first cell of the")
    assert done.stdout.splitlines()[0] == "[]"  # no name of it is left


@pytest.mark.release
def test_the_server_of_the_course_starts_kernels_with_it_and_a_pool_takes_its_place(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    for name in ("COURSE_PROGRAMS", "COURSE_FOLDER", "PATH", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # the configuration sets it, and the test puts it back
    config = PyFileConfigLoader("jupyter_server_config.py", str(FOLDER)).load_config()
    specs = config.ServerApp.kernel_spec_manager_class()
    kernel = KernelManager(kernel_name="python3", kernel_spec_manager=specs)
    kernel.start_kernel()
    client = kernel.blocking_client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=60)
        seen = []
        client.execute_interactive("%%px\nprint(1)", timeout=60, output_hook=seen.append)
        text = "".join(message["content"].get("text", "") for message in seen)
        assert "this kernel has no ranks: run the first cell" in text
        code = (
            "from course.pool import cells\n"
            "class Pool:\n"
            "    def run_cell(self, source, name): print('on the ranks')\n"
            "pool = Pool()\n"
            "cells.register(get_ipython(), pool)\n"
        )
        client.execute_interactive(code, timeout=60, output_hook=seen.append)
        seen.clear()
        client.execute_interactive("%%px\nprint(1)", timeout=60, output_hook=seen.append)
        text = "".join(message["content"].get("text", "") for message in seen)
        assert text == "on the ranks\n"
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)


def test_no_language_server_is_started_for_a_notebook(monkeypatch):
    for name in ("COURSE_PROGRAMS", "COURSE_FOLDER", "PATH", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, os.environ.get(name, ""))  # the test puts it back
    config = PyFileConfigLoader("jupyter_server_config.py", str(FOLDER)).load_config()
    found = LanguageServerManager(config=config)
    found.init_language_servers()
    assert found.language_servers == {}


def test_no_buttons_lie_over_the_links_of_a_cell():
    page = json.loads((FOLDER / "settings" / "page_config.json").read_text())
    assert page["disabledExtensions"]["@jupyterlab/cell-toolbar-extension"]
