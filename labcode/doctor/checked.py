"""What one check of an installation has found: right, a warning, or wrong with what to do."""

from dataclasses import dataclass

RIGHT = "right"
WARNING = "warning"  # it works, but will bite
WRONG = "wrong"


@dataclass(frozen=True)
class Checked:
    """The finding of one check.

    Args:
        name: What was checked, such as "shared memory".
        level: `RIGHT`, `WARNING` or `WRONG`.
        found: What is there, with its numbers.
        cure: What to do; "" where nothing is to be done.
    """

    name: str
    level: str
    found: str
    cure: str = ""

    def __str__(self) -> str:
        line = f"{self.level:<8} {self.name:<15} {self.found}"
        return f"{line}: {self.cure}" if self.cure else line


def right(name: str, found: str) -> Checked:
    """Nothing is to be done."""
    return Checked(name, RIGHT, found)


def warning(name: str, found: str, cure: str) -> Checked:
    """It works, but will bite."""
    return Checked(name, WARNING, found, cure)


def wrong(name: str, found: str, cure: str) -> Checked:
    """It does not work."""
    return Checked(name, WRONG, found, cure)
