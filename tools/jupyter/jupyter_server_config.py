"""JupyterLab's settings for the course: localhost, a token, TensorBoard behind the same token."""

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

c = get_config()  # noqa: F821  (put here by Jupyter)
root = Path(__file__).resolve().parents[2]

c.ServerApp.ip = "localhost"
c.ServerApp.root_dir = str(root)
c.ServerApp.allow_root = os.geteuid() == 0  # containers; everyone else keeps Jupyter's default

# Also in the address that is printed.
first = next(iter(sorted(root.glob("notebooks/00_*.ipynb"))), None)
c.LabApp.default_url = f"/lab/tree/notebooks/{first.name}" if first else "/lab"

# `python` and `torchrun` are those of the course, after `!` in a cell as in a terminal. A bash
# reads its user's settings, which may put another Python first: it reads them by way of our file.
programs = str(Path(sys.executable).parent)
os.environ["COURSE_PROGRAMS"] = programs
os.environ["COURSE_FOLDER"] = str(root)
os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
here = root / "tools" / "jupyter"
shell = os.environ.get("SHELL") or shutil.which("bash") or "sh"
is_bash = Path(shell).name == "bash"
c.ServerApp.terminado_settings = {
    "shell_command": [shell, "--rcfile", str(here / "bashrc")] if is_bash else [shell]
}
# Threads that wait for one another sleep instead of spinning: on a busy machine a step of a small
# model else takes ten times as long. OpenMP reads it when a kernel imports PyTorch.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

c.LabApp.news_url = None  # no look-up on the network
c.LabApp.check_for_updates_class = "jupyterlab.NeverCheckForUpdate"
# `make setup` installs basedpyright, and jupyter-lsp would start it for a notebook: a process that
# no lesson needs, and whose complaints are dialogs over the page
c.LanguageServerManager.autodetect = False
# overrides.json: no question about news, whole names in the file list, Markdown as a page
# page_config.json: no panel of IPython Parallel, no tiles of Jupytext, no buttons inside a cell
# (they cover the link to the next lesson; the toolbar and the menus of the notebook have them)
c.LabApp.app_settings_dir = str(here / "settings")
# links to the sections of a lesson land on them
c.LabApp.extra_labextensions_path = [str(here / "labextensions")]

# What is open and where is kept apart from the user's other work with JupyterLab. The first time
# it is as workspace.json says: the table of contents open, in a sidebar as wide as names are long.
workspaces = root / "build" / "jupyter"
workspace = workspaces / "default-37a8.jupyterlab-workspace"
if not workspace.exists():
    workspaces.mkdir(parents=True, exist_ok=True)
    shutil.copy(here / "workspace.json", workspace)
c.LabApp.workspaces_dir = str(workspaces)


class Contents(AsyncLargeFileManager):
    """Files as they are on the disk, and notebooks with the version of this Python.

    A kernel writes the version of its Python into the notebook. The notebooks of the course do not
    have it, as it differs from machine to machine, so each would count as modified once opened.
    """

    async def get(self, *args: Any, **options: Any) -> dict[str, Any]:
        model = await super().get(*args, **options)
        if model["type"] == "notebook" and model["content"]:
            language = model["content"]["metadata"].get("language_info", {})
            if language.get("name") == "python":
                language.setdefault("version", platform.python_version())
        return model


c.ServerApp.contents_manager_class = Contents


class KernelSpecs(KernelSpecManager):
    """Kernels as they are installed; those of IPython run `kernel_startup.py` before a cell."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        spec = super().get_kernel_spec(kernel_name)
        if "ipykernel_launcher" in spec.argv:
            spec.argv = [*spec.argv, f"--IPKernelApp.exec_files={here / 'kernel_startup.py'}"]
        return spec


c.ServerApp.kernel_spec_manager_class = KernelSpecs

# A kernel works in the folder of its notebook, so runs that it starts land in notebooks/runs.
# TensorBoard watches links to folders that do not exist yet, and shows their runs, and what was
# recorded of them in its profiler tab, as soon as they appear. Links in one folder, because that
# tab does not know --logdir_spec and would search all of this repository instead.
folders = {
    "terminal": root / "runs",
    "notebooks": root / "notebooks" / "runs",
    "solutions": root / "solutions" / "runs",
    # runs that ship with the course, to be seen under the own ones
    "reference": root / "labcode" / "assets" / "reference_runs",
}
watched = root / "build" / "tensorboard"
watched.mkdir(parents=True, exist_ok=True)
for name, folder in folders.items():
    (watched / name).unlink(missing_ok=True)
    (watched / name).symlink_to(folder)
options = ["--logdir", str(watched), "--host", "localhost", "--port", "{port}"]
c.ServerProxy.servers = {
    "tensorboard": {
        "command": [sys.executable, "-m", "tensorboard.main", *options],
        "timeout": 60,
        "launcher_entry": {"title": "TensorBoard"},
    }
}
