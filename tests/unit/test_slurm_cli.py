"""`python -m labcode.slurm`: what is typed, what is said, and errors of one line. No cluster."""

import subprocess
import sys
from pathlib import Path

import pytest

from labcode import minislurm
from labcode.slurm import cli
from labcode.slurm.cli import main, parse
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.rules import RULES
from labcode.slurm.script import site
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render

ODD = (
    "two words",
    "it's",
    'say "hi"',
    "$(touch x)",
    "`id`",
    "ñandú 雪",
    "#SBATCH",
    "a;b&c|d",
    "%x%j",
    "-rf",
    "back\\slash",
)


def test_options_and_fields_of_the_recipe_may_be_mixed():
    words = (
        "gpt_tiny --train.steps 20 --nodes 2 --parallel.tp=2 --site perlmutter --ranks_per_node 4 "
        "--checkpoint.resume"
    )
    recipe, options, overrides = parse(words.split())
    assert recipe == "gpt_tiny" and overrides == [
        "--train.steps",
        "20",
        "--parallel.tp=2",
        "--checkpoint.resume",
    ]
    assert (options.nodes, options.ranks_per_node, options.site, options.keep, options.wait) == (
        2,
        4,
        "perlmutter",
        False,
        True,
    )
    job = options.job(recipe, overrides)
    assert job == Job("gpt_tiny", tuple(overrides), nodes=2, ranks_per_node=4)


def test_a_job_that_is_too_large_for_this_machine_hears_how_to_name_a_cluster(capsys):
    words = ["render", "gpt_tiny", "--nodes", "2", "--ranks-per-node", "4"]
    assert main([*words, "--site", "perlmutter"]) == 0
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("or name your cluster: --site perlmutter\n")


@pytest.mark.parametrize(("name", "ranks"), [("lumi", 8), ("perlmutter", 4), ("own.yaml", 2)])
def test_without_a_word_each_gpu_of_a_node_has_a_rank(name, ranks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("launcher: srun\n")
    recipe, options, overrides = parse(["gpt_tiny", "--site", name])
    assert options.job(recipe, overrides).ranks_per_node == ranks


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("squeue", "unknown command 'squeue': did you mean status?"),
        (
            "--submit gpt_tiny",
            "--submit is a command and no option: python -m labcode.slurm submit",
        ),
        ("gpt_tiny --nodes 2", "comes before gpt_tiny: python -m labcode.slurm submit gpt_tiny --"),
        ("render gpt_tiny -N 2", "-N is an option of sbatch: here it is --nodes"),
        ("cancel gpt_tiny", "'gpt_tiny' is no number of a job: "),
        ("lint", "name a script, or a recipe: gpt_tiny"),
        ("sumbit gpt_tiny", "unknown command 'sumbit': did you mean submit? there are render,"),
        ("submit", "name a recipe: gpt_tiny"),
        ("submit gpt_tin", "unknown recipe 'gpt_tin': did you mean gpt_tiny?"),
        (
            "submit gpt_tiny --node 2",
            "unknown option --node: did you mean --nodes? python -m",
        ),
        ("submit gpt_tiny --nodes two", "--nodes: 'two' is not a whole number"),
        ("submit gpt_tiny --no-nodes", "unknown option --no-nodes: did you mean --nodes?"),
        ("render gpt_tiny --gpus 8", "unknown option --gpus: did you mean --ranks-per-node?"),
        ("render gpt_tiny --time 9:00", "unknown option --time: did you mean --minutes?"),
        ("submit gpt_tiny --keep=perhaps", "--keep: 'perhaps' is not true or false"),
        ("submit gpt_tiny --nodes 2 3", "--nodes takes one value, but got 2 3"),
        ("submit gpt_tiny --nodes 0", "nodes=0: give at least 1"),
        ("submit gpt_tiny more", "what is 'more'? one recipe comes first"),
        ("render gpt_tiny --parallel.tp 3", "parallel.tp=3: parallel.tp can be 1, 2, 4"),
        ("render gpt_tiny --site perlmuter", "unknown site 'perlmuter': did you mean perlmutter?"),
        ("render gpt_tiny --site own.yaml", "own.yaml: cannot be read as a profile: No such file"),
        ("lint gpt_tinny", "gpt_tinny is neither a file here nor a recipe"),
        ("cancel", "name the number of a job"),
        ("status here000000", "there is no such job on this machine"),
        ("submit gpt_tiny --here --array 0-3", "an array needs SLURM"),
        (
            "submit gpt_tiny --cluster nope",
            "there is no cluster 'nope': slurm/cluster up 2 --name nope starts it",
        ),
    ],
)
def test_a_mistake_is_one_line_that_says_what_exists(typed, answer, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(typed.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("error: ") and answer in err and err.count("\n") == 1 and out == ""
    assert list(tmp_path.iterdir()) == []


def test_of_several_scripts_the_message_says_how_to_read_the_first(capsys, tmp_path):
    script = tmp_path / "a.sbatch"
    script.write_text("#!/bin/bash\n")
    assert main(["lint", str(script), "b.sbatch"]) == 2
    assert "one script at a time" in capsys.readouterr().err


def test_without_a_cluster_status_says_how_to_get_one(capsys, monkeypatch):
    monkeypatch.setattr(minislurm, "names_up", list)  # others may be up on this machine
    assert main(["status", "--cluster", "no-such-cluster"]) == 2
    assert "slurm/cluster up 2 starts one" in capsys.readouterr().err


def test_render_prints_the_script_or_writes_it(capsys, tmp_path):
    assert main(["render", "gpt_tiny", "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert text == render(Job("gpt_tiny", nodes=2), site.load("local")) and text.startswith(
        "#!/bin/bash\n"
    )
    path = tmp_path / "a script.sbatch"
    assert main(["render", "gpt_tiny", "--nodes", "2", "--output", str(path)]) == 0
    assert path.read_text() == text and list(tmp_path.iterdir()) == [path]


def test_lint_reads_a_recipe_or_any_script(capsys, tmp_path):
    assert main(["lint", "gpt_tiny", "--site", "generic", "--nodes", "2"]) == 0
    assert "0 errors" in capsys.readouterr().out
    path = tmp_path / "bad.sbatch"
    path.write_text("#!/bin/bash\n#SBATCH --gpu-per-node=2\n")
    assert main(["lint", str(path)]) == 1
    assert f"{path}, line 2: error S04: " in capsys.readouterr().out
    assert main(["lint", "--rules"]) == 0
    assert capsys.readouterr().out.count("\n    why: ") == len(RULES)


@pytest.mark.parametrize("name", site.names())
@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_no_rule_fires_on_a_script_that_we_generate(name, launcher):
    there = site.load(name, launcher=launcher)
    ranks = there.gpus.per_node or 2
    jobs = [
        Job(
            "gpt_tiny",
            ("--parallel.tp", "2", "--checkpoint.every", "9"),
            nodes=2,
            ranks_per_node=ranks,
            name="two words",
        ),
        Job(
            "gpt_tiny",
            ranks_per_node=ranks,
            requeue=False,
            array="0-3",
            dependency="afterok:17",
            nccl_debug="INFO",
        ),
    ]
    jobs += [
        Job("", (odd,), module="platform", ranks_per_node=ranks, name=odd, env={"X": odd})
        for odd in ODD
    ]
    for job in jobs:
        assert [str(problem) for problem in lint(render(job, there), there, job)] == []
    careless = Job("gpt_tiny", ranks_per_node=ranks)
    assert [
        (problem.rule, problem.severity)
        for problem in lint(render(careless, there), there, careless)
    ] == [("S52", "warning")]


def test_a_word_typed_by_a_person_reaches_the_job_as_it_is():
    for odd in ODD:
        for words in (["--name", odd], [f"--name={odd}"]):
            _, options, _ = parse(["gpt_tiny", *words])
            assert options.name == odd


def test_help_and_the_program_itself():
    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "labcode.slurm", *words],
            capture_output=True,
            text=True,
            timeout=60,
        )

    usage, options, wrong = run(), run("submit", "--help"), run("submit", "gpt_tiny", "--nodes")
    assert usage.returncode == 0 and all(command in usage.stdout for command in cli.COMMANDS)
    assert (
        options.returncode == 0
        and "--ranks-per-node" in options.stdout
        and "checkpoint before the time" in options.stdout
    )
    assert (
        wrong.returncode == 2
        and wrong.stderr.startswith("error: ")
        and wrong.stderr.count("\n") == 1
    )


def test_planning_needs_no_torch():
    code = "import sys, labcode.slurm.cli, labcode.doctor.nccl_log; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == "False", done.stderr


def test_one_error_is_no_errors(tmp_path, capsys):
    script = tmp_path / "train.sbatch"
    script.write_text("#!/bin/bash\n#SBATCH --node 2\n#SBATCH --time=10\nsrun python x.py\n")
    assert main(["lint", str(script)]) == 1
    assert "\n1 error, 0 warnings, " in capsys.readouterr().out
