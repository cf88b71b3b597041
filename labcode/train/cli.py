"""The command line of the training program; `labcode.command` reads it."""

import sys
from collections.abc import Sequence

from labcode.command import UsageError, parse


def main(args: Sequence[str]) -> int:
    """Run the program; returns its exit code: 0, 2 for what the user can mend, 130 after Ctrl-C."""
    try:
        config = parse(args)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    from labcode.train.run import (
        run,
    )  # imports torch: only after the command line is known to be right

    return run(config)
