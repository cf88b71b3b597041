"""What a job will take, said in its script before it waits in the queue.

A site that names a cluster of the planner (`planner: perlmutter`, or a .toml file) gets a line in
the header of its scripts; `submit` refuses a job that is predicted to run out of memory.
"""

from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import Estimate, estimate
from labcode.perf.of_config import model_of, settings_of
from labcode.runtime.units import GIB, seconds
from labcode.slurm.script.job import Job
from labcode.slurm.script.site import Site


def predicted(job: Job, site: Site) -> Estimate:
    """The estimate of a job.

    Raises:
        ValueError: No planner's cluster, no training, or a number that nobody knows.
    """
    if site.planner is None:
        raise ValueError(f"{site.name} names no cluster of the planner: add `planner: NAME` to it")
    shape = job.check()
    if shape is None:
        raise ValueError(f"{job.module} is not the training program")
    config = job.config()
    cluster = load_cluster(site.planner)
    return estimate(model_of(config), shape, cluster, settings_of(config, shape, cluster.gpu))


def header(job: Job, site: Site) -> list[str]:
    """Lines for the script: none where nothing can be said because the site knows no cluster."""
    if site.planner is None or not job.trains:
        return []
    try:
        found = predicted(job, site)
    except ValueError as error:
        return [f"Not predicted: {error}"]
    least, most = found.interval_s
    verdict = "" if found.fits else ": it will run out of memory"
    return [
        f"Predicted: a step takes {seconds(least)} to {seconds(most)} in 8 of 10 cases; "
        f"{found.memory_bytes / GIB:.1f} of {found.memory_limit_bytes / GIB:.1f} GiB of each GPU"
        f"{verdict} (python -m labcode.perf)"
    ]


def refuse_out_of_memory(job: Job, site: Site) -> None:
    """Refuse a job that is predicted not to fit; one that cannot be predicted passes.

    Raises:
        ValueError: One line with both numbers, and what to do.

    Held by: tests/unit/test_slurm_predict.py
    """
    try:
        found = predicted(job, site)
    except ValueError:
        return
    if found.fits:
        return
    raise ValueError(
        f"predicted {found.memory_bytes / GIB:.1f} GiB on a GPU of "
        f"{found.memory_limit_bytes / GIB:.1f}: the job would run out of memory; change the layout "
        "(python -m labcode.perf plan), or submit it all the same with --force"
    )
