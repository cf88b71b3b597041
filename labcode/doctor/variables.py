"""Environment variables that bite: left on after debugging, wrong for this machine, somebody's own.

Held by: tests/unit/test_doctor_installation.py
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from labcode.doctor.checked import Checked, right, warning, wrong

NAME = "variables"


@dataclass(frozen=True)
class Bite:
    """One variable that is better not set to some values.

    Args:
        name: Of the variable.
        values: What value bites, a regular expression for all of it, whatever the case.
        what: It does.
    """

    name: str
    values: str
    what: str


_ON = "[^0f].*"  # neither 0 nor false
BITES = (
    Bite("NCCL_DEBUG", "info|trace", "every rank prints hundreds of lines"),
    Bite("NCCL_P2P_DISABLE", _ON, "GPUs of a node talk through host memory, slowly"),
    Bite("NCCL_SHM_DISABLE", _ON, "GPUs of a node may talk through the network, slowly"),
    Bite("NCCL_IB_DISABLE", _ON, "nodes talk over TCP and not over InfiniBand, slowly"),
    Bite("TORCH_DISTRIBUTED_DEBUG", "info|detail", "each collective is checked, slowly"),
    Bite("TORCH_SHOW_CPP_STACKTRACES", _ON, "errors are pages long"),
    Bite("CUDA_LAUNCH_BLOCKING", _ON, "the CPU waits for each kernel"),
    Bite("TORCH_FR_BUFFER_SIZE", "0", "the flight recorder is off, and hangs stay unexplained"),
    Bite("PYTHONOPTIMIZE", ".+", "asserts are gone, so that every check of an exercise passes"),
    Bite("PYTHONINSPECT", ".+", "ranks wait at a prompt when they have ended"),
)
# of which gloo takes whole names, NCCL beginnings of names
INTERFACES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def check_variables(
    env: Mapping[str, str], interfaces: Sequence[str], num_cores: int
) -> list[Checked]:
    """Each variable that bites, one finding a variable; one finding if none does.

    Args:
        env: The environment variables.
        interfaces: Names of the network interfaces of this machine.
        num_cores: That this process may run on.
    """
    found = []
    for bite in BITES:
        value = env.get(bite.name)
        if value is not None and re.fullmatch(bite.values, value, re.IGNORECASE):
            found.append(warning(NAME, f"{bite.name}={value}: {bite.what}", f"unset {bite.name}"))
    found += _interfaces(env, interfaces)
    found += _threads(env, num_cores)
    found += _launcher(env)
    found += _proxies(env)
    return found or [right(NAME, "none is set that bites")]


def _interfaces(env: Mapping[str, str], interfaces: Sequence[str]) -> list[Checked]:
    """Interfaces that ranks are to use and that this machine does not have."""
    found = []
    for name in INTERFACES:
        value = env.get(name, "")
        if not value or value.startswith("^"):  # NCCL: all but these
            continue
        whole = value.startswith("=") or not name.startswith("NCCL")
        for wanted in value.removeprefix("=").split(","):
            has_it = wanted in interfaces
            if not whole:
                has_it = any(interface.startswith(wanted) for interface in interfaces)
            if not has_it:
                text = f"{name}={value}: there is no interface {wanted}, but "
                cure = f"set it to one of these, or unset {name}"
                found.append(wrong(NAME, text + ", ".join(interfaces), cure))
    return found


def _threads(env: Mapping[str, str], num_cores: int) -> list[Checked]:
    """A number of threads that is none, or more than the machine has cores."""
    value = env.get("OMP_NUM_THREADS", "")
    if not value:
        return []
    first = value.partition(",")[0].strip()  # one for each nesting level
    if not re.fullmatch("[0-9]{1,9}", first) or int(first) == 0:
        cure = "set it to 1 or more, or unset it"
        return [wrong(NAME, f"OMP_NUM_THREADS={value} is no number of threads", cure)]
    if int(first) > num_cores:
        text = f"OMP_NUM_THREADS={value}: each rank starts so many threads on {num_cores} cores"
        return [warning(NAME, text, "unset it: ranks share the cores by themselves")]
    return []


def _launcher(env: Mapping[str, str]) -> list[Checked]:
    """What torchrun sets for its ranks, in a shell: a program alone takes itself for a rank."""
    left = [f"{name}={env[name]}" for name in LAUNCHER if name in env]
    if not left:
        return []
    text = f"{', '.join(left)}: a program would wait for other ranks, which nobody starts"
    return [wrong(NAME, text, f"unset {' '.join(name for name in LAUNCHER if name in env)}")]


def _proxies(env: Mapping[str, str]) -> list[Checked]:
    """A proxy that is also asked for this machine's own addresses."""
    lower = {name.lower(): value for name, value in env.items()}
    proxies = [name for name in PROXIES if lower.get(name)]
    direct = [host.strip() for host in lower.get("no_proxy", "").split(",")]
    if not proxies or "*" in direct or {"localhost", "127.0.0.1"} <= set(direct):
        return []
    text = f"{proxies[0]} is set, and NO_PROXY lacks localhost or 127.0.0.1: what asks JupyterLab "
    text += "or TensorBoard of this machine asks the proxy"
    return [warning(NAME, text, "export NO_PROXY=localhost,127.0.0.1")]
