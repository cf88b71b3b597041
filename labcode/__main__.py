"""`python -m labcode`: the lessons of the course, ways through it, and what comes next."""

import sys

from course.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
