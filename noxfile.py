"""The library on the versions of Python and PyTorch that it promises: `make test-matrix`.

Each pair of versions in `tools/matrix.py` is a fresh environment; what else is installed is what
constraints.txt names. A Python that this machine lacks is skipped. `python -m tools.matrix` writes
what came out as the table of docs/versions.md.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))

from tools.matrix import REPORTS, VERSIONS, report_of, tests_of

# The pins that belong to one version of PyTorch or of Python.
OWN_PINS = re.compile(r"^(torch|torchao|pytorch-optimizer|transformers|triton)==")


def constraints_without_torch(torch_version: str) -> str:
    """The pins of constraints.txt, with another PyTorch.

    Args:
        torch_version: Such as "2.15.0".

    Returns:
        The text of a constraints file.
    """
    lines = Path("constraints.txt").read_text().splitlines()
    kept = [line for line in lines if not OWN_PINS.match(line)]
    return "\n".join([*kept, f"torch=={torch_version}", ""])


@nox.session(venv_backend="venv")
@nox.parametrize("python,torch", VERSIONS)
def versions(session: nox.Session, torch: str) -> None:
    """Install the course with one PyTorch and run the tests that depend on it.

    Args:
        session: Of nox; its `python` is the version of Python.
        torch: The version of PyTorch.
    """
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = report_of(str(session.python), torch)
    report.unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.write(constraints_without_torch(torch))
        pins.flush()
        session.install("-c", pins.name, "-e", ".[dev]")
    session.run("python", "-m", "labcode.doctor", success_codes=[0, 1])
    tests = tests_of(str(session.python))
    command = ["python", "-m", "pytest", *tests, f"--junitxml={report}", "-n", "2"]
    command += ["--dist", "loadscope"]
    # 1: some test failed, which the table shows
    session.run(*command, *session.posargs, success_codes=[0, 1], env={"OMP_NUM_THREADS": "1"})
    shutil.rmtree(Path(session.bin).parent)  # 6 GB, and there are nine
