"""`python -m labcode.minislurm`: the same as `slurm/cluster`."""

import sys

from labcode.minislurm.cli import main

if __name__ == "__main__":
    sys.exit(main())
