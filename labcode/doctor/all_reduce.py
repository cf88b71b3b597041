"""One all-reduce between the ranks of a job, timed: what `python -m labcode.doctor` starts.

Rank 0 prints one line of JSON. A wrong sum is an error.

Communicates: two all-reduces of 1 MiB, the first of which opens the connections.
Held by: tests/unit/test_doctor_installation.py::test_two_real_ranks_all_reduce
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from labcode.runtime import bootstrap

NUM_VALUES = 2**18  # float32: 1 MiB
TIMEOUT_S = 60.0


def main() -> int:
    """Run as one rank; returns the exit code.

    Raises:
        RuntimeError: The sum is wrong, or the ranks cannot talk.
        ValueError: The ranks cannot meet.
    """
    world = bootstrap.start(share_gpus=True, timeout_s=TIMEOUT_S)
    try:
        _all_reduce(world)
        started = time.monotonic()
        _all_reduce(world)
        all_reduce_s = time.monotonic() - started
    finally:
        bootstrap.stop()
    if world.rank == 0:
        answer = {
            "backend": world.backend,
            "device": world.device.type,
            "message_bytes": 4 * NUM_VALUES,
            "all_reduce_s": all_reduce_s,
        }
        print(json.dumps(answer), flush=True)
    return 0


def _all_reduce(world: bootstrap.World) -> None:
    """Each rank gives its number, counted from 1."""
    values = torch.full([NUM_VALUES], float(world.rank + 1), device=world.device)
    dist.all_reduce(values)
    expected = world.world_size * (world.world_size + 1) / 2
    found = values.min().item()
    if found != expected or values.max().item() != expected:
        raise RuntimeError(f"the sum over {world.world_size} ranks is {found}, not {expected}")


if __name__ == "__main__":
    sys.exit(main())
