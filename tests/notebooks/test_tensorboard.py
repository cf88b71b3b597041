"""The TensorBoard of `make lab`: its profiler tab finds what a run has recorded."""

import json
import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest
from faults import forks
from faults.cases import BASE
from faults.waiting import comes, free_port
from traitlets.config import Config

from labcode.runtime import processes

CONFIG = Path(__file__).resolve().parents[2] / "tools" / "jupyter" / "jupyter_server_config.py"
PATIENCE_S = 120.0


def tile_command(root):
    """What the tile of the launcher starts, for a repository at `root`."""
    shutil.copytree(CONFIG.parent, root / "tools" / "jupyter")
    config = Config()
    path = root / "tools" / "jupyter" / CONFIG.name
    names = {"get_config": lambda: config, "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return config.ServerProxy.servers["tensorboard"]["command"]


def answer(port, path):
    """The JSON of an address; None as long as nobody answers."""
    try:
        with urllib.request.urlopen(f"http://localhost:{port}/data/{path}", timeout=30) as page:
            return json.load(page)
    except OSError:
        return None


def wait_for(port, path, wanted):
    found = []

    def is_as_wanted():
        found[:] = [answer(port, path)]
        return found[0] is not None and wanted(found[0])

    assert comes(is_as_wanted, PATIENCE_S, 0.5), f"{path} did not answer as it should: {found}"
    return found[0]


@pytest.mark.release
def test_the_profiler_tab_shows_a_run_that_begins_later(tmp_path):
    port = free_port()
    command = [word.format(port=port) for word in tile_command(tmp_path)]
    board = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        plugins = wait_for(port, "plugins_listing", bool)
        assert "pytorch_profiler" in plugins
        args = [*BASE, "--train.steps=4", "--profile.steps=3:5", "--train.out=runs/mine"]
        assert forks.train(args, cwd=tmp_path).codes == [0]
        run = "terminal/mine/profile"
        wait_for(port, "plugin/pytorch_profiler/runs", lambda found: run in found["runs"])
        workers = answer(port, f"plugin/pytorch_profiler/workers?run={run}&view=Overview")
        (worker,) = workers
        assert worker.endswith("_0")
        (span,) = answer(port, f"plugin/pytorch_profiler/spans?run={run}&worker={worker}")
        which = f"run={run}&worker={worker}&span={span}"
        overview = answer(port, f"plugin/pytorch_profiler/overview?{which}")
        assert [row[0] for row in overview["steps"]["rows"]] == ["3", "4"]
        scalars = answer(port, "plugin/scalars/tags")
        tags = sorted(scalars["terminal/mine/tensorboard"])
        assert tags[:2] == ["loss", "lr"]  # what is looked for first, in TensorBoard's order
        assert "step/backward_s" in tags
    finally:
        processes.end([board])
