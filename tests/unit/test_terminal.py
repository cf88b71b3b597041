"""Where a terminal of the course begins: tools/jupyter/bashrc."""

import os
import subprocess
from pathlib import Path

import pytest

RCFILE = Path(__file__).parents[2] / "tools" / "jupyter" / "bashrc"


@pytest.mark.parametrize(
    ("opened_in", "begins_in"),
    [
        (".", "."),
        ("notebooks", "."),  # where JupyterLab is when a lesson is open
        ("solutions", "."),
        ("notebooks/runs", "notebooks/runs"),
        ("slurm", "slurm"),
    ],
)
def test_a_terminal_begins_in_the_course_unless_it_was_opened_in_another_folder(
    tmp_path, opened_in, begins_in
):
    course = tmp_path / "the course"
    (course / opened_in).mkdir(parents=True)
    known = {"HOME": str(tmp_path), "COURSE_FOLDER": str(course), "COURSE_PROGRAMS": "/programs"}
    shown = subprocess.run(
        ["bash", "--rcfile", str(RCFILE), "-i", "-c", 'pwd; echo "${PATH%%:*}"'],
        cwd=course / opened_in,
        env={**os.environ, **known},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.splitlines() == [str(course / begins_in), "/programs"]
