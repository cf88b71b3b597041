"""`python -m tests.faults chaos RECIPE [--faults N] [--seed S] [--section.field value ...]`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from labcode.config import Config
from labcode.minislurm.cluster import running
from labcode.runtime import combinations
from labcode.runtime.arguments import UsageError
from labcode.runtime.command import parse

from .plan import KINDS, check_kinds

# what the training has unless the command line says otherwise
DEFAULTS = (
    "--train.steps=60",
    "--train.log_every=1",
    "--train.eval_every=0",
    "--train.eval_batches=1",
    "--train.sample_tokens=4",
    "--checkpoint.every=5",
    "--checkpoint.keep=2",
    "--checkpoint.resume",
    "--parallel.collective_timeout_s=10",
)


def main(words: Sequence[str]) -> int:
    """Run the program; returns its exit code: 0, 1 if something was lost, 2 after a user error."""
    options, rest = _parser().parse_known_args(words)
    args = [options.recipe, *DEFAULTS, *rest]
    try:
        config = parse([*args, "--train.out=run"])
        _check(options, config, rest)
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cluster = None
    if options.cluster is not None:
        cluster = running(options.cluster)
        if cluster is None:
            print(
                f"error: no cluster {options.cluster!r} is up on this machine: start it with "
                f"slurm/cluster up 2 --name {options.cluster}",
                file=sys.stderr,
            )
            return 2
        if options.ranks % len(cluster.spec.names()):
            print(
                f"error: --ranks {options.ranks} over {len(cluster.spec.names())} nodes: give a "
                "multiple of the number of nodes",
                file=sys.stderr,
            )
            return 2
    # imports torch, which takes a second: an error of the command line comes before it
    from .account import Account, summary, table
    from .job import StuckError
    from .play import Chaos, play

    chaos = Chaos(
        args=args,
        shown=" ".join([options.recipe, *rest]),
        config=config,
        ranks=options.ranks,
        faults=options.faults,
        seed=options.seed,
        kinds=options.kinds,
        limit_s=options.limit_s,
        cluster=cluster,
    )

    def keep(account: Account) -> None:
        if options.result:
            account.write(options.result)

    # a shell starts its background jobs deaf to it, and they would pass that on to what they start
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        account = play(chaos, _say, keep)
    except KeyboardInterrupt:
        where = f"the finished trainings are in {options.result}" if options.result else ""
        print(f"interrupted: {where or 'nothing was written'}", file=sys.stderr)
        return 130
    except StuckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\n{table(account)}\n\n{summary(account)}")
    for line in account.left_out:
        print(f"left out: {line}")
    if account.unplanned:
        print(f"{account.unplanned} attempts ended without a fault of the plan")
    if options.result:
        print(f"written to {options.result}")
    for line in account.complaints():
        print(f"wrong: {line}")
    return 0 if account.good else 1


def _say(line: str) -> None:
    print(line, flush=True)


def _check(options: argparse.Namespace, config: Config, rest: Sequence[str]) -> None:
    """Raises ValueError for what cannot be played."""
    check_kinds(options.kinds)
    for word in rest:
        if word.startswith(("--train.out", "--train.overwrite", "--checkpoint.resume")):
            raise ValueError(f"{word} is chosen by chaos itself: leave it out")
    if options.faults < 1 or options.ranks < 1:
        raise ValueError("--faults and --ranks are counts: give 1 or more")
    if config.checkpoint.every < 1 or config.checkpoint.keep < 2:
        raise ValueError(
            "a run that is disturbed needs --checkpoint.every 1 or more, and --checkpoint.keep 2 "
            "or more: one of them may be damaged"
        )
    if config.train.steps < 4 * config.checkpoint.every:
        raise ValueError(
            f"train.steps={config.train.steps} leaves no room for faults: give "
            f"{4 * config.checkpoint.every} or more, four times checkpoint.every"
        )
    combinations.check(config, options.ranks)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults chaos",
        description="Disturb a training by a seeded plan, and prove that nothing is lost.",
        epilog="All other options are those of the training: --section.field value.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", metavar="RECIPE")
    parser.add_argument("--faults", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=1, help="of the plan (1)")
    parser.add_argument("--ranks", type=int, default=2, help="of the training (2)")
    parser.add_argument("--kinds", nargs="+", default=[], metavar="KIND", help=", ".join(KINDS))
    parser.add_argument(
        "--cluster", metavar="NAME", help="train on the nodes of this cluster of slurm/cluster"
    )
    parser.add_argument("--result", type=Path, help="write all outcomes to this JSON file")
    parser.add_argument(
        "--limit-s", type=float, default=180.0, help="after which a job is stuck (180)"
    )
    return parser
