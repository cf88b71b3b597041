"""Debug features of NVIDIA's nvdlfw_inspect on labcode's linear layers, on any grid.

The YAML is that of Transformer Engine (`debug.debug_config`), and chooses layers by their names
in the whole model's state dict. Each layer offers six tensors:

    activation  its input          weight  the weight          output  its output
    dgrad       gradient of those  wgrad   of one micro-batch  gradient  of the output

Of a layer that ranks share, activation, output and their gradients are seen where they are whole or
cut, never as partial sums: Transformer Engine looks at them beside the product, before ranks of tp
have added their parts. So the statistics of all parts are those of one process.

Who is put together: weights over tp, unless that is switched off; all others over the axes that are
named, or over none. A tensor that several ranks of a group hold whole counts once. Micro-batches of
a step add up; a weight counts once in a step. Everything is written by `step()`.

    LOG_DIR/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-R.log

has the lines of Transformer Engine without the time of day, and with twelve digits: files of ranks
that are put together are equal. nvdlfw_inspect is a singleton of the process: close one debugger
before the next.

Source: Transformer Engine, user guide, "Precision debug tools"; nvdlfw_inspect 0.2.2.
Held by: tests/ranks/test_debug.py
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import nvdlfw_inspect.api as debug_api
import torch
import torch.distributed as dist
from nvdlfw_inspect.config_manager import ConfigManager
from nvdlfw_inspect.logging import BaseLogger, MetricLogger, wrap_tensorboard_writer
from torch import nn

from labcode.debug.debug_config import (
    FEATURES,
    GEMMS,
    NAMESPACE,
    TENSORS,
    ConfigBlock,
    choose,
    is_due,
    not_of_recipe,
    read,
)
from labcode.debug.fp8_debug import Cast, DebuggedFp8Product, recipe_name
from labcode.parallel.linear import PLAIN_PRODUCT, MatrixProduct
from labcode.parallel.model import ParallelModel
from labcode.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from labcode.precision.fp8 import Fp8Product, ProductLinear
from labcode.runtime.agreement import on_every_rank

FEATURE_DIR = Path(__file__).parent / "features"
STATISTICS = "nvdlfw_inspect_statistics_logs"
LINEAR = (ColumnParallelLinear, RowParallelLinear, ProductLinear, nn.Linear)
LOGS = ("LogTensorStats", "LogFp8TensorStats", "DumpTensors")  # which look, and change nothing
LOGGERS = ("nvdlfw_inspect", "Default Statistics")


@dataclass(frozen=True)
class Reduction:
    """Over which ranks statistics are put together.

    Args:
        over: Axes, for all tensors but weights; empty: each rank has its own statistics.
        weights: Whether those of weights are put together over tp.
    """

    over: tuple[str, ...] = ()
    weights: bool = True


def chosen_layers(
    model: ParallelModel, config: Path, feature_dir: Path | None = None
) -> dict[str, ConfigBlock]:
    """{layer: block of the YAML} of the whole model; all ranks call it.

    Communicates: four agreements, an all-gather of the file and one of names.

    Raises:
        ValueError: What is wrong with the file, or with the layers that it names, in one line; on
            the first rank that found it. Of files that differ, on all.
        PeerError: Raised on the other ranks.
    Held by: tests/ranks/test_debug.py::test_all_ranks_must_read_the_same_yaml
    """
    blocks = on_every_rank(read, config, feature_dir)
    files: list[list[ConfigBlock]] = [[]] * dist.get_world_size()
    dist.all_gather_object(files, blocks)
    on_every_rank(_check_same, files, config)
    names: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(names, list(_linear_layers(model)))
    known: dict[str, None] = {}
    for own in names:
        known |= dict.fromkeys(own)
    chosen = on_every_rank(choose, blocks, list(known), config)
    on_every_rank(_check_fp8, model, chosen, config)
    return chosen


class _Products(NamedTuple):
    """The products of a layer that is debugged.

    Args:
        module: The layer.
        plain: What it computes with otherwise.
        watched: What it computes with in a step in which a feature is at work.
        block: Block with its features.
    """

    module: Any
    plain: MatrixProduct | Fp8Product
    watched: MatrixProduct | DebuggedFp8Product
    block: ConfigBlock


class Debugger:
    """Features on the linear layers of a model, until it is closed.

        chosen = chosen_layers(model, Path("stats.yaml"))
        debugger = Debugger(model, chosen, Path("logs"), Reduction(("dp", "tp")))
        for batches in steps:
            model.forward_backward(batches)
            debugger.step()
        debugger.close()

    Communicates: at `step`, an all-gather of 9 float64 numbers for each tensor that is logged, over
        each group. Features that change tensors communicate nothing.

    Args:
        model: This rank's part; without activation checkpointing of whole layers.
        chosen: What `chosen_layers` has chosen.
        log_dir: The folder of all ranks; made if it does not exist.
        reduction: The ranks whose statistics are put together.
        feature_dir: A folder with features of the user's own.
        first_step: Steps that were done before; the first step of a run is 0 in the files.
        tensorboard: A SummaryWriter, on the ranks that are to write; None: not this one.

    Raises:
        ValueError: Another debugger is open, or a feature of the user's own is broken.
    """

    def __init__(
        self,
        model: ParallelModel,
        chosen: Mapping[str, ConfigBlock],
        log_dir: Path,
        reduction: Reduction = Reduction(),
        feature_dir: Path | None = None,
        first_step: int = 0,
        tensorboard: Any = None,
    ) -> None:
        self._grid = model.grid
        self._reduction = reduction
        self._iteration = first_step
        self._sequence = model.cuts_sequence_over_tp
        self._weights_seen: set[str] = set()
        self._hooks: list[Any] = []
        self._products: list[_Products] = []
        self._log = StatisticsLog(log_dir, model.grid.rank, appends=first_step > 0)
        _initialize(chosen, log_dir, self._log, feature_dir, first_step)
        if tensorboard is not None:
            MetricLogger.add_logger(wrap_tensorboard_writer(tensorboard))
        # the attribute exists only once `_initialize` has run: nvdlfw_inspect raises before
        self._api: Any = debug_api.transformer_engine
        for name, module in _linear_layers(model).items():
            # layers of other stages have been chosen too, and are not here
            if name in chosen:
                self._watch(name, module, chosen[name])
        self._exchange_products()

    def step(self) -> None:
        """End an optimizer step: write its statistics."""
        debug_api.step()
        self._iteration += 1
        self._weights_seen.clear()
        self._exchange_products()

    def close(self) -> None:
        """Let go of the model and of nvdlfw_inspect."""
        # first, since a forward with a hook would call features that have been taken down
        for hook in self._hooks:
            hook.remove()
        for each in self._products:
            each.module.product = each.plain
        debug_api.end_debug()
        forget_handlers()
        self._log.close()

    # ---- looking

    def _watch(self, name: str, module: Any, block: ConfigBlock) -> None:
        tensors = _inspected(block)
        if tensors:
            before = partial(self._entering, name, tensors, block)
            after = partial(self._leaving, name, tensors, block)
            self._hooks.append(module.register_forward_pre_hook(before))
            self._hooks.append(module.register_forward_hook(after))
        product = getattr(module, "product", None)
        sees_wgrad = "wgrad" in tensors and module.weight.requires_grad
        # From the product where there is one: a hook on the weight sees the sum over its uses, and
        # of a tied head also what the embedding adds.
        if isinstance(product, MatrixProduct) and (sees_wgrad or _modifies(block)):
            look = partial(self._inspect, name, module, "wgrad") if sees_wgrad else None
            watched = self._modified(name, product, look, _modifies(block))
            self._products.append(_Products(module, product, watched, block))
        elif sees_wgrad:
            # nothing else uses this weight: a tied head is never in FP8 as long as it is skipped
            look = partial(self._inspect, name, module, "wgrad")
            self._hooks.append(module.weight.register_hook(look))
        if isinstance(product, Fp8Product) and _concerns_products(block):
            debugged = self._debugged(name, module, product, block)
            self._products.append(_Products(module, product, debugged, block))

    def _exchange_products(self) -> None:
        """Give each layer the products of this step: those that are watched cost time and memory.

        Held by: tests/ranks/test_debug.py::test_a_layer_is_watched_in_the_steps_that_are_logged
        """
        for each in self._products:
            is_used = False
            for name in each.block.features:
                is_used = is_used or name not in LOGS or _is_due(name, each.block, self._iteration)
            each.module.product = each.watched if is_used else each.plain

    def _looks_now(self, module: nn.Module, block: ConfigBlock) -> bool:
        """Whether this is training, and a step in which a feature of the block looks at tensors."""
        if not (torch.is_grad_enabled() and module.training):
            return False
        for name in block.features:
            looks = name not in FEATURES or name in ("LogTensorStats", "DumpTensors")
            if looks and _is_due(name, block, self._iteration):
                return True
        return False

    def _entering(
        self, name: str, tensors: set[str], block: ConfigBlock, module: Any, args: tuple
    ) -> None:
        if not self._looks_now(module, block):
            return
        # before the layer runs: under ZeRO a weight is whole only then
        # it is the same in all micro-batches of a step, and its norms would grow with their number
        if "weight" in tensors and name not in self._weights_seen:
            self._weights_seen.add(name)
            self._inspect(name, module, "weight", module.weight)
        if "activation" in tensors:
            self._inspect(name, module, "activation", args[0])
        if "dgrad" in tensors and args[0].requires_grad:
            args[0].register_hook(partial(self._inspect, name, module, "dgrad"))

    def _leaving(
        self,
        name: str,
        tensors: set[str],
        block: ConfigBlock,
        module: Any,
        args: tuple,
        output: torch.Tensor,
    ) -> None:
        if not self._looks_now(module, block):
            return
        if "output" in tensors:
            self._inspect(name, module, "output", output)
        if "gradient" in tensors and output.requires_grad:
            # On the tensor: a full backward hook of the module would put a Function of its own
            # around inputs and outputs, which then must not be changed in place.
            output.register_hook(partial(self._inspect, name, module, "gradient"))

    def _inspect(self, name: str, module: nn.Module, tensor_name: str, tensor: Any) -> None:
        group, counts = self._group_of(module, tensor_name)
        self._api.inspect_tensor(
            name,
            tensor_name=tensor_name,
            tensor=tensor.detach(),
            iteration=self._iteration,
            group=group,
            counts=counts,
        )

    def _group_of(
        self, module: nn.Module, tensor_name: str, at_product: bool = False
    ) -> tuple[dist.ProcessGroup | None, bool]:
        """The ranks that are put together, and whether this one has what no other has.

        Args:
            module: The layer.
            tensor_name: One of TENSORS.
            at_product: Whether the tensor is an operand, with the sequence put together.
        """
        if tensor_name == "weight":
            axes = ("tp",) if self._reduction.weights else ()
        else:
            axes = self._reduction.over
        if not axes:
            return None, True
        is_first = self._grid.coord("tp") == 0
        counts = "tp" not in axes or is_first or self._is_cut(module, tensor_name, at_product)
        return self._grid.group(*axes), counts

    def _is_cut(self, module: nn.Module, tensor_name: str, at_product: bool) -> bool:
        """Whether ranks of tp hold different parts of a tensor."""
        is_column = isinstance(module, ColumnParallelLinear)
        if tensor_name in ("weight", "wgrad"):
            return is_column or isinstance(module, RowParallelLinear)
        if self._sequence and not at_product:
            return True
        if tensor_name in ("activation", "dgrad"):
            return isinstance(module, RowParallelLinear)
        return is_column

    # ---- changing

    def _debugged(
        self, name: str, module: nn.Module, product: Fp8Product, block: ConfigBlock
    ) -> DebuggedFp8Product:
        """The products of a layer that computes in FP8, with what its block changes in them."""
        disabled = set()
        for feature in ("DisableQuantizationGEMM", "FakeQuant"):
            disabled.update(entry["gemm"] for entry in block.entries(feature))
        if "DisableQuantizationLayer" in block.features:
            disabled = set(GEMMS)
        per_tensor = {}
        for entry in block.entries("PerTensorScaling"):
            per_tensor[entry["gemm"], entry["tensor"]] = entry.get("margin", 0)

        def on_cast(tensor_name: str, cast: Cast) -> None:
            group, counts = self._group_of(module, tensor_name, at_product=True)
            self._api.inspect_cast(
                name,
                tensor_name=tensor_name,
                cast=cast,
                iteration=self._iteration,
                group=group,
                counts=counts,
            )

        plain = self._modified(name, PLAIN_PRODUCT, None, _modifies(block))
        is_told = any(feature in block.features for feature in ("LogFp8TensorStats", "DumpTensors"))
        told = on_cast if is_told else None
        return DebuggedFp8Product(product, disabled, per_tensor, told, plain)

    def _modified(
        self,
        name: str,
        product: MatrixProduct,
        look: Callable[[torch.Tensor], None] | None,
        changes: bool,
    ) -> MatrixProduct:
        """The products of a layer, each with what features do to it.

        Args:
            name: The name of the layer.
            product: The product that the layer had.
            look: Is told of the gradient of the weight: that of this product alone, of a weight
                that an embedding uses, too.
            changes: Whether features may change operands.
        """

        def change(gemm: str, tensor_name: str, tensor: torch.Tensor) -> torch.Tensor:
            if not changes:
                return tensor
            return self._api.modify_tensor(
                name,
                gemm=gemm,
                tensor_name=tensor_name,
                tensor=tensor,
                iteration=self._iteration,
            )

        def forward(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
        ) -> torch.Tensor:
            own_x = change("fprop", "activation", x)
            found = product.forward(own_x, change("fprop", "weight", weight), bias)
            return change("fprop", "output", found)

        def grad_input(grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            own_grad = change("dgrad", "gradient", grad)
            found = product.grad_input(own_grad, change("dgrad", "weight", weight))
            return change("dgrad", "dgrad", found)

        def grad_weight(grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
            own_grad = change("wgrad", "gradient", grad_rows)
            found = product.grad_weight(own_grad, change("wgrad", "activation", x_rows))
            found = change("wgrad", "wgrad", found)
            if look is not None:
                look(found)
            return found

        return replace(product, forward=forward, grad_input=grad_input, grad_weight=grad_weight)


class StatisticsLog(BaseLogger):
    """The file of one rank.

    Args:
        log_dir: The folder of all ranks.
        rank: Global rank.
        appends: Whether to append to the file; else it starts empty.
    """

    def __init__(self, log_dir: Path, rank: int, appends: bool) -> None:
        folder = log_dir / STATISTICS
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"nvdlfw_inspect_globalrank-{rank}.log"
        # lines are written at once, so that a run that is killed leaves them
        self._file = path.open("a" if appends else "w", buffering=1)

    def log_scalar(self, name: str, value: float, iteration: int, **_: Any) -> None:
        """Write one statistic."""
        self._file.write(
            f"{name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={float(value):.12g}\n"
        )

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_statistics(log_dir: Path, rank: int) -> dict[tuple[str, int], float]:
    """{(name such as "blocks.0.mlp.up_weight_std", iteration): value} of one rank's file."""
    path = log_dir / STATISTICS / f"nvdlfw_inspect_globalrank-{rank}.log"
    found = {}
    for line in path.read_text().splitlines():
        name, iteration, value = line.split()
        step = int(iteration.removeprefix("iteration="))
        # a step that was done twice, before a kill and after the resume, counts as it was done last
        found[name, step] = float(value.removeprefix("value="))
    return found


def _linear_layers(model: ParallelModel) -> dict[str, Any]:
    modules = model.module.named_modules()
    return {name: module for name, module in modules if isinstance(module, LINEAR)}


def _initialize(
    chosen: Mapping[str, ConfigBlock],
    log_dir: Path,
    log: StatisticsLog,
    feature_dir: Path | None,
    first_step: int,
) -> None:
    """Start nvdlfw_inspect with a config that has been checked.

    Which layer has which block is decided already (`debug_config.choose`) and put into its cache:
    its own way raises for every layer that exact names do not name, and for a head without a
    number.
    """
    own = [] if feature_dir is None else [str(feature_dir)]
    blocks = {}
    for block in chosen.values():
        features = dict(block.features)
        blocks[block.name] = {
            "enabled": True,
            # never asked: the cache that is filled below knows each layer
            "layers": {"layer_types": ["all"]},
            NAMESPACE: features,
        }
    try:
        debug_api.initialize(
            config_file=blocks,  # type: ignore[arg-type]
            feature_dirs=[str(FEATURE_DIR), *own],
            statistics_logger=log,
            log_dir=str(log_dir),
            init_training_step=first_step,
        )
    except SystemExit:
        raise ValueError(
            f"a file in {feature_dir} cannot be run: the reason is in {log_dir}/nvdlfw_inspect_logs"
        ) from None
    for layer, block in chosen.items():
        ConfigManager.layer_name_to_config_cache[layer] = {NAMESPACE: dict(block.features)}


def _check_same(files: Sequence[Sequence[ConfigBlock]], config: Path) -> None:
    """Check that all ranks have read the same blocks.

    Where they choose other layers on one rank, the others wait forever for its statistics. Where
    they change other layers, that rank computes something else, and no error says so.

    Args:
        files: The blocks of each rank.
        config: Config, for the message.
    """
    # without the line: a comment more in one of the files changes nothing
    first = [replace(block, line=0) for block in files[0]]
    for rank, blocks in enumerate(files):
        if [replace(block, line=0) for block in blocks] != first:
            raise ValueError(
                f"{config} of rank {rank} is another than that of rank 0: "
                "give every rank the same file"
            )


def _check_fp8(model: ParallelModel, chosen: Mapping[str, ConfigBlock], config: Path) -> None:
    """Check that features for FP8 find layers that compute in it, by a recipe that they know."""
    recipe = None
    for module in _linear_layers(model).values():
        product = getattr(module, "product", None)
        if isinstance(product, Fp8Product):
            recipe = recipe_name(product.scalings["input"].recipe)
    for block in chosen.values():
        for feature in block.features:
            if recipe is None and _needs_fp8(feature, block):
                raise ValueError(
                    f"{config}, line {block.line}: {feature} is for layers that compute in FP8, "
                    "and none does: use --train.dtype fp8"
                )
        for entry in block.entries("LogFp8TensorStats"):
            for stat in entry["stats"]:
                why = not_of_recipe(stat, recipe) if recipe else None
                if why:
                    raise ValueError(
                        f"{config}, line {block.line}: {stat} in a run of {recipe}: {why}"
                    )


def _needs_fp8(feature: str, block: ConfigBlock) -> bool:
    if feature not in FEATURES:
        return False
    if feature == "DumpTensors":
        return any(entry.get("quantized_tensor") for entry in block.entries(feature))
    return FEATURES[feature].in_fp8


def _concerns_products(block: ConfigBlock) -> bool:
    """Whether a block looks at what an FP8 layer computes with, or changes it."""
    return "FakeQuant" in block.features or any(_needs_fp8(name, block) for name in block.features)


def _inspected(block: ConfigBlock) -> set[str]:
    """The tensors that a block's features look at; those of the user's own see all of them."""
    tensors: set[str] = set()
    for name in block.features:
        if name not in FEATURES:
            tensors.update(TENSORS)
        elif name == "LogTensorStats":
            tensors.update(entry["tensor"] for entry in block.entries(name))
        elif name == "DumpTensors":
            for entry in block.entries(name):
                if entry.get("high_precision_tensor"):
                    tensors.add(entry["tensor"])
    return tensors


def _is_due(feature: str, block: ConfigBlock, iteration: int) -> bool:
    """Whether a feature looks at tensors in a step; those of the user's own decide themselves."""
    if feature not in FEATURES:
        return True
    return any(is_due(entry, iteration) for entry in block.entries(feature))


def _modifies(block: ConfigBlock) -> bool:
    """Whether a feature of a block may change tensors."""
    return any(name == "FakeQuant" or name not in FEATURES for name in block.features)


def forget_handlers() -> None:
    """Close the files of nvdlfw_inspect's loggers, which would write on into the next log."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
            handler.close()
