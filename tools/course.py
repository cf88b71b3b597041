"""`make course`: execute every solution notebook without a browser and print how it went.

python -m tools.course [NN ...]    all lessons, or those whose name begins so
make course LESSON="00 04"         the same
"""

import argparse
import sys
import time
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from tools.notebook_run import ROOT, RunError, run


def main(root: Path = ROOT, wanted: list[str] | None = None) -> int:
    """Run the notebooks one after the other in scratch folders; the stored ones are not touched.

    Args:
        root: The folder that holds `solutions/`.
        wanted: Beginnings of names, "04"; none or empty: all lessons.

    Returns:
        The exit code: 1 if any lesson failed.
    """
    paths = sorted((root / "solutions").glob("[0-9][0-9]*_*.ipynb"))
    if not paths:
        print("no solution notebook found: run `make notebooks`")
        return 1
    wanted = [f"{prefix:0>2}" for prefix in wanted or []]  # "4" is lesson 04
    for prefix in wanted:
        if not any(path.stem.startswith(prefix) for path in paths):
            exist = ", ".join(path.stem for path in paths)
            print(f"no lesson begins with {prefix!r}: there are {exist}")
            return 1
    if wanted:
        paths = [path for path in paths if path.stem.startswith(tuple(wanted))]
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
    for failure in failures:
        print(f"\n{failure}")
    return 1 if failures else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tools.course", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("lesson", nargs="*", help="number or beginning of the name; none: all")
    sys.exit(main(wanted=parser.parse_args().lesson))
