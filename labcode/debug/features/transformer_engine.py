"""Transformer Engine's debug features for labcode's layers; nvdlfw_inspect runs this file.

The calls are those of Transformer Engine, so that a feature of one's own works in both:

    inspect_tensor(config, layer_name, tensor_name=, tensor=, iteration=, group=, counts=)
    inspect_cast(config, layer_name, tensor_name=, cast=, iteration=, group=, counts=)
    modify_tensor(config, layer_name, gemm=, tensor_name=, tensor=, iteration=) -> tensor

Held by: tests/ranks/test_debug.py
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from nvdlfw_inspect.base import BaseNamespaceAPI
from nvdlfw_inspect.logging import MetricLogger, get_logger
from nvdlfw_inspect.registry import Registry, api_method

from labcode.debug.debug_config import FP8_STATISTICS, is_due
from labcode.debug.feature import Feature
from labcode.debug.fp8_debug import Cast, CastErrors
from labcode.debug.moments import Moments, measure
from labcode.precision.formats import E4M3, E5M2, cast, scale_for

FORMATS = {"FP8E4M3": E4M3, "FP8E5M2": E5M2}


class _Statistics(Feature):
    """What is waiting to be written: sums of tensors, by group, layer and tensor."""

    def __init__(self, kind: type[Moments] | type[CastErrors]) -> None:
        self._kind = kind
        # {(group, layer, tensor, how): (sums so far, {name in the file: statistic}, iteration)}
        self._waiting: dict[tuple, tuple[Any, Mapping[str, str], int]] = {}

    def _wait(self, key: tuple, own: Any, names: Mapping[str, str], iteration: int) -> None:
        before = self._waiting[key][0] if key in self._waiting else self._kind()
        self._waiting[key] = (before + own, names, iteration)

    def flush(self) -> None:
        """End a step: put the parts together and write.

        Communicates: for each group an all-gather of 9 float64 numbers for each tensor, of 6 for
            LogFp8TensorStats.
        """
        # emptied first: a step whose messages fail is not written a second time with the next one
        waiting, self._waiting = self._waiting, {}
        groups: list[dist.ProcessGroup | None] = []
        for group, *_ in waiting:
            if group not in groups:
                groups.append(group)
        # in the order of their first tensors, which is the same on all ranks of a stage
        for group in groups:
            entries = {key[1:]: value for key, value in waiting.items() if key[0] is group}
            # by name, so that the row of a tensor does not hang on which hook was the first to run
            names = sorted(entries)
            together = _together([entries[name][0] for name in names], group)
            for key, found in zip(names, together):
                layer, tensor, _ = key
                _, stats, iteration = entries[key]
                for name, stat in stats.items():
                    value = found.statistic(stat)
                    MetricLogger.log_scalar(f"{layer}_{tensor}_{name}", value, iteration)


@Registry.register_feature(namespace="transformer_engine")
class LogTensorStats(_Statistics):
    """Statistics of tensors, over all micro-batches of a step and all ranks of a group."""

    def __init__(self) -> None:
        super().__init__(Moments)

    @api_method
    def inspect_tensor(
        self,
        config: dict,
        layer_name: str,
        *,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int,
        group: dist.ProcessGroup | None = None,
        counts: bool = True,
        **_: Any,
    ) -> None:
        """Add one tensor to what this step logs.

        Args:
            tensor: This rank's part.
            group: The ranks whose parts are put together; None: this rank alone.
            counts: False on a rank that has a copy of what another rank of the group has.
        """
        if is_due(config, iteration):
            own = measure(tensor, config["stats"]) if counts else Moments()
            names = {stat: stat for stat in config["stats"]}
            self._wait((group, layer_name, tensor_name, ""), own, names, iteration)


@Registry.register_feature(namespace="transformer_engine")
class LogFp8TensorStats(_Statistics):
    """What the casts of an FP8 layer lose, over all micro-batches and all ranks of a group."""

    def __init__(self) -> None:
        super().__init__(CastErrors)

    @api_method
    def inspect_cast(
        self,
        config: dict,
        layer_name: str,
        *,
        tensor_name: str,
        cast: Cast,
        iteration: int,
        group: dist.ProcessGroup | None = None,
        counts: bool = True,
        **_: Any,
    ) -> None:
        """Add one cast to what this step logs, once for each recipe that the statistics name.

        Args:
            cast: The cast of this rank's part; for the others see `LogTensorStats`.
        """
        if not is_due(config, iteration):
            return
        by_recipe: dict[tuple[str, bool], dict[str, str]] = {}
        for stat in config["stats"]:
            asked = FP8_STATISTICS[stat]
            by_recipe.setdefault((asked.recipe, asked.columnwise), {})[stat] = asked.name
        for how, names in by_recipe.items():
            own = cast.errors(*how) if counts else CastErrors()
            self._wait((group, layer_name, tensor_name, how), own, names, iteration)


@Registry.register_feature(namespace="transformer_engine")
class DumpTensors(Feature):
    """Tensors of a step in files, those of its last micro-batch, of this rank's part.

    LOG_DIR/tensor_dumps/rank_R/iter_NNNNNN/LAYER_TENSOR.pt, dots in names being `_`, is a dict:

        high_precision  the tensor before its cast
        quantized       its 8-bit numbers; Transformer Engine has an object of its own there
        scale           which they were multiplied by
    """

    def __init__(self) -> None:
        self._waiting: dict[Path, dict[str, torch.Tensor]] = {}

    @api_method
    def inspect_tensor(
        self,
        config: dict,
        layer_name: str,
        *,
        tensor_name: str,
        tensor: torch.Tensor,
        iteration: int,
        **_: Any,
    ) -> None:
        """Keep a tensor until the step ends."""
        if config.get("high_precision_tensor") and is_due(config, iteration):
            self._keep(layer_name, tensor_name, iteration, {"high_precision": tensor})

    @api_method
    def inspect_cast(
        self,
        config: dict,
        layer_name: str,
        *,
        tensor_name: str,
        cast: Cast,
        iteration: int,
        **_: Any,
    ) -> None:
        """Keep its cast until the step ends."""
        if config.get("quantized_tensor") and is_due(config, iteration):
            made = {"quantized": cast.after.rows, "scale": cast.after.scale}
            self._keep(layer_name, tensor_name, iteration, made)

    def _keep(
        self, layer_name: str, tensor_name: str, iteration: int, made: dict[str, torch.Tensor]
    ) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        folder = Path(get_logger().root_log_dir) / "tensor_dumps" / f"rank_{rank}"
        file = f"{layer_name.replace('.', '_')}_{tensor_name}.pt"
        kept = self._waiting.setdefault(folder / f"iter_{iteration:06d}" / file, {})
        for name, tensor in made.items():
            # a copy until the step ends: an activation may be changed in place, and ZeRO takes a
            # weight back
            kept[name] = tensor.detach().clone()

    def flush(self) -> None:
        """End a step: write its files."""
        waiting, self._waiting = self._waiting, {}
        for path, tensors in waiting.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(tensors, path)


@Registry.register_feature(namespace="transformer_engine")
class DisableQuantizationGEMM(Feature):
    """Some products of a layer run without FP8; `debug.on_layers` sees to it."""


@Registry.register_feature(namespace="transformer_engine")
class DisableQuantizationLayer(Feature):
    """All products of a layer run without FP8; `debug.on_layers` sees to it."""


@Registry.register_feature(namespace="transformer_engine")
class PerTensorScaling(Feature):
    """Operands have a scale of their own, of this rank alone; `debug.on_layers` sees to it."""


@Registry.register_feature(namespace="transformer_engine")
class FakeQuant(Feature):
    """A tensor of a product, cast to an 8-bit format and back; its scale is this rank's own.

    The product itself runs without FP8, in a layer of FP8 as well: `debug.on_layers` sees to it.
    """

    @api_method
    def modify_tensor(
        self, config: dict, layer_name: str, *, tensor: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """The tensor as 8 bits would hold it, with the scale of its own amax."""
        to = FORMATS[config["quant_format"]]
        scale = scale_for(tensor.abs().amax(), to)
        # scaled in float32 at least: in bfloat16 the product with the scale would round before the
        # cast
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        return (cast(wide * scale, to) / scale).to(tensor.dtype)


class _Defaults:
    """What a layer without a feature for a call does."""

    def inspect_tensor(self, config: dict, layer_name: str, **_: Any) -> None:
        """Nothing."""

    def inspect_cast(self, config: dict, layer_name: str, **_: Any) -> None:
        """Nothing."""

    def modify_tensor(
        self, config: dict, layer_name: str, *, tensor: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """The tensor as it is."""
        return tensor


@Registry.register_namespace_api(namespace="transformer_engine")
class TransformerEngineApi(BaseNamespaceAPI):
    """Takes a call of a layer to the features that its block of the YAML enables."""

    def __init__(self) -> None:
        super().__init__()
        self._default_api_impl = _Defaults()

    def input_assertions_hook(self, api_name: str, **kwargs: Any) -> None:
        """Nothing to check: `debug.on_layers` makes all calls."""

    def output_assertions_hook(self, api_name: str, ret: Any, **kwargs: Any) -> None:
        """Nothing to check either, as above."""

    def routing_condition(
        self, api_name: str, config: dict, layer_name: str, feature_obj: Any, **kwargs: Any
    ) -> tuple[bool, dict | None]:
        """Whether a feature is for a call."""
        return feature_obj.parse_config_and_api(config, **kwargs)

    def is_multiple_feature_invocation_allowed(self, api_name: str) -> bool:
        """Several features may look at a tensor, one may change it."""
        return api_name in ("inspect_tensor", "inspect_cast")

    def step(self) -> None:
        """End a step."""
        for feature in self.namespace_features.values():
            if hasattr(feature, "flush"):
                feature.flush()


def _together(own: list[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """The sums of each tensor over all ranks of a group, the same to the last bit on each."""
    if group is None or group.size() == 1 or not own:
        return own
    kind = type(own[0])
    # An all-gather and no all-reduce: means and extremes do not add up. Every rank then combines
    # the parts in the order of the ranks, so that all of them get the same bits.
    numbers = torch.tensor([sums.numbers() for sums in own], dtype=torch.float64)
    numbers = numbers.to("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    parts = [torch.empty_like(numbers) for _ in range(group.size())]
    dist.all_gather(parts, numbers, group=group)
    rows = [part.tolist() for part in parts]
    found = []
    for number in range(len(own)):
        total = kind()
        for row in rows:
            total = total + kind(*row[number])
        found.append(total)
    return found
