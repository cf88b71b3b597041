"""A wheel holds all that the library reads: profiles, templates, assets. Nothing is fetched."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the content of the wheel, as an installation without the repository has it."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "labcode", source / "labcode", ignore=ignored)
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=source,
        check=True,
        capture_output=True,
        timeout=250,
    )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


def files(folder):
    """The files of the package below `folder`, without what Python has compiled."""
    package = folder / "labcode"
    found = {path.relative_to(package) for path in package.rglob("*") if path.is_file()}
    return {path for path in found if "__pycache__" not in path.parts}


def test_every_file_of_the_package_is_in_the_wheel(installed):
    assert files(ROOT) - files(installed) == set()


def test_the_installed_package_finds_its_sites_and_its_templates(installed):
    code = (
        "import labcode, labcode.slurm.script.site as site\n"
        "from labcode.slurm.script.job import Job\n"
        "from labcode.slurm.script.render import render\n"
        "print(labcode.__file__)\n"
        "for name in site.names(): render(Job('gpt_tiny'), site.load(name))\n"
        "print(*site.names())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=installed,
        env={"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    where, found = done.stdout.splitlines()
    assert Path(where).is_relative_to(installed)
    assert "local" in found.split() and "perlmutter" in found.split()
