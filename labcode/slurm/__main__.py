"""`python -m labcode.slurm COMMAND ...`: jobs for SLURM, or for this machine without it."""

import sys
from collections.abc import Sequence


def main(args: Sequence[str]) -> int:
    """Run the program; see `labcode.slurm.cli.main`."""
    try:
        from labcode.slurm.cli import main as run
    except KeyboardInterrupt:  # it takes a second or two
        print("interrupted: nothing was submitted", file=sys.stderr)
        return 130
    return run(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
