"""What is to be done to a model, as a table: rows of module names and of functions that replace or wrap a module.

Whatever happens, a module keeps its name and its weights keep theirs, so that a state dict of a sharded model is one of the
whole model with smaller tensors.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from labcode.parallel.deferred import same_watch


@dataclass(frozen=True)
class Row:
    """One line of a table: which modules, what happens to them in words, and the function that does it."""

    modules: str  # a name in the model; * stands for any layer
    how: str
    change: Callable[[nn.Module], nn.Module]


def change(model: nn.Module, table: Iterable[Row]) -> None:
    """Do what the rows say, in their order. An `nn.Identity` stands for a module that is elsewhere, and is passed over."""
    for row in table:
        depth = row.modules.count(".")
        names = [
            name for name, _ in model.named_modules() if name.count(".") == depth
        ]  # * stands for one name
        for name in (name for name in names if fnmatchcase(name, row.modules)):
            parent, _, child = name.rpartition(".")
            module = model.get_submodule(name)
            if not isinstance(module, nn.Identity):
                setattr(model.get_submodule(parent), child, row.change(module))


def takes(module: nn.Module, change: Callable) -> nn.Module:
    """The module, with its first input changed before it runs."""
    module.register_forward_pre_hook(lambda module, args: (change(args[0]), *args[1:]))
    return module


def gives(module: nn.Module, change: Callable) -> nn.Module:
    """The module, with its output changed after it ran."""
    module.register_forward_hook(lambda module, args, output: change(output))
    return module


def recomputed(module: nn.Module) -> nn.Module:
    """The module, whose activations are not kept: backward runs its forward once more.

    Source: Chen et al. 2016 (arXiv:1604.06174).
    """
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=same_watch)
    return module
