"""`python -m labcode.slurm COMMAND ...`: jobs for SLURM, or for this machine without it."""

import sys

from labcode.slurm.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
