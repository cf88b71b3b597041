"""Published training runs as the arguments of `estimate`: what a model of cost is judged on.

    hardware_data/published_runs.csv    480 runs, each with its source, as their authors state them

h hidden, L layers, a heads, s sequence, V vocabulary, gbs and mbs global and micro-batch in
samples, vp stages on a rank. A run that leaves out what a prediction needs is not read
(`why_left_out`); what the code of a source does, and its table does not say, is in STACKS.
"""

import csv
import functools
from dataclasses import dataclass
from typing import Any

from labcode.perf.cluster import Cluster, load_cluster
from labcode.perf.settings import Settings
from labcode.perf.transformer import HARDWARE_DATA, Transformer
from labcode.topology import GridShape

RUNS = HARDWARE_DATA / "published_runs.csv"
NEEDED = ("h", "L", "a", "s", "V", "gbs", "n_gpus", "gpu")

# What the code of each source does. Megatron-LM and DeepSpeed reduce gradients after the last
# backward; both train with dropout. Megatron's first paper on pipelines introduces scatter/gather.
MEGATRON = {"overlap_data_parallel": False, "dropout": True, "reduced_bytes": 2}
MEGATRON_PIPELINE = MEGATRON | {"scatter_gather": True, "gradient_bytes": 4}
FSDP = {"weight_bytes": 4, "gradient_bytes": 4, "optimizer_bytes": 8}
STACKS: dict[str, dict[str, Any]] = {
    "narayanan21_t1": {"cluster": "selene"} | MEGATRON_PIPELINE,
    "narayanan21_t2": {"cluster": "selene"} | MEGATRON_PIPELINE,
    "megatron_readme_175b": {"cluster": "selene"} | MEGATRON_PIPELINE,
    "korthikanti22_t5": {"cluster": "selene"} | MEGATRON_PIPELINE,
    "mtnlg530": {"cluster": "selene"} | MEGATRON,
    "megatron_tp_2020": MEGATRON,
    "bigscience": {"cluster": "jean-zay-a100", "gradient_bytes": 2} | MEGATRON,
    "vtrain_single": {"cluster": "dgx-a100"} | MEGATRON,
    "mosaic_mpt": FSDP,
    "torchtitan": FSDP | {"reduced_bytes": 4},
    "nanogpt": {"cluster": "dgx-a100", "compiled": True} | FSDP,
    "llmc": {"cluster": "dgx-a100", "compiled": True} | FSDP,
    "build_nanogpt_repro": {"cluster": "dgx-a100", "compiled": True} | FSDP,
}
CLUSTER_OF_GPU = {
    "a100_80gb": "a100-80gb-roce",
    "a100_40gb": "a100-40gb-roce",
    "a100": "dgx-a100",
    "h100_80gb": "dgx-h100",
    "h100_96gb_500W": "grand-teton",
    "h200_141gb": "dgx-h200",
    "v100_32gb": "dgx-1",
}
ATTENTION = {
    "unfused": "unfused",
    "fused-softmax": "unfused",
    "flash": "flash",
    "sdpa-flash": "flash2",
}
CHECKPOINTING = {
    "none": "none",
    "full": "full",
    "selective": "selective",
    "selective(op)": "operators",
}
ZERO = {
    "none": 0,
    "ZeRO-1": 1,
    "ZeRO-3": 3,
    "FSDP-FULL_SHARD": 3,
    "FSDP-SHARD_GRAD_OP": 2,
    "FSDP2(full shard)": 3,
}


@dataclass(frozen=True)
class PublishedRun:
    """A run and what was measured.

    Args:
        source_key: Short name of the source.
        model, shape, cluster, settings: The arguments of `estimate`.
        precision: Precision as the source calls it.
        step_s: Seconds of a step; None: not stated.
        memory_bytes: Bytes on the fullest GPU; None: not stated, or not of a whole process.
        out_of_memory: Whether it did not fit; None: not stated.
        source: Source of the numbers.
    """

    source_key: str
    model: Transformer
    shape: GridShape
    cluster: Cluster
    settings: Settings
    precision: str
    step_s: float | None
    memory_bytes: float | None
    out_of_memory: bool | None
    source: str

    @property
    def stack(self) -> tuple[str, str, str]:
        """(source, GPU, precision): runs that share a calibration."""
        return (self.source_key, self.cluster.gpu.name, self.precision)


def rows() -> list[dict[str, str]]:
    """The table as it is."""
    with RUNS.open(newline="") as file:
        return list(csv.DictReader(file))


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """All runs of which enough is stated."""
    return tuple(_run(row) for row in rows() if why_left_out(row) is None)


def why_left_out(row: dict[str, str]) -> str | None:
    """What a row does not state; None: nothing."""
    if row["source_key"] not in STACKS:
        return "no whole run"
    if row["iter_time_s"] == "" and row["oom"] != "1":
        return "no time"
    for name in NEEDED:
        if row[name] == "":
            return f"no {name}"
    if row["recompute"] not in CHECKPOINTING:
        return f"recompute {row['recompute']}"
    return None


def _dtype(precision: str) -> str:
    for word, dtype in (("fp8", "fp8"), ("float8", "fp8"), ("bf16", "bfloat16"), ("tf32", "tf32")):
        if word in precision:
            return dtype
    return {"fp16": "float16", "fp32": "float32"}[precision]


def _run(row: dict[str, str]) -> PublishedRun:
    stack = dict(STACKS[row["source_key"]])
    named = stack.pop("cluster", None)
    cluster = load_cluster(named or CLUSTER_OF_GPU[row["gpu"]])
    gated = row["gated"] == "1"
    model = Transformer(
        num_layers=int(row["L"]),
        hidden_size=int(row["h"]),
        num_heads=int(row["a"]),
        sequence_length=int(row["s"]),
        outputs=int(row["V"]),
        kv_heads=int(row["kv_heads"] or row["a"]),
        ffn_size=int(row["ffn"]),
        gated=gated,
        tied=row["tied"] == "1",
        learned_positions=not gated,
        biases=not gated,
        dropout=stack.pop("dropout", False),
    )
    shape = GridShape(
        dp=int(row["dp"]), pp=int(row["pp"]), cp=int(row["cp"] or 1), tp=int(row["tp"])
    )
    zero_stage = ZERO[row["zero"]]
    if zero_stage == 0:
        # what plain mixed precision keeps
        stack.setdefault("gradient_bytes", 2)
    if row["precision"].endswith("/PURE"):
        # gradients are summed in 16 bits
        stack |= {"reduced_bytes": 2}
    if row["precision"] == "bf16/PURE":
        # no number is wider than 16 bits
        stack |= {"weight_bytes": 2, "gradient_bytes": 2, "optimizer_bytes": 4}
    if "fp32 grad accum" in row["precision"]:
        stack |= {"gradient_bytes": 6}
    if "compile" in row["notes"]:
        stack |= {"compiled": True}
    micro_batch = int(row["mbs"] or 1)
    if row["source_key"] == "torchtitan" and shape.pp > 1:
        micro_batch = 1  # its mbs is that of all micro-batches; how many is not stated
    settings = Settings(
        global_batch=int(row["gbs"]),
        micro_batch=micro_batch,
        dtype=_dtype(row["precision"]),
        attention=ATTENTION[row["attn"]],
        activation_checkpointing=CHECKPOINTING[row["recompute"]],
        sequence_parallel=row["sp"] == "1",
        stages_per_rank=int(row["vp"] or 1),
        zero_stage=zero_stage,
        **stack,
    )
    return PublishedRun(
        source_key=row["source_key"],
        model=model,
        shape=shape,
        cluster=cluster,
        settings=settings,
        precision=row["precision"],
        step_s=float(row["iter_time_s"]) if row["iter_time_s"] else None,
        memory_bytes=float(row["mem_gb"]) * 2**30 if row["mem_gb"] else None,
        out_of_memory=None if row["oom"] == "" else row["oom"] == "1",
        source=row["source"],
    )
