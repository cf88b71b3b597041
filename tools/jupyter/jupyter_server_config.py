"""JupyterLab's settings for the course: localhost, a token, TensorBoard behind the same token."""

import os
import sys
from pathlib import Path

c = get_config()  # noqa: F821  (put here by Jupyter)
root = Path(__file__).resolve().parents[2]

c.ServerApp.ip = "localhost"
c.ServerApp.root_dir = str(root)
c.ServerApp.allow_root = os.geteuid() == 0  # containers; everyone else keeps Jupyter's default

# Also in the address that is printed.
first = next(iter(sorted(root.glob("notebooks/00_*.ipynb"))), None)
c.LabApp.default_url = f"/lab/tree/notebooks/{first.name}" if first else "/lab"

c.LabApp.news_url = None  # no look-up on the network
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
# overrides.json: no question about news
c.LabApp.app_settings_dir = str(root / "tools" / "jupyter" / "settings")

# A kernel works in the folder of its notebook, so runs that it starts land in notebooks/runs.
# TensorBoard watches folders that do not exist yet, and shows their runs as soon as they appear.
folders = {
    "terminal": root / "runs",
    "notebooks": root / "notebooks" / "runs",
    "solutions": root / "solutions" / "runs",
}
spec = ",".join(f"{name}:{folder}" for name, folder in folders.items())
options = ["--logdir_spec", spec, "--host", "localhost", "--port", "{port}"]
c.ServerProxy.servers = {
    "tensorboard": {
        "command": [sys.executable, "-m", "tensorboard.main", *options],
        "timeout": 60,
        "launcher_entry": {"title": "TensorBoard"},
    }
}
