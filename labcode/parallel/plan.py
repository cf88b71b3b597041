"""A parallelization plan: which module of a model becomes what, and how its layers make stages.

A plan is data, made by one function per model (`models/gpt_plan.py`, `models/vit_plan.py`), and
applied here. A module keeps its name and its weights keep theirs, so that the state dict of a
sharded model is that of the whole model with smaller tensors.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labcode.parallel.deferred import same_watch
from labcode.parallel.dropout import RngStream
from labcode.parallel.sharding import FullWeight


@dataclass(frozen=True)
class PlanEntry:
    """One line of a plan.

    Args:
        modules: A name in the model; * stands for any layer.
        how: What becomes of the module, in words.
        transform: Takes the module, of whatever type the entry expects there, and returns what
            replaces it.
    """

    modules: str
    how: str
    transform: Callable[[Any], nn.Module]


@dataclass(frozen=True)
class StagePlan:
    """How the modules of a model make the stages of a pipeline.

    A model that is cut into stages is called `model(inputs, x=x, layers=layers)`, as `GPT` is.

    Args:
        layers: The range of `model.blocks` of each stage; stage s is on pp coordinate s % pp.
        schedule: The schedule's name in `labcode.schedules`.
        first: Modules beside the blocks that the first stage alone needs.
        last: Modules beside the blocks that the last stage alone needs.
        boundary: `boundary(inputs)` is the shape of what one stage hands to the next for one
            micro-batch.
    """

    layers: tuple[range, ...]
    schedule: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    boundary: Callable[[torch.Tensor], tuple[int, ...]]

    def stage_of(self, name: str) -> int:
        """The number of the stage that has a weight of the whole model."""
        module, _, rest = name.partition(".")
        if module == "blocks":
            number = int(rest.partition(".")[0])
            for stage, layers in enumerate(self.layers):
                if number in layers:
                    return stage
        return 0 if module in self.first else len(self.layers) - 1


@dataclass(frozen=True)
class ModelPlan:
    """Everything that `parallelize` needs to know about one model on one grid.

    Args:
        entries: What becomes of which modules, in order.
        stages: How they make the stages of a pipeline.
        loss: `loss(output, targets, **options)` of this rank's output: the loss of its dp rank's
            samples, the same number on every rank of cp and tp.
        partial_over: `partial_over(is_sharded)`: the axes whose ranks each see a part of the
            gradient of a weight, given whether tp cuts it.
        isolated_dropout: Names of modules whose dropout has to differ between ranks of tp.
        tied: Names of weights that are one and the same; empty if there are none.
        count_targets: The number of targets of a micro-batch that count in its loss; None: every
            sample counts the same.
        prepare: Called with the model after the entries were applied, for what no entry can see.
    """

    entries: tuple[PlanEntry, ...]
    stages: StagePlan
    loss: Callable[..., torch.Tensor]
    partial_over: Callable[[bool], tuple[str, ...]]
    isolated_dropout: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    count_targets: Callable[[torch.Tensor], torch.Tensor] | None = None
    prepare: Callable[[Any], None] | None = None


def apply_plan(model: nn.Module, entries: Iterable[PlanEntry]) -> None:
    """Do what the entries say, in their order.

    The order matters where two entries name the same module: the second one gets what the first one
    has made of it. An `nn.Identity`, which stands for a module of another stage, is left alone.
    """
    for entry in entries:
        for name in _matching(model, entry.modules):
            module = model.get_submodule(name)
            if not isinstance(module, nn.Identity):
                replace_module(model, name, entry.transform(module))


def _matching(model: nn.Module, pattern: str) -> list[str]:
    """The modules that a pattern names; a * stands for one part of a name."""
    # For fnmatch a * crosses dots as well, so names of another depth are left out first.
    depth = pattern.count(".")
    names = [name for name, _ in model.named_modules() if name.count(".") == depth]
    return [name for name in names if fnmatchcase(name, pattern)]


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of that name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def full_weights(model: nn.Module, stages: StagePlan, pp: int) -> dict[str, FullWeight]:
    """What every rank has to know about all weights of a model that is still whole."""
    weights = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        weights[name] = FullWeight(stages.stage_of(name) % pp, tuple(param.shape))
    return weights


def keep_own_stages(model: nn.Module, stages: StagePlan, coord: int, pp: int) -> None:
    """Replace what belongs to other stages by `nn.Identity`; the rest keeps its place and name."""
    # Deleting instead would renumber the layers of a ModuleList, and with them the names of weights
    # in state dicts and checkpoints. An Identity has no weights and is never called.
    own_layers = set()
    for layers in stages.layers[coord::pp]:
        own_layers.update(layers)
    left_out = []
    for number in range(stages.layers[-1].stop):
        if number not in own_layers:
            left_out.append(f"blocks.{number}")
    if coord > 0:
        left_out += stages.first
    if coord < pp - 1:
        left_out += stages.last
    for name in left_out:
        replace_module(model, name, nn.Identity())


# ---- what an entry may do to a module


def with_sharded_input(module: nn.Module, shard: Callable[[Any], Any]) -> nn.Module:
    """The module, whose first input is cut before it runs."""

    def cut_first_input(module: nn.Module, args: tuple) -> tuple:
        return (shard(args[0]), *args[1:])

    module.register_forward_pre_hook(cut_first_input)
    return module


def with_output(module: nn.Module, change: Callable[[Any], Any]) -> nn.Module:
    """The module, whose output is changed after it ran."""

    def changed_output(module: nn.Module, args: tuple, output: Any) -> Any:
        return change(output)

    module.register_forward_hook(changed_output)
    return module


def with_attributes(module: nn.Module, values: Mapping[str, Any]) -> nn.Module:
    """The module, with some of its attributes set."""
    for name, value in values.items():
        setattr(module, name, value)
    return module


def with_compiled_forward(module: nn.Module, compiler: str = "inductor") -> nn.Module:
    """The module, whose forward is compiled when it first runs; its hooks are not.

    One compilation serves all modules of one class: the layers of a model are compiled once.

    Args:
        module: It is changed in place, and its weights keep their names.
        compiler: What torch.compile calls a backend; "eager" and "aot_eager" take seconds less and
            gain nothing.

    Source: docs.pytorch.org/docs/stable/generated/torch.compile.html; for each layer alone,
        torchtitan's `apply_compile`.
    """
    module.forward = torch.compile(module.forward, backend=compiler)
    return module


def checkpointed(module: nn.Module, stream: RngStream) -> nn.Module:
    """The module with activation checkpointing: its forward runs a second time in backward.

    The second forward draws the random numbers of the first one again: PyTorch restores the
    generators of the process, and `stream` is rewound here.

    Of a whole layer ("full") only its input is kept. Of the core of attention alone ("selective")
    q, k and v are kept, which the layer keeps anyway, and the scores are computed again. They are
    most of what a layer keeps where the sequence is long, and little of its work. A fused kernel
    (FlashAttention) has no scores to keep: all that is left to save is its log-sum-exp.

    Source: Chen et al. 2016 (arXiv:1604.06174); Korthikanti et al. 2022 (arXiv:2205.05198), section
        5, for the selective kind.
    Held by: tests/ranks/test_pipeline.py::
        test_activation_checkpointing_keeps_the_input_of_each_layer_alone,
        tests/ranks/test_activation_bytes.py, tests/ranks/test_sharding.py::
        test_activation_checkpointing_repeats_the_dropout
    """

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        """The contexts of the first and of the second forward; made when the first one starts."""
        # So `stream.state` is read here, before the first forward draws.
        return contextlib.nullcontext(), _second_forward(same_watch(), stream, stream.state)

    # The attribute hides the method of the class: no wrapper module, which would change the names
    # of weights. Not the reentrant kind, which gives no gradients at all if no input needs one, as
    # in the first layer behind a frozen embedding.
    module.forward = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
    return module


@contextlib.contextmanager
def _second_forward(
    watch: AbstractContextManager, stream: RngStream, state: torch.Tensor
) -> Iterator[None]:
    """Around the forward that backward repeats: watched and with random numbers like the first."""
    with watch, stream.replayed_from(state):
        yield
