"""`python -m labcode.perf COMMAND ...`: predict a training before it runs."""

import sys

from labcode.perf.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
