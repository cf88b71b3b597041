"""Ruff, its formatter, the type checker and the link checker, as part of the test run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
LESSON_COLUMNS = 88
# lessons whose code keeps to LESSON_COLUMNS; ends with all
REWRITTEN_LESSONS: tuple[str, ...] = (
    "02_one_device_baseline_data_profile",
    "03_one_device_fast",
    "04_data_parallel_by_hand",
    "05_ddp_buckets_overlap_hooks",
    "07_the_ddp_clinic",
    "08_communicator_grids",
    "09_tensor_parallel",
    "10_sequence_parallel_and_activation_memory",
    "11_context_parallel_the_ring",
    "12_pipeline_parallel",
    "13_sharded_data_parallel",
    "14_slurm_and_multi_node",
    "15_hybrid_training",
    "16_making_it_fit",
    "17_surviving_failures",
    "18_low_precision",
    "19_debugging_precision",
    "20_predict_before_you_submit",
    "21_capstone",
)


def run_tool(*command: str) -> str:
    """What a tool of this environment printed, whatever its exit code."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip(), f"{command[0]} printed nothing: {done.stderr}"
    return done.stdout


def path_from_root(file: str) -> str:
    return str(Path(file).resolve().relative_to(ROOT))


def test_ruff_finds_nothing() -> None:
    found = []
    for problem in json.loads(run_tool(str(BIN / "ruff"), "check", ".", "--output-format", "json")):
        file = path_from_root(problem["filename"])
        found.append(f"{file}:{problem['location']['row']}: {problem['message']}")
    assert found == []


def test_the_formatter_changes_nothing() -> None:
    found = []
    for line in run_tool(str(BIN / "ruff"), "format", "--check", ".").splitlines():
        verdict, _, file = line.partition(": ")
        if verdict == "Would reformat":
            found.append(file)
    assert found == []


@pytest.mark.timeout(900)  # a minute alone; more where others compute too
def test_types_are_right() -> None:
    command = [str(BIN / "basedpyright"), "--pythonpath", sys.executable]
    report = json.loads(run_tool(*command, "--level", "error", "--outputjson"))
    assert report["summary"]["filesAnalyzed"] > 100
    found = []
    for problem in report["generalDiagnostics"]:
        file = path_from_root(problem["file"])
        line = problem["range"]["start"]["line"] + 1
        found.append(f"{file}:{line}: {problem['message']}")
    assert found == []


def test_links_lead_somewhere() -> None:
    command = [sys.executable, "-m", "tools.check_links"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def long_code_lines(text: str) -> list[int]:
    """The numbers of the lines in code cells of a lesson's source that are too long to read."""
    found = []
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("# %%"):
            in_code = "[markdown]" not in line
        elif in_code and len(line) > LESSON_COLUMNS:
            found.append(number)
    return found


@pytest.mark.parametrize("lesson", REWRITTEN_LESSONS)
def test_code_of_a_lesson_fits_the_page(lesson: str) -> None:
    assert long_code_lines((ROOT / "solutions" / f"{lesson}.py").read_text()) == []


def test_long_code_lines_are_found_in_code_alone() -> None:
    long = "x = " + "1" * LESSON_COLUMNS
    assert long_code_lines(f"# %% [markdown]\n# {long}\n\n# %%\n{long}\nx = 1\n") == [5]
