"""`python -m tools.reliability [RESULT]`: the tables of the guide about faults, from their JSON.

RESULT is what `python -m tests.faults chaos RECIPE --result FILE` has written, on one machine or
with `--cluster`; it replaces the one of its kind in `benchmarks/results`. Without it those are
shown again.

Held by: tests/unit/test_reliability.py
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from labcode.runtime.files import write_atomically
from tests.faults.chaos import account

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "book" / "guide" / "failures.md"
RESULTS = ROOT / "benchmarks" / "results"
ON_ONE_MACHINE = RESULTS / "chaos.json"
ON_A_CLUSTER = RESULTS / "chaos_cluster.json"
BEGINS = "<!-- faults: written by `python -m tools.reliability` -->"
ENDS = "<!-- end of faults -->"


def section(accounts: Sequence[account.Account]) -> str:
    """A sentence and a table for each."""
    parts = []
    for found in accounts:
        parts += [account.summary(found), account.table(found)]
    return "\n\n".join(parts)


def shown(page: str, accounts: Sequence[account.Account]) -> str:
    """A page with the section of these faults.

    Raises:
        ValueError: It has no place for it.
    """
    before, begins, rest = page.partition(BEGINS)
    _, ends, after = rest.partition(ENDS)
    if not begins or not ends:
        raise ValueError(f"the page has no lines {BEGINS} and {ENDS}: put them where it belongs")
    return f"{before}{BEGINS}\n\n{section(accounts)}\n\n{ENDS}{after}"


def committed() -> list[account.Account]:
    """The accounts in `benchmarks/results`."""
    return [account.read(ON_ONE_MACHINE), account.read(ON_A_CLUSTER)]


def main(words: Sequence[str]) -> int:
    """Write the tables; 1 if something was lost, which they show as well."""
    try:
        if words:
            new = account.read(Path(words[0]))
            new.write(ON_A_CLUSTER if new.nodes else ON_ONE_MACHINE)
        accounts = committed()
        text = shown(PAGE.read_text(encoding="utf-8"), accounts)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for found in accounts:
        for line in found.complaints():
            print(f"wrong: {line}", file=sys.stderr)
    write_atomically(PAGE, text.encode())
    return 0 if all(found.good for found in accounts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
