"""Checks of what is installed: Python, packages, torch, two ranks that talk.

Nothing here imports torch before `check_torch` has tried to.

Held by: tests/unit/test_doctor_installation.py
"""

import importlib
import importlib.metadata
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from labcode.doctor.checked import Checked, right, warning, wrong
from labcode.runtime import hardware, launch, units

PROJECT = "labcode"
CHECKOUT = Path(__file__).resolve().parents[2]
INSTALL = "pip install -c constraints.txt -e '.[dev]', or make setup"
MEET_S = 120.0  # for two ranks to start and to talk

VersionOf = Callable[[str], str | None]


@dataclass(frozen=True)
class Wanted:
    """What the project asks for.

    Args:
        python: Versions of Python, such as ">=3.11".
        packages: Requirements, such as "torch>=2.11,<2.16".
        extras: {name of an optional extra: its requirements}.
    """

    python: str
    packages: tuple[str, ...]
    extras: Mapping[str, tuple[str, ...]]


def wanted(checkout: Path = CHECKOUT) -> Wanted:
    """What `pyproject.toml` of a checkout asks for; without one, what the installed wheel does.

    Args:
        checkout: Folder that may hold it.
    """
    path = checkout / "pyproject.toml"
    if path.is_file():
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        extras = {}
        for name, texts in project["optional-dependencies"].items():
            extras[name] = tuple(texts)
        return Wanted(project["requires-python"], tuple(project["dependencies"]), extras)
    metadata = importlib.metadata.metadata(PROJECT)
    packages = []
    extras = {name: [] for name in metadata.get_all("Provides-Extra") or []}
    for text in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        owners = [name for name in extras if _is_for(requirement, name)]
        for name in owners:
            extras[name].append(text)
        if not owners:
            packages.append(text)
    by_name = {name: tuple(texts) for name, texts in extras.items()}
    return Wanted(metadata["Requires-Python"], tuple(packages), by_name)


def _is_for(requirement: Requirement, extra: str) -> bool:
    """Whether a requirement of a wheel holds for one extra only."""
    marker = requirement.marker
    if marker is None or marker.evaluate({"extra": ""}):
        return False
    return marker.evaluate({"extra": extra})


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# ---- versions


def check_python(version: str, asked: str) -> Checked:
    """Python is of a version that the project asks for.

    Args:
        version: Such as "3.11.9".
        asked: Such as ">=3.11".
    """
    if version in SpecifierSet(asked, prereleases=True):
        return right("python", version)
    return wrong("python", f"{version} is not {asked}", "make PYTHON=python3.12 setup")


def check_packages(asked: Sequence[str], version_of: VersionOf = installed_version) -> Checked:
    """All packages that labcode needs are there, in versions that it asks for.

    Args:
        asked: Requirements.
        version_of: Says which version is installed.
    """
    troubles = _troubles(asked, version_of)
    if troubles:
        return wrong("packages", "; ".join(troubles), INSTALL)
    return right("packages", f"{len(asked)} of {len(asked)} are there, as pyproject.toml asks")


def check_extras(
    extras: Mapping[str, Sequence[str]], version_of: VersionOf = installed_version
) -> Checked:
    """Which optional extras are there; one that is installed in part will fail when it is used.

    Args:
        extras: {name: its requirements}.
        version_of: Says which version is installed.
    """
    present = []
    absent = []
    partial = []
    for name, texts in extras.items():
        own = [text for text in texts if Requirement(text).name != PROJECT]
        troubles = _troubles(own, version_of)
        if not troubles:
            present.append(name)
        elif len(troubles) == len(own) and all("not installed" in text for text in troubles):
            absent.append(name)
        else:
            partial.append(f"{name} ({'; '.join(troubles)})")
    found = f"there: {', '.join(present) or 'none'}"
    if absent:
        found += f"; not installed: {', '.join(absent)}"
    if not partial:
        return right("extras", found)
    found += f"; in part: {', '.join(partial)}"
    names = ",".join(text.split()[0] for text in partial)
    return warning("extras", found, f"pip install -c constraints.txt -e '.[{names}]'")


def _troubles(asked: Sequence[str], version_of: VersionOf) -> list[str]:
    """What is missing, or of another version, one text for each package."""
    found = []
    for text in asked:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        version = version_of(requirement.name)
        if version is None:
            found.append(f"{requirement.name} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            found.append(f"{requirement.name} {version} is not {requirement.specifier}")
    return found


# ---- torch, its devices and backends


def check_torch(module: str = "torch") -> Checked:
    """Torch can be imported, communicates, and has the flight recorder that explains hangs.

    Args:
        module: What to import.
    """
    try:
        torch = importlib.import_module(module)
    except (ImportError, OSError) as error:  # OSError: a shared library that is not there
        reason = str(error).splitlines()[0]
        return wrong("torch", f"import {module} fails: {reason}", INSTALL)
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        return wrong("torch", f"{torch.__version__} is built without gloo", INSTALL)
    c10d = torch._C._distributed_c10d
    if not hasattr(c10d, "_dump_fr_trace_json"):
        found = f"{torch.__version__} has no flight recorder for gloo"
        return warning("torch", found, "a hang is explained by stacks alone; take a newer torch")
    return right("torch", f"{torch.__version__}, with gloo{_nccl(torch)} and the flight recorder")


def _nccl(torch: object) -> str:
    """ ", NCCL 2.27.5", or "" without it."""
    if not torch.distributed.is_nccl_available():  # pyright: ignore[reportAttributeAccessIssue]
        return ""
    numbers = torch.cuda.nccl.version()  # pyright: ignore[reportAttributeAccessIssue]
    return f", NCCL {'.'.join(map(str, numbers))}"


def check_devices(driver_gpus: int, torch_gpus: int, built_for_cuda: bool) -> Checked:
    """What ranks compute on here; GPUs that torch does not see are a waste.

    Args:
        driver_gpus: How many the driver has.
        torch_gpus: How many torch sees.
        built_for_cuda: Whether this torch can use them at all.
    """
    if driver_gpus and not built_for_cuda:
        found = f"the driver has {driver_gpus} GPU(s), but this torch is built for CPUs alone"
        return wrong("devices", found, "install torch for CUDA, see pytorch.org/get-started")
    if driver_gpus and not torch_gpus:
        found = f"the driver has {driver_gpus} GPU(s), but torch sees none"
        return wrong("devices", found, "look at nvidia-smi and at CUDA_VISIBLE_DEVICES")
    cores = len(hardware.usable_cores())
    memory = units.binary_bytes(psutil.virtual_memory().total)
    if torch_gpus > 1:
        ranks = f"{torch_gpus} GPUs of {max(driver_gpus, torch_gpus)}, one a rank, over NCCL"
    elif torch_gpus:
        ranks = "1 GPU; several ranks share it over gloo with --parallel.share_gpus"
    else:
        ranks = "no GPU: ranks compute on the CPU and talk over gloo"
    return right("devices", f"{ranks}; {cores} cores, {memory} of memory")


def check_two_ranks() -> Checked:
    """Two processes under torchrun meet, and all-reduce on this machine's devices.

    Communicates: `labcode.doctor.all_reduce` does, in processes of its own.
    """
    try:
        done = launch.run("labcode.doctor.all_reduce", nproc=2, timeout_s=MEET_S, echo=False)
    except launch.LaunchError as error:
        cure = "look at what is said of ports, host name and variables"
        return wrong("two ranks", str(error), cure)
    answers = [line.partition("{") for line in done.output.splitlines() if "all_reduce_s" in line]
    answer = json.loads("{" + answers[0][2])
    took = units.seconds(answer["all_reduce_s"])
    size = units.binary_bytes(answer["message_bytes"])
    found = f"all-reduce of {size} over {answer['backend']} on {answer['device']} in {took}"
    return right("two ranks", found)
