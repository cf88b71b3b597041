"""`make course`: execute every solution notebook without a browser and print lesson, seconds and result."""

import sys
import time
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from tools.notebook_run import ROOT, RunError, run


def main(root: Path = ROOT, wanted: list[str] | None = None) -> int:
    """Run the notebooks one after the other in scratch folders; 1 if any fails. The stored notebooks are not touched."""
    paths = sorted((root / "solutions").glob("[0-9][0-9]_*.ipynb"))
    paths = [
        path
        for path in paths
        if not wanted or any(path.stem.startswith(prefix) for prefix in wanted)
    ]
    if not paths:
        print("no solution notebook found: run `make notebooks`")
        return 1
    print(f"{'lesson':32s}  seconds  result")
    failures = []
    for path in paths:
        print(f"{path.stem:32s}  ", end="", flush=True)
        start = time.perf_counter()
        try:
            run(nbformat.read(path, as_version=4))
            result = "ok"
        except RunError as error:
            result = "FAILED"
            failures.append(f"{path.name}, {error}")
        print(f"{time.perf_counter() - start:7.1f}  {result}", flush=True)
    print(f"{len(paths) - len(failures)} of {len(paths)} lessons ran to the end")
    print("\n".join(["", *failures]) if failures else "", end="")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(wanted=sys.argv[1:]))
