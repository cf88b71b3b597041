"""Which models fit on which grids: what must divide what, checked before any work begins; no torch."""

from labcode.model_config import GPTConfig, ViTConfig
from labcode.topology import GridShape


def check_layout(
    model: GPTConfig | ViTConfig,
    shape: GridShape,
    sequence_parallel: bool = False,
    context: str = "ring",
    recompute: bool = False,
) -> None:
    """Raise unless every rank of the grid gets its equal part of the model and of the sequence.

    Sizes that are None, to be taken from the data, are passed over: call it again once they are known. The vocabulary is
    the one size that need not be a multiple: its rows are shared out as evenly as they go.

    Args:
        model: The whole model.
        shape: Its grid.
        sequence_parallel: Whether norms and residuals are cut along the sequence over tp.
        context: How attention works over cp, "ring" or "gather".
        recompute: Whether layers run forward again in backward.

    Raises:
        ValueError: One line on what does not fit and what to change.
    """
    if context not in ("ring", "gather"):
        raise ValueError(f"context={context!r}: choose ring or gather")
    if recompute and model.dropout:
        raise ValueError(
            f"model.dropout={model.dropout:g} with pipeline.recompute: the second forward would drop others, switch one off"
        )
    sizes = {"model.num_heads": model.num_heads, "model.ffn_size": model.ffn}
    if isinstance(model, GPTConfig):
        sizes["model.num_kv_heads"] = model.kv_heads
        sequence_name, sequence, pieces = (
            "model.context_length",
            model.context_length,
            2,
        )  # causal: two chunks a rank
        if model.vocab_size is not None and model.vocab_size < shape.tp:
            raise ValueError(
                f"model.vocab_size={model.vocab_size} is smaller than grid.tp={shape.tp}: some rank has no row"
            )
    else:
        known = model.lat is not None and model.lon is not None
        sequence_name, sequence, pieces = (
            "the number of patches",
            model.sequence_length if known else 0,
            1,
        )
    for name, size in sizes.items():
        _divisible(name, size, shape.tp, f"grid.tp={shape.tp}", "change one of them")
    if shape.cp > 1:
        what = f"{pieces}*grid.cp = {pieces}*{shape.cp}" if pieces > 1 else f"grid.cp={shape.cp}"
        _divisible(
            sequence_name, sequence, pieces * shape.cp, what, "every rank of cp takes an equal part"
        )
        if model.dropout and context == "ring":
            raise ValueError(
                f"model.dropout={model.dropout:g} with grid.cp={shape.cp}: ring attention has no dropout, "
                "set it to 0 or use --train.context gather"
            )
    if sequence_parallel:
        what = f"cp*tp = {shape.cp}*{shape.tp}"
        _divisible(
            sequence_name,
            sequence,
            shape.cp * shape.tp,
            what,
            "change one of them or turn train.sequence_parallel off",
        )


def _divisible(name, size, parts, what, remedy):
    if size % parts:
        raise ValueError(f"{name}={size} is not divisible by {what}: {remedy}")
