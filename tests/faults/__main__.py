"""`python -m tests.faults [CATEGORY ...] [--seed N] [--limit N] [--parallel K] [--out FOLDER]`.

`python -m tests.faults chaos RECIPE` disturbs one training run many times: see `chaos/`.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

from . import trial
from .categories import NAMES
from .chaos.command import main as chaos
from .verdicts import Result


def main() -> int:
    """Play the trial and print its table; 1 if anything is not as it should be."""
    if sys.argv[1:2] == ["chaos"]:
        return chaos(sys.argv[2:])
    # a shell starts its background jobs deaf to it, and they would pass that on to what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    options = arguments()
    results: dict[str, list[Result]] = {}
    for name in options.categories or NAMES:
        started = time.monotonic()
        cases = trial.cases_of(name, options.seed)
        numbers = trial.sample(cases, options.limit, options.seed)
        if options.case is not None:
            numbers = [options.case]
        if options.list:
            for number in numbers:
                print(f"{name} {number}: {cases[number].what}")
            continue
        report = None if options.quiet else tell
        results[name] = trial.play_all(
            name, options.seed, numbers=numbers, parallel=options.parallel, report=report
        )
        trial.write(results[name], options.out / f"{name}.jsonl")
        print(f"{name}: {len(numbers)} cases in {trial.seconds_since(started)}", flush=True)
    if results:
        print(trial.table(results))
    everything = [result for found in results.values() for result in found]
    return int(not all(result.good for result in everything))


def tell(result: Result) -> None:
    """What is not as it should be."""
    if result.good:
        return
    print(f"{result.category} {result.number}: {result.answer}: {result.what}")
    for kind, whys in result.flags.items():
        for why in whys:
            print(f"    {kind}: {why}")
    for rank, text in enumerate(result.stderr):
        for line in text.strip().splitlines()[-3:]:
            print(f"    rank {rank}: {line[:300]}")
    sys.stdout.flush()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("categories", nargs="*", metavar="CATEGORY", help=", ".join(NAMES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=int, help="cases of each category, drawn at random")
    parser.add_argument("--case", type=int, help="the number of a single case")
    parser.add_argument("--parallel", type=int, default=2, help="cases at a time")
    parser.add_argument("--out", type=Path, default=Path("build/faults"), help="for CATEGORY.jsonl")
    parser.add_argument("--list", action="store_true", help="name the cases, play nothing")
    parser.add_argument("--quiet", action="store_true", help="print the table alone")
    options = parser.parse_args()
    for name in options.categories:
        if name not in NAMES:
            parser.error(f"unknown category {name}: there are {', '.join(NAMES)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
