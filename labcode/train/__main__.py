"""`python -m labcode.train RECIPE [--section.field value ...]`, run alone, by torchrun or by
srun.
"""

import sys
from collections.abc import Sequence

from labcode.command import UsageError, parse


def main(args: Sequence[str]) -> int:
    """Run the program; returns its exit code: 0, 2 after a user error, 130 after Ctrl-C."""
    try:
        config = parse(args)
    except UsageError as error:
        from labcode.train.report import refuse_command

        return refuse_command(error)
    # imports torch, which takes seconds: `--help` need not wait for it
    from labcode.train.run import run

    return run(config) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
