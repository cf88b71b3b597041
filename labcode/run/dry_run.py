"""One rank of a job of any size, on this machine and without any memory: the real code, dry.

    python -m labcode.run.dry_run 1024 gpt_10m --model.num_layers 96 --model.num_heads 96 \\
        --model.hidden_size 12288 --parallel.tp 8 --parallel.pp 16 --parallel.sequence_parallel \\
        --train.global_batch 512 --train.micro_batch 1

The process group is PyTorch's fake one, which has as many ranks as one likes and sends nothing; the
tensors are fake ones, which have shapes and no numbers. What `models.parallelize` and a step of
1F1B then do is what they do on the cluster: the weights that the rank has, the collectives that it
starts, what it keeps for backward. Beside each stands what `perf.one_rank` says.

Not run are the average of gradients over dp, cp and ZeRO, whose code looks at numbers.
"""

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from labcode.config import GPTConfig, ParallelConfig
from labcode.perf.of_config import SHIPPED_TOKENS
from labcode.perf.one_rank import Calls, rank_activation_bytes, rank_calls, rank_parameters
from labcode.runtime.arguments import UsageError
from labcode.runtime.combinations import Resolved
from labcode.runtime.command import parse
from labcode.runtime.units import binary_bytes, plural, seconds
from labcode.topology import GridShape


@dataclass(frozen=True)
class DryRun:
    """What one rank did.

    Args:
        parameters: Weights that it has.
        calls: {(kind, bytes of the whole tensor, ranks): how often} in one step.
        activation_bytes: The most that it kept for backward.
        seconds: How long the dry run took.
    """

    parameters: int
    calls: Calls
    activation_bytes: int
    seconds: float


def dry_run(
    model: GPTConfig,
    shape: GridShape,
    rank: int,
    *,
    micro_batch: int,
    num_micro_batches: int,
    sequence_parallel: bool,
) -> DryRun:
    """Run one rank's step; the process has no process group before and none after.

    Args:
        model: Config of the model, with a vocabulary.
        shape: The grid, without cp.
        rank: Which rank of it.
        micro_batch: Samples at once.
        num_micro_batches: How many of them.
        sequence_parallel: As in ParallelConfig.

    Held by: tests/ranks/test_dry_run.py
    """
    # all of it imports torch, for which a typing mistake need not wait
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from labcode.comm.counting import counted
    from labcode.comm.grid import Grid
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.perf.saved_bytes import saved_bytes
    from labcode.runtime import bootstrap

    started = time.perf_counter()
    bootstrap.pretend(rank, shape.world_size)
    try:
        grid = Grid.create(shape)
        parallel = ParallelConfig(
            dp=shape.dp,
            pp=shape.pp,
            tp=shape.tp,
            order=shape.order,
            sequence_parallel=sequence_parallel,
        )
        with FakeTensorMode():
            part = parallelize(GPT(model), grid, parallel, trains_alone=True)
            tokens = torch.zeros(micro_batch, model.context_length, dtype=torch.long)
            peak = 0
            with saved_bytes(part) as saved, counted() as calls:

                def look(*_: object) -> None:
                    nonlocal peak
                    peak = max(peak, saved.total())

                part.on_action = look
                loss = part.loss

                def loss_and_look(*inputs: torch.Tensor) -> torch.Tensor:
                    found = loss(*inputs)
                    look()
                    return found

                if shape.pp == 1:
                    part.loss = partial(loss_and_look)
                part.forward_backward([(tokens, tokens)] * num_micro_batches)
        parameters = sum(weight.numel() for weight in part.parameters())
    finally:
        bootstrap.stop()
    return DryRun(parameters, Counter(calls), peak, time.perf_counter() - started)


def _resolved(words: Sequence[str]) -> tuple[Resolved, GPTConfig]:
    if not words or not words[0].isdigit():
        raise UsageError("give the number of ranks and a recipe: 1024 gpt_10m --parallel.tp 8")
    config = parse(words[1:])
    model = config.model
    if not isinstance(model, GPTConfig):
        raise UsageError(f"{words[1]}: the dry run knows a GPT only")
    if model.vocab_size is None:
        bpe = getattr(config.data, "tokenizer", "") == "bpe"
        size = getattr(config.data, "bpe_vocab_size", None) if bpe else SHIPPED_TOKENS
        model = replace(model, vocab_size=size)
    shape = config.parallel.shape(int(words[0]))
    if shape.cp > 1 or config.parallel.zero_stage or model.num_experts:
        raise UsageError("the dry run has no cp and no ZeRO, and no experts: leave them out")
    return Resolved(config, shape), model


def main(words: Sequence[str]) -> int:
    """Dry-run the first rank of each stage that differs, and compare it with the formulas.

    Args:
        words: The number of ranks, then as after `python -m labcode.train`.
    """
    if "--help" in words:
        print(__doc__)
        return 0
    try:
        resolved, model = _resolved(words)
        micro_batches = resolved.accumulation
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    shape = resolved.shape
    options = {
        "micro_batch": resolved.micro_batch,
        "num_micro_batches": micro_batches,
        "sequence_parallel": resolved.config.parallel.sequence_parallel,
    }
    print(f"{shape}: {plural(shape.world_size, 'rank')}, {plural(micro_batches, 'micro-batch')}")
    agrees = True
    for stage in sorted({0, shape.pp // 2, shape.pp - 1}):
        found = dry_run(model, shape, shape.rank(pp=stage), **options)
        parameters = rank_parameters(model, shape, stage)
        calls = rank_calls(model, shape, stage, **options)
        activations = rank_activation_bytes(model, shape, stage, **options)
        agrees &= (parameters, calls) == (found.parameters, found.calls)
        print(f"\nstage {stage}, in {seconds(found.seconds)}; in brackets the formula")
        print(f"  parameters   {found.parameters:,} ({parameters:,})")
        kept = binary_bytes(found.activation_bytes)
        print(f"  activations  {kept} ({binary_bytes(activations)})")
        for (kind, num_bytes, ranks), number in sorted(found.calls.items()):
            expected = calls[kind, num_bytes, ranks]
            size = binary_bytes(num_bytes)
            print(f"  {number:6} ({expected}) x {kind} of {size} over {ranks} ranks")
    verdict = "agree" if agrees else "do not agree"
    print(f"\nparameters and communication of code and formula {verdict}")
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
