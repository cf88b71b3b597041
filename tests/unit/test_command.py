"""What is typed after `python -m labcode.train` is read, or refused in one line."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labcode import recipes
from labcode.runtime import command
from labcode.runtime.arguments import UsageError
from labcode.train import __main__ as train

GPT = recipes.gpt_tiny()


def parsed(*words):
    """The fields that differ from the recipe."""
    before = recipes.field_paths(GPT)
    after = recipes.field_paths(command.parse(["gpt_tiny", *words]))
    return {path: value for path, value in after.items() if value != before[path]}


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("--train.steps 7", {"train.steps": 7}),
        ("--train.steps=7", {"train.steps": 7}),
        ("--train.global-batch 4", {"train.global_batch": 4}),
        (
            "--train.steps 7 --parallel.tp 2 --model.positions learned",
            {"train.steps": 7, "parallel.tp": 2, "model.positions": "learned"},
        ),
        ("--optim.lr 3e-3", {"optim.lr": 3e-3}),
        ("--train.overwrite", {"train.overwrite": True}),
        ("--train.overwrite true", {"train.overwrite": True}),
        ("--train.overwrite=True", {"train.overwrite": True}),
        ("--train.overwrite False", {}),
        ("--train.no-overwrite", {}),
        ("--train.overwrite --train.no_overwrite", {}),
        ("--train.overwrite --train.steps 7", {"train.overwrite": True, "train.steps": 7}),
        ("--model.no-tie-embeddings", {"model.tie_embeddings": False}),
        ("--parallel.layers_per_stage 1 1", {"parallel.layers_per_stage": (1, 1)}),
        ("--parallel.layers_per_stage=2", {"parallel.layers_per_stage": (2,)}),
        ("--train.micro_batch 2 --train.micro_batch None", {}),
        ("--train.out None", {}),
        ("--train.out -x", {"train.out": "-x"}),
        ("--train.steps 3 --train.steps 4", {"train.steps": 4}),
        ("--name None", {"name": "None"}),
    ],
)
def test_single_fields_are_overridden(words, changes):
    assert parsed(*words.split()) == changes


def test_several_words_of_text():
    config = command.parse(["vit_tiny", "--data.variables", "t2m", "u10", "--train.steps", "3"])
    assert config.data.variables == ("t2m", "u10")


def typed(value):
    """The words for a value, as a person writes them."""
    if isinstance(value, tuple):
        return [str(part) for part in value]
    return [str(value)]


@given(st.sampled_from(sorted(recipes.RECIPES)), st.data())
def test_every_field_is_read_back_from_its_own_value(name, data):
    recipe = recipes.get(name)
    paths = recipes.field_paths(recipe)
    chosen = data.draw(st.lists(st.sampled_from(sorted(paths)), unique=True))
    words = []
    for path in chosen:
        words += [f"--{path}", *typed(paths[path])]
    assert command.parse([name, *words]) == recipe


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "--train.step 3",
            "^unknown field --train.step: did you mean --train.steps[?] "
            "python -m labcode.train gpt_tiny --help lists all$",
        ),
        ("--lr 1e-3", "^unknown field --lr: did you mean --optim.lr[?] python -m .* lists all$"),
        ("--optim.rl 0.1", "did you mean --optim.lr[?] python -m .* --help lists all$"),
        ("--optim.zzz 0.1", "^unknown field --optim.zzz: there are optim.name, optim.lr, "),
        ("--train.lr 1e-3", "did you mean --optim.lr[?]"),
        ("--batch-size 32", "^unknown field --batch_size: did you mean --train.global_batch[?]"),
        ("--data.batch_size 32", "did you mean --train.global_batch[?]"),
        ("--epochs 3", "did you mean --train.steps[?]"),
        ("--learning_rate 1", "did you mean --optim.lr[?]"),
        ("--layers 3", "did you mean --model.num_layers[?]"),
        ("--n_heads 3", "did you mean --model.num_heads[?]"),
        ("--hidden_dim 8", "did you mean --model.hidden_size[?]"),
        ("--seq_len 64", "did you mean --model.context_length[?]"),
        ("--warmup_step 9", "did you mean --optim.warmup_steps[?]"),
        (
            "--gpus 2",
            "^unknown field --gpus: each rank takes a GPU if there is one, and 2 ranks are "
            "started by torchrun --nproc-per-node 2 -m labcode.train RECIPE$",
        ),
        ("--device cuda", "^unknown field --device: .* torchrun --nproc-per-node 2"),
        (
            "--nonsense 3",
            "^unknown field --nonsense: there are checkpoint, data, debug, fp8, loader, local",
        ),
        ("--train 3", "^unknown field --train: it is a section, of train.steps, train"),
        ("--wd 0.1", "did you mean --optim.weight_decay[?]"),
        ("--parallel.fsdp", "did you mean --parallel.zero_stage[?]"),
        ("--bf16", "did you mean --train.dtype[?]"),
        ("--optimizer sgd", "did you mean --optim.name[?]"),
        ("--train.no-steps", "^unknown field --train.no_steps: "),
        ("--train.steps x", "^--train.steps: 'x' is not a whole number$"),
        ("--train.steps 2.5", "^--train.steps: '2.5' is not a whole number$"),
        ("--train.steps None", "^--train.steps: 'None' is not a whole number$"),
        ("--train.steps", "^--train.steps needs a value: a whole number$"),
        ("--train.steps 3 4", "^--train.steps takes one value, but got 3 4$"),
        ("--train.steps -3", "steps=-3: give a number above 0"),
        ("--optim.lr fast", "^--optim.lr: 'fast' is not a number$"),
        ("--train.overwrite maybe", "^--train.overwrite: 'maybe' is not true or false$"),
        ("--train.no-overwrite true", "^--train.no_overwrite takes no value, but got 'true'$"),
        ("--model.positions none", "^--model.positions: 'none' is not one of learned, rotary$"),
        ("--parallel.layers_per_stage 1 x", "^--parallel.layers_per_stage: 'x' is not a whole"),
        ("--parallel.layers_per_stage", "^--parallel.layers_per_stage needs a value: "),
        ("20", "^what is '20'[?] write --section.field value$"),
        ("train.steps=20", "^what is 'train.steps=20'[?] write --train.steps=20$"),
        ("-train.steps 20", "^what is '-train.steps'[?] write --train.steps value$"),
        ("\N{EN DASH}train.steps 20", "[?] write --train.steps value$"),
        ("--checkpoint.keep 0", "keep=0: give a number above 0"),
        ("--checkpoint.every -1", "every=-1: give the steps between checkpoints"),
        (
            "--checkpoint.resume",
            "checkpoint.resume needs the folder of the run: name it with train.out",
        ),
        (
            "--checkpoint.resume --train.out x --train.overwrite",
            "continues the run in train.out, and .* choose one",
        ),
        ("--model.num_heads 5", "hidden_size=64 is not a multiple of num_heads=5"),
    ],
)
def test_a_wrong_command_line_gives_one_line_that_says_what_exists(words, message):
    with pytest.raises(UsageError, match=message) as caught:
        command.parse(["gpt_tiny", *words.split()])
    assert "\n" not in str(caught.value)


def test_an_unknown_recipe_is_refused_with_those_that_exist():
    with pytest.raises(UsageError, match="did you mean gpt_tiny"):
        command.parse(["gpt_tini"])


def test_a_first_word_that_is_no_recipe_says_what_it_is(tmp_path):
    with pytest.raises(UsageError, match=r"train gpt_tiny --train.steps [.]{3}$"):
        command.parse(["--train.steps", "20", "gpt_tiny"])
    with pytest.raises(UsageError, match="did you mean gpt_tiny"):
        command.parse(["--gpt_tiny"])
    with pytest.raises(UsageError, match=r"^unknown recipe"):
        command.parse([300 * "x"])
    (tmp_path / "config.json").touch()
    with pytest.raises(UsageError, match=r"is a run and no recipe: .*--checkpoint.resume"):
        command.parse([str(tmp_path)])


def test_heads_and_hidden_size_are_checked_once_both_are_changed():
    words = ["--model.num_heads", "5", "--model.hidden_size", "30"]
    assert command.parse(["gpt_tiny", *words]).model.head_size == 6


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_help_lists_every_field_of_the_recipe(capsys, name):
    with pytest.raises(SystemExit) as stop:
        command.parse([name, "--train.steps", "3", "--help"])
    assert not stop.value.code
    text = capsys.readouterr().out
    for path in recipes.field_paths(recipes.get(name)):
        assert f"--{path} " in text
    # what a field means stands in the comment behind it
    assert "gradients travel in buckets of this size" in text
    assert "one of gpipe, 1f1b, interleaved, zero_bubble" in text


def test_help_without_a_recipe_lists_the_recipes(capsys):
    with pytest.raises(SystemExit):
        command.parse([])
    text = capsys.readouterr().out
    assert all(name in text for name in recipes.RECIPES)


def test_the_line_is_the_same_on_a_terminal_that_knows_only_ascii(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(UsageError, match=r"^unknown field --train.step: did you mean"):
        command.parse(["gpt_tiny", "--train.step", "3"])


def test_no_help_library_is_loaded_to_read_a_command_line():
    code = (
        "import sys; from labcode.runtime import command; "
        "command.parse(['gpt_tiny', '--train.steps', '3']); "
        "print('tyro' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False False"


def test_what_other_programs_call_a_field_leads_to_one_that_exists():
    known = {*recipes.field_paths(GPT), *recipes.field_paths(recipes.get("vit_tiny"))}
    assert set(recipes.CALLED_HERE.values()) <= known
    assert not [name for name in recipes.CALLED_HERE if name in known]


@pytest.mark.parametrize(
    "words",
    [
        "labcode.train gpt_tinny",
        "labcode.train gpt_tiny --parallel.tp 2",
        "labcode.train gpt_tiny --train.stepz 3",
        "labcode.run.sweep gpt_tinny",
        "labcode.slurm submitt gpt_tiny",
        "labcode.slurm lint nothing.sbatch",
        "labcode.perf plann",
        "labcode.perf plan --modell gpt2-xl",
        "labcode.doctor nonsense",
        "labcode.run.dry_run --bad-option",
        "labcode.run.dry_run 8 gpt_tiny --bad-option 3",
        "labcode.run.export runs/x",
        "labcode.measure.profile --bad-option",
        "labcode.run.scaling --bad-option",
        "labcode.run.sweep gpt_tiny --bad-option",
        "labcode.data.generate --bad-option",
        "labcode nonsense",
    ],
)
def test_a_typing_mistake_is_one_line_and_does_not_wait_for_torch(words, monkeypatch):
    for name in ("RANK", "SLURM_PROCID"):  # of a job, which all ranks have to agree about
        monkeypatch.delenv(name, raising=False)
    module, *arguments = words.split()
    code = (
        "import runpy, sys\n"
        "def told(event, given):\n"
        "    if event == 'import' and given[0] == 'torch':\n"
        "        print('torch is imported', flush=True)\n"
        "sys.addaudithook(told)\n"
        f"sys.argv = ['x', *{arguments!r}]\n"
        f"runpy.run_module({module!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_one_process_is_told_how_to_start_as_many_as_the_grid_has(monkeypatch, capsys):
    for name in train.OF_A_JOB:
        monkeypatch.delenv(name, raising=False)
    words = ["gpt_tiny", "--parallel.tp", "2", "--train.out", "my runs/1"]
    assert train.main(words) == 2
    assert capsys.readouterr().err == (
        "error: dp*pp*cp*tp = 1*1*1*2 = 2 but WORLD_SIZE is 1: change an axis or launch 2 ranks: "
        "torchrun --nproc-per-node=2 -m labcode.train gpt_tiny --parallel.tp 2 "
        "--train.out 'my runs/1'\n"
    )
    assert train.main(["gpt_moe_tiny", "--parallel.ep", "2"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(
        ": torchrun --nproc-per-node=2 -m labcode.train gpt_moe_tiny --parallel.ep 2\n"
    )


def test_what_no_number_of_ranks_mends_comes_without_a_launch(monkeypatch, capsys):
    for name in train.OF_A_JOB:
        monkeypatch.delenv(name, raising=False)
    assert train.main(["gpt_tiny", "--parallel.tp", "3"]) == 2
    said = capsys.readouterr().err
    assert "model.num_heads=4 is not divisible by parallel.tp=3" in said
    assert "torchrun" not in said


def test_a_reader_that_has_seen_enough_is_no_error():
    words = "python -u -m labcode.train gpt_tiny --help | head -n 1; echo ${PIPESTATUS[0]}"
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", words], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stderr == ""
    assert done.stdout.splitlines()[1:] == ["0"]


def test_the_help_has_what_stands_above_a_field_and_behind_it(capsys):
    with pytest.raises(SystemExit):
        command.parse(["gpt_tiny", "--help"])
    lines = capsys.readouterr().out.splitlines()
    (zero,) = [i for i, line in enumerate(lines) if line.startswith("  --parallel.zero_stage ")]
    (tp,) = [i for i, line in enumerate(lines) if line.startswith("  --parallel.tp ")]
    assert lines[zero + 1].strip().startswith("what is divided over dp: 1 the optimizer's state")
    assert lines[tp + 1].strip() == "ranks of tensor parallelism"


def test_another_name_of_a_dtype_is_answered_with_ours():
    for typed, ours in (("fp16", "float16"), ("bf16", "bfloat16"), ("half", "float16")):
        with pytest.raises(command.UsageError, match=f"did you mean {ours}[?]$"):
            command.parse(["gpt_tiny", "--train.dtype", typed])
