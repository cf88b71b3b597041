"""`python -m labcode.slurm.cluster`: the same as `slurm/cluster`."""

import sys

from labcode.slurm.cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())
