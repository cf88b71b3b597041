"""What the first cell of a lesson imports: ranks, checks, hints, predictions, figures, sources.

from course.lab import Ranks, check, compare, plot, show_source
"""

from course.check import check, compare, hint, show_source, yours
from course.figures import plot
from course.pool.ranks import Ranks

__all__ = ["Ranks", "check", "compare", "hint", "plot", "show_source", "yours"]
