"""Recording steps of real runs: which steps, which ranks, the files, and who can read them."""

import json

import pytest
from faults import forks
from faults.cases import BASE
from torch_tb_profiler import consts
from torch_tb_profiler.io import Cache
from torch_tb_profiler.profiler.data import RunProfileData

from labcode.measure import profile
from labcode.perf.chrome_trace import PARTS, files_of_run, read
from labcode.perf.memory_timeline import memory_timeline
from labcode.train.checkpoint.same_run import MAY_CHANGE

ARGS = (*BASE, "--train.steps=6", "--train.out=run", "--train.eval_every=2")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run of two ranks, each of which has recorded steps 3 and 4, with its memory."""
    folder = tmp_path_factory.mktemp("recorded")
    options = ("--profile.steps=3:5", "--profile.ranks", "0", "1", "--profile.memory")
    done = forks.train([*ARGS, *options], cwd=folder, ranks=2)
    assert done.codes == [0, 0], done.err
    return folder / "run"


def test_each_rank_records_the_steps_that_were_asked_for(recorded):
    for rank in (0, 1):
        trace = read(recorded, rank)
        assert trace.rank == rank
        assert sorted(trace.steps()) == [3, 4]
        for step in trace.steps().values():
            # the validation after step 4 is no part of it
            assert [part.name for part in trace.parts(step)].count("forward") == 1
            assert {part.name for part in trace.parts(step)} == set(PARTS)


def test_each_rank_has_written_its_trace(recorded):
    assert [path.parent.name for path in files_of_run(recorded)] == ["profile", "profile"]


def test_tensorboards_profiler_tab_reads_the_files(recorded):
    for rank, path in enumerate(files_of_run(recorded)):
        matched = consts.WORKER_PATTERN.match(path.name)
        assert matched[1].endswith(f"_{rank}")
        data = RunProfileData.parse(matched[1], None, str(path), Cache())
        assert list(data.steps_names) == ["3", "4"]
        names = {operation.name for operation in data.op_list_groupby_name}
        assert {"aten::addmm", "aten::mm"} <= names
        assert data.memory_snapshot is not None
        assert data.distributed_info["world_size"] == 2


def test_the_memory_of_a_run_is_in_it(recorded):
    timeline = memory_timeline(recorded)
    assert timeline.step == 4
    assert timeline.most("parameters") == timeline.used_bytes["parameters"][0] > 0
    assert timeline.most("optimizer") >= 2 * timeline.most("parameters")
    assert timeline.most("gradients") >= timeline.most("parameters")
    assert timeline.most("activations") > 0


def test_the_command_says_where_the_time_went(recorded, capsys):
    assert profile.main([str(recorded), "--rank", "1"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("rank 1, CPU, steps 3, 4")
    assert "\n-> " in said
    assert profile.main([str(recorded / "nowhere")]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def trained(folder, *options, ranks=1, extra=ARGS):
    done = forks.train([*extra, *options], cwd=folder, ranks=ranks)
    assert set(done.codes) == {0}, done.err
    return folder / "run"


def test_steps_past_the_end_are_left_out(tmp_path):
    run = trained(tmp_path, "--profile.steps=5:9")
    assert sorted(read(run).steps()) == [5, 6]


def test_the_first_step_has_no_warm_up(tmp_path):
    run = trained(tmp_path, "--profile.steps=1:3")
    assert sorted(read(run).steps()) == [1, 2]


def test_a_resumed_run_records_what_is_left(tmp_path):
    options = ("--checkpoint.every=4", "--train.eval_every=0")
    trained(tmp_path, *options, "--train.steps=4")
    run = trained(tmp_path, *options, "--checkpoint.resume", "--profile.steps=4:6")
    assert sorted(read(run).steps()) == [5]
    assert "profile." in MAY_CHANGE


def test_only_chosen_ranks_record(tmp_path):
    run = trained(tmp_path, "--profile.steps=2", "--profile.ranks=1", ranks=2)
    assert [path.name.split(".")[0].rpartition("_")[2] for path in files_of_run(run)] == ["1"]


def test_recording_changes_no_number(tmp_path):
    rows = []
    for options in ((), ("--profile.steps=2:6", "--profile.memory")):
        run = trained(tmp_path, "--train.log_every=1", "--train.overwrite", *options)
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line).get("grad_norm") for line in lines])
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("options", "message"),
    {
        "no steps": (["--profile.steps=5:5"], "profile.steps='5:5' holds no step"),
        "no number": (["--profile.steps=x"], "profile.steps='x': give the first step and"),
        "step 0": (["--profile.steps=0:2"], "the first step of a run is 1"),
        "after the end": (["--profile.steps=7"], "begins after the last step, train.steps=6"),
        "no such rank": (["--profile.steps=2", "--profile.ranks=1"], "profile.ranks has 1, and"),
        "no steps to look at": (["--profile.memory"], "--profile.steps 10:13"),
        "no gpu": (["--profile.steps=2", "--profile.nvtx"], "profile.nvtx is for Nsight Systems"),
        "nvtx sees no tensors": (
            ["--profile.steps=2", "--profile.nvtx", "--profile.memory"],
            "leave out profile.memory",
        ),
    }.values(),
)
def test_what_cannot_be_recorded_is_refused_in_one_line(tmp_path, options, message):
    done = forks.train([*ARGS, *options], cwd=tmp_path)
    assert done.codes == [2]
    (line,) = done.errors
    assert message in line
    assert not (tmp_path / "run").exists()
