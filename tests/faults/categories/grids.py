"""Random grids, models and schedules on 1, 2 and 4 ranks."""

import random

from ..cases import EITHER, Case

RANKS = (1, 1, 2, 2, 2, 4)


def cases(rng: random.Random) -> list[Case]:
    return [_case(rng) for _ in range(120)]


def _case(rng: random.Random) -> Case:
    ranks = rng.choice(RANKS)
    heads = rng.choice([1, 2, 4])
    fields = {
        "parallel.pp": rng.choice([1, 1, 2, 3]),
        "parallel.cp": rng.choice([1, 1, 1, 2]),
        "parallel.tp": rng.choice([1, 1, 2, 4]),
        "parallel.order": "-".join(rng.sample(["tp", "cp", "dp", "pp"], 4)),
        "parallel.data_parallel": rng.choice(["ddp", "labcode"]),
        "parallel.context_attention": rng.choice(["ring", "all_gather"]),
        "parallel.pipeline_schedule": rng.choice(["gpipe", "1f1b", "interleaved", "zero_bubble"]),
        "parallel.stages_per_rank": rng.choice([1, 1, 1, 2]),
        "parallel.activation_checkpointing": rng.choice(["none", "selective", "full"]),
        "parallel.sequence_parallel": rng.choice(["true", "false"]),
        "parallel.bucket_mb": rng.choice([0.0001, 0.01, 25]),
        "model.num_layers": rng.choice([1, 2, 3, 4]),
        "model.num_heads": heads,
        "model.hidden_size": heads * rng.choice([3, 4, 8]),
        "model.context_length": rng.choice([1, 2, 7, 8, 16]),
        "model.positions": rng.choice(["learned", "rotary"]),
        "model.dropout": rng.choice([0, 0, 0.1]),
        "train.global_batch": rng.choice([1, 2, 4, 6, 8]),
        "train.micro_batch": rng.choice([1, 1, 2, "None"]),
        "train.dtype": rng.choice(["float32", "float64", "bfloat16", "float16"]),
        "train.out": "out",
    }
    words = [f"--{name}={value}" for name, value in fields.items()]
    shape = [f"{axis} {fields[f'parallel.{axis}']}" for axis in ("pp", "cp", "tp")]
    return Case(f"{ranks} ranks, {', '.join(shape)}", words, answer=EITHER, ranks=ranks)
