"""What the first cell of a lesson imports: ranks, checks, hints, predictions, figures, sources.

from labcode.lab import Ranks, check, compare, plot, show_source
"""

from labcode.pool.ranks import Ranks
from labcode.teach.check import check, compare, hint, show_source, yours
from labcode.teach.figures import plot

__all__ = ["Ranks", "check", "compare", "hint", "plot", "show_source", "yours"]
