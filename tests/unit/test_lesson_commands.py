"""The commands that lessons, README and guide show: each can be run with the ranks that it starts.

"From here to GPUs and SLURM" is read by people who then type it on a cluster, where no test runs.
So every `-m labcode.train ...` is read as the program reads it, and the config checks that the
model fits the grid.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from labcode.runtime import combinations
from labcode.runtime.command import parse

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "book" / "guide").glob("*.md"))]
SOURCES = [*sorted((ROOT / "solutions").glob("[0-9][0-9]*_*.py")), *PAGES]
PROGRAM = "-m labcode.train "
IN_BACKTICKS = re.compile(r"`([^`\n]+)`")


class Command(NamedTuple):
    """A command as it is shown.

    Args:
        text: All of it, or a row of the table such as "add `--parallel.cp 2`" behind the last one.
        ranks: How many it starts.
    """

    text: str
    ranks: int


def number_after(option, text, default=1):
    found = re.search(rf"{option}[= ](\d+)", text)
    return int(found[1]) if found else default


def ranks_of(command):
    nodes = number_after("--nnodes", command, number_after("--nodes", command))
    per_node = number_after("--nproc-per-node", command)
    per_node = number_after("--ntasks-per-node", command, per_node)
    return nodes * per_node


def commands_in(text):
    """Those in backticks, with what later rows of their table add to them; and indented ones."""
    found = []
    last = None
    for line in text.splitlines():
        line = line.removeprefix("# ")
        if not line.startswith("|"):
            last = None
        spans = IN_BACKTICKS.findall(line)
        if line.startswith("    "):
            spans = [line.partition("  #")[0].strip()]
        for span in spans:
            is_started = span.startswith(("torchrun", "srun", "python"))
            if is_started and PROGRAM in span and "FOLDER" not in span:
                last = Command(span, ranks_of(span))
                found.append(last)
            elif last is not None and span.startswith("--") and "|" in line:
                found.append(Command(f"{last.text} {span}", last.ranks))
    return found


def check(command):
    """Raises what the program would say."""
    words = shlex.split(command.text.partition(PROGRAM)[2])
    if "--help" in words:
        return
    combinations.check(parse(words), command.ranks)


SHOWN = []
for _source in SOURCES:
    for _command in commands_in(_source.read_text()):
        _name = f"{_source.stem.partition('_')[0]} {_command.text}"
        SHOWN.append(pytest.param(_command, id=_name))


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_that_is_shown_can_be_run(command):
    check(command)


def test_the_commands_are_found():
    """In the tables of all lessons about a way to cut the model, and with what rows add to them."""
    lessons = {param.id[:2] for param in SHOWN}
    assert {"00", "04", "05", "09", "10", "11", "12", "15", "RE", "tr"} <= lessons
    assert any("context_attention all_gather" in param.id for param in SHOWN)
    assert any("--nodes=2" in param.id for param in SHOWN)


def test_heads_that_the_ranks_cannot_share_are_found():
    row = (
        "# | SLURM | `srun --nodes=1 --ntasks-per-node=8 python -m labcode.train gpt_10m "
        "--parallel.tp 8` |"
    )
    (command,) = commands_in(row)
    assert command.ranks == 8
    with pytest.raises(ValueError, match=r"model\.num_heads=6 is not divisible by parallel\.tp=8"):
        check(command)


# What README and guide show of the other programs is run as it stands there, with these names of
# files that a reader would have.
FILES = {
    "my_site.yaml": str(ROOT / "slurm" / "sites" / "generic.yaml"),
    "my_own_script.sbatch": str(ROOT / "slurm" / "ddp_2_nodes-generic.sbatch"),
}
# a description of a model, as the hub has it
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
LLAMA |= {"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 64}
RUN_ELSEWHERE = (
    "python -m labcode.slurm submit",  # tests/slurm/test_submit.py
    "python -m labcode.measure.profile",  # tests/ranks/test_step_profiler.py
)


def programs_shown():
    """The indented commands of README and guide that start another program of the course."""
    shown = set()
    for page in PAGES:
        for line in page.read_text().splitlines():
            command = re.split(r"\s+#", line.strip())[0]
            is_shown = line.startswith("    ") and "python -m labcode" in command
            is_run_here = PROGRAM not in command and not command.startswith(RUN_ELSEWHERE)
            if is_shown and is_run_here:
                shown.add(command)
    return [pytest.param(command, id=command) for command in sorted(shown)]


@pytest.mark.release
@pytest.mark.parametrize("command", programs_shown())
def test_a_program_that_is_shown_runs(command, tmp_path):
    for name, path in FILES.items():
        command = command.replace(name, path)
    for folder in (tmp_path, tmp_path / "Llama-2-7b-hf"):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
    programs = Path(sys.executable).parent
    environment = os.environ | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    differs = 1 if command.startswith("diff ") else 0
    assert done.returncode == differs, done.stderr
    assert done.stdout
