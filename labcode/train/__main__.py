"""`python -m labcode.train RECIPE [--section.field value ...]`, run alone, by torchrun or by srun."""

import sys

from labcode.train.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
