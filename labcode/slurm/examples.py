"""The scripts in `slurm/`: `python -m labcode.slurm.examples` writes them anew; a test holds them up to date."""

from pathlib import Path

from labcode.files import write_atomically
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import load

FOLDER = Path(__file__).resolve().parents[2] / "slurm"
# gpt_10m on 8 GPUs; a checkpoint every 200 steps, so that a failed node costs no more than that
_SIZE = {"nodes": 2, "ranks_per_node": 4, "minutes": 30}
_KEEP = ("--checkpoint.every", "200")
JOBS = {
    "ddp_2_nodes": Job("gpt_10m", _KEEP, name="ddp_2_nodes", **_SIZE),
    "hybrid_tp2_pp2": Job(
        "gpt_10m",
        ("--parallel.tp", "2", "--parallel.pp", "2", *_KEEP),
        name="hybrid_tp2_pp2",
        **_SIZE,
    ),
}
EXAMPLE_SITES = ("generic", "perlmutter")


def scripts() -> dict[str, str]:
    """Name and text of each script."""
    return {
        f"{name}-{site}.sbatch": render(job, load(site))
        for name, job in JOBS.items()
        for site in EXAMPLE_SITES
    }


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
