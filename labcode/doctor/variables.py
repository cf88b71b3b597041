"""Environment variables that bite: left on after debugging, wrong for this machine, somebody's own.

What they mean together is a table: `labcode.slurm.variables`.

Held by: tests/unit/test_doctor_installation.py, tests/unit/test_variables.py
"""

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from labcode.doctor.checked import Checked, right, warning, wrong
from labcode.slurm.variables import Where, judge

NAME = "variables"


def check_variables(
    env: Mapping[str, str],
    interfaces: Sequence[str],
    num_cores: int,
    infiniband: Sequence[str] = (),
) -> list[Checked]:
    """Each thing that variables mean together, one finding a rule; one finding if none bites.

    Args:
        env: The environment variables.
        interfaces: Names of the network interfaces of this machine.
        num_cores: Number of cores that this process may run on.
        infiniband: Names of its InfiniBand or RoCE cards.
    """
    nodes = env.get("SLURM_NNODES", "")
    where = Where(
        nodes=int(nodes) if nodes.isdigit() else None,
        cores=num_cores,
        interfaces=interfaces,
        infiniband=infiniband or None,  # a login node may have none where the others have
        host=socket.gethostname(),
        is_shell=True,
    )
    found = []
    for meaning in judge(env, where):
        level = wrong if meaning.is_wrong else warning
        found.append(level(NAME, meaning.text, meaning.cure))
    return found or [right(NAME, "none is set that bites")]


def infiniband_cards(folder: Path = Path("/sys/class/infiniband")) -> list[str]:
    """Names of this machine's InfiniBand or RoCE cards, as Linux has them."""
    return sorted(card.name for card in folder.iterdir()) if folder.is_dir() else []
