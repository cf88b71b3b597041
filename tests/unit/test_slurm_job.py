"""A job: an impossible one is refused at once; its arguments are those of the training program."""

import subprocess
import sys

import pytest

from labcode.runtime.command import parse
from labcode.slurm.script.job import Job


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "gpt_huge"}, "unknown recipe 'gpt_huge': .*gpt_tiny"),
        (
            {"recipe": "gpt_tiny", "overrides": ("--parallel.dp", "3")},
            r"dp\*pp\*cp\*tp = 3\*1\*1\*1 = 3 but WORLD_SIZE is 2",
        ),
        (
            {"recipe": "gpt_tiny", "overrides": ("--parallel.tpp", "2")},
            "unknown field --parallel.tpp: did you mean --parallel.tp",
        ),
        (
            {"recipe": "gpt_tiny", "overrides": ("--train.overwrite",)},
            "checkpoint.resume continues .* train.overwrite",
        ),
        ({"recipe": "gpt_tiny", "overrides": ("--help",)}, "trains nothing"),
        ({"recipe": "--help"}, "trains nothing"),
        (
            {"recipe": "gpt_tiny", "overrides": ("--train.out", "x"), "array": "0-3"},
            "would write into one folder",
        ),
    ],
)
def test_check_refuses_what_cannot_run(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        Job(**given).check()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"nodes": 0}, "nodes=0: give at least 1"),
        ({"ranks_per_node": -1}, "ranks_per_node=-1"),
        ({"max_attempts": 0}, "max_attempts=0: give at least 1"),
        ({"max_restarts": -1}, "max_restarts=-1: give 0 for none, or more"),
        ({"minutes": 2, "signal_s": 120}, "signal_s=120 is no less than the time limit of 120 s"),
        ({"name": "a\nb"}, "goes on one line"),
        ({"name": "a/b"}, "without /"),
        ({"name": " "}, "not an empty one"),
        ({"name": "."}, r"not an empty one, \. or \.\."),
        ({"name": " .. "}, r"not an empty one, \. or \.\."),
        ({"array": "0-3; rm -rf ~"}, "array="),
        ({"dependency": "afterok:1\n#SBATCH --uid=0"}, "goes on one line"),
        ({"env": {"A B": "1"}}, "no name of a variable"),
        ({"env": {"A": "1\0"}}, "NUL"),
        ({"module": "os; ls"}, "module="),
        ({"overrides": "--parallel.tp 2"}, "one string"),
    ],
)
def test_a_job_that_cannot_be_is_refused_at_once(given, message):
    with pytest.raises(ValueError, match=message):
        Job("gpt_tiny", **given)


def test_the_grid_takes_all_ranks_of_all_nodes():
    job = Job("gpt_tiny", ("--parallel.tp", "2", "--parallel.pp", "2"), nodes=4, ranks_per_node=2)
    assert job.world_size == 8
    assert job.check().dp == 2


def test_the_arguments_are_read_back_as_the_config_that_was_checked():
    job = Job("gpt_tiny", ("--train.steps", "7"), nodes=2)
    config = parse(job.arguments("runs/a b"))
    assert (config.train.steps, config.train.out, config.checkpoint.resume) == (7, "runs/a b", True)


def test_a_folder_and_a_resume_of_the_users_own_are_left_alone():
    job = Job("gpt_tiny", ("--train.out", "mine", "--checkpoint.resume"))
    assert job.arguments("runs/x") == ["gpt_tiny", "--train.out", "mine", "--checkpoint.resume"]


def test_without_requeue_and_for_other_modules_nothing_about_checkpoints_is_added():
    assert Job("gpt_tiny", requeue=False).arguments("x") == ["gpt_tiny", "--train.out", "x"]
    other = Job("", ("--flag",), module="labcode.doctor")
    assert (other.arguments("x"), other.name, other.resumes, other.check()) == (
        ["--flag"],
        "doctor",
        False,
        None,
    )


@pytest.mark.parametrize(("minutes", "signal_s"), [(1, 30), (3, 90), (60, 120)])
def test_the_checkpoint_is_asked_for_in_time(minutes, signal_s):
    assert Job("gpt_tiny", minutes=minutes).signal_s == signal_s


def test_checking_a_job_needs_no_torch():
    code = (
        "import sys; from labcode.slurm.script.job import Job; "
        "Job('gpt_tiny').check(); print('torch' in sys.modules)"
    )
    run = {"capture_output": True, "text": True, "check": True}
    assert subprocess.run([sys.executable, "-c", code], **run).stdout == "False\n"
