"""The patients of the DDP clinic: short broken scripts, one bug each, with a healthy twin.

`run(healthy, watch)` of each returns the number in which patient and twin differ, or raises.
"""

from importlib import import_module
from types import ModuleType

NAMES = (
    "same_batches",
    "same_order",
    "added_up",
    "four_messages",
    "reseeded",
    "new_head",
    "own_statistics",
    "mean_of_means",
    "idle_search",
    "all_save",
    "only_rank_zero",
    "other_shape",
    "slow_node",
    "two_ways",
    "early_end",
    "few_draws",
)


def patient(name: str) -> ModuleType:
    """A patient: COMPLAINT, run(healthy, watch); FINDING is the diagnosis."""
    return import_module(f"{__name__}.{name}")
