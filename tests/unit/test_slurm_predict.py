"""Predictions in the scripts of jobs, and jobs that are refused before they wait."""

from dataclasses import replace

import pytest

from labcode.slurm.run.submit import submit
from labcode.slurm.script.job import Job
from labcode.slurm.script.predict import predicted, refuse_out_of_memory
from labcode.slurm.script.render import render
from labcode.slurm.script.site import load

PERLMUTTER = load("perlmutter")
HUGE = ("--model.hidden_size", "8192", "--model.num_heads", "64", "--model.num_layers", "60")


def job(*overrides: str) -> Job:
    return Job("gpt_10m", overrides, nodes=2, ranks_per_node=4)


def test_the_header_says_what_is_predicted():
    text = " ".join(render(job(), PERLMUTTER).replace("\n#", "").split())
    assert "Predicted: a step takes" in text
    assert "GiB of each GPU" in text
    assert "out of memory" not in text
    assert "Predicted" not in render(job(), load("generic"))


def test_a_job_that_does_not_fit_says_so_and_is_refused_unless_forced(tmp_path):
    large = job(*HUGE)
    assert "it will run out of memory" in " ".join(render(large, PERLMUTTER).split())
    with pytest.raises(ValueError, match=r"of 39\.4: the job would run out of memory; .*--force"):
        submit(large, PERLMUTTER, here=True)
    refuse_out_of_memory(job(), PERLMUTTER)
    # with force it comes as far as the folder of the logs, which cannot be made here
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError):
        submit(large, replace(PERLMUTTER, logs=str(file / "logs")), here=True, force=True)


def test_what_cannot_be_predicted_is_said_and_not_refused():
    own = job("--data.path", "corpus.txt", "--data.tokenizer", "char")
    assert "Not predicted: vocab_size=None" in render(own, PERLMUTTER)
    refuse_out_of_memory(own, PERLMUTTER)
    with pytest.raises(ValueError, match="generic names no cluster of the planner"):
        predicted(job(), load("generic"))
    with pytest.raises(ValueError, match="is not the training program"):
        predicted(Job("", module="labcode.doctor"), PERLMUTTER)
