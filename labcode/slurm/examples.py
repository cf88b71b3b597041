"""The scripts in `slurm/`: `python -m labcode.slurm.examples` writes them anew.

Held by: tests/unit/test_slurm_render.py::test_the_committed_examples_are_up_to_date
"""

from pathlib import Path

from labcode.runtime.files import write_atomically
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import load

FOLDER = Path(__file__).resolve().parents[2] / "slurm"


def _job(name: str, *overrides: str) -> Job:
    """gpt_10m on 8 GPUs; a failed node costs no more than the 200 steps between checkpoints."""
    every = ("--checkpoint.every", "200")
    return Job("gpt_10m", (*overrides, *every), nodes=2, ranks_per_node=4, minutes=30, name=name)


JOBS = (
    _job("ddp_2_nodes"),
    _job("hybrid_tp2_pp2", "--parallel.tp", "2", "--parallel.pp", "2"),
)
EXAMPLE_SITES = ("generic", "perlmutter")


def scripts() -> dict[str, str]:
    """Name and text of each script."""
    texts = {}
    for job in JOBS:
        for site in EXAMPLE_SITES:
            texts[f"{job.name}-{site}.sbatch"] = render(job, load(site))
    return texts


def build(folder: Path = FOLDER) -> list[Path]:
    """Writes those that have changed; returns their paths."""
    changed = []
    for name, text in scripts().items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            write_atomically(path, text.encode())
            changed.append(path)
    return changed


if __name__ == "__main__":
    for path in build():
        print(path)
