"""`python -m tools.reliability [RESULT]`: the table of the README about faults, from its JSON.

RESULT is what `python -m labcode.train.chaos RECIPE --result FILE` has written; without it the one
in `benchmarks/results` is shown again.

Held by: tests/unit/test_reliability.py
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from labcode.train.chaos import account

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
RESULT = ROOT / "benchmarks" / "results" / "chaos.json"
BEGINS = "<!-- faults: written by `python -m tools.reliability` -->"
ENDS = "<!-- end of faults -->"


def section(found: account.Account) -> str:
    """The sentence and the table."""
    return f"{account.summary(found)}\n\n{account.table(found)}"


def shown(readme: str, found: account.Account) -> str:
    """A README with the section of these faults.

    Raises:
        ValueError: It has no place for it.
    """
    before, begins, rest = readme.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not begins or not ends:
        raise ValueError(f"README.md has no lines {BEGINS} and {ENDS}: put them where it belongs")
    return f"{before}{BEGINS}\n\n{section(found)}\n\n{ENDS}{after}"


def main(words: Sequence[str]) -> int:
    """Write the table; 1 if something was lost, which the table shows as well."""
    path = Path(words[0]) if words else RESULT
    try:
        found = account.read(path)
        text = shown(README.read_text(encoding="utf-8"), found)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in found.complaints():
        print(f"wrong: {line}", file=sys.stderr)
    if path.resolve() != RESULT:
        shutil.copyfile(path, RESULT)
    README.write_text(text, encoding="utf-8")
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
