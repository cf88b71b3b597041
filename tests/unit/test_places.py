"""Files for containers and conda agree with the Makefile and pyproject.toml; nothing is built."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PLACES = ["Dockerfile", "course.def", ".devcontainer/devcontainer.json"]


@pytest.mark.parametrize("place", PLACES)
def test_every_make_target_named_exists(place):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake(?:\", \"| )([a-z]+)\b", (ROOT / place).read_text()))
    named -= {"procps"}  # the line of apt-get
    assert "setup" in named
    assert named <= targets


def test_the_two_images_agree():
    packages = []
    versions = []
    for place in ("Dockerfile", "course.def"):
        text = (ROOT / place).read_text()
        packages.append(re.findall(r"--no-install-recommends (.+?)(?: \\)?$", text, re.MULTILINE))
        versions.append(re.findall(r"python:(\d+\.\d+)-slim", text))
    assert packages[0] == packages[1]
    assert len(packages[0]) == 1
    assert versions[0] == versions[1]
    assert len(versions[0]) == 1


def test_python_and_extras_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    assert f"python={oldest}" in environment
    assert f"FROM python:{oldest}-slim" in (ROOT / "Dockerfile").read_text()
    extra = re.fullmatch(r"-e \.\[(\w+)\]", environment[-1]["pip"][-1])
    assert extra is not None
    assert extra[1] in project["optional-dependencies"]


def test_the_container_of_vs_code_builds_from_the_dockerfile_and_its_user():
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    dockerfile = ROOT / ".devcontainer" / container["build"]["dockerfile"]
    assert dockerfile.resolve() == ROOT / "Dockerfile"
    assert f"USER {container['remoteUser']}\n" in dockerfile.read_text()
