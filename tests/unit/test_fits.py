"""Does it fit? Held to what people report of their own GPUs.

Each report: who, the model, how many of which GPU, how long sequences are, and how it ended.
"""

import pytest

from labcode.perf.find_model import NamedModel, find_model, from_numbers
from labcode.perf.fits import Found, answer, gpu_memory, search
from labcode.perf.settings import STATES, Settings
from labcode.perf.transformer import Transformer

BAICHUAN_13B = ({"layers": 40, "hidden": 5120, "heads": 40, "ffn": 13696}, 125696)
DEEPSEEK_33B = ({"layers": 62, "hidden": 7168, "heads": 56, "kv_heads": 8, "ffn": 19200}, 32256)
OPT_1B = ({"layers": 24, "hidden": 2048, "heads": 32, "ffn": 8192}, 50272)


def shape(model, tokens: int) -> Transformer:
    if isinstance(model, str):
        return find_model(model, sequence_length=tokens).shape
    numbers, vocab = model
    like = "opt" if model is OPT_1B else "llama"
    return from_numbers(numbers, like=like, vocab_size=vocab, sequence_length=tokens).shape


def looked_up(model, gpus: int, gpu: str, tokens: int, state: str = "mixed") -> Found:
    settings = Settings(1, **STATES[state])
    return search(shape(model, tokens), gpus, gpu_memory(gpu).bytes, settings)


# (source, model, GPUs, kind, tokens)
RAN_OUT = [
    ("stanford_alpaca#46: 4 x A10, batch 1", "llama2-7b", 4, "24gb", 512),
    ("stanford_alpaca#56: one A100 80 GB", "llama2-7b", 1, "a100-80gb", 512),
    ("stanford_alpaca#173: 2 x RTX 4090", "llama2-7b", 2, "24gb", 512),
    ("FastChat#2322: 16 x A10, 70B", "llama2-70b", 16, "24gb", 512),
    ("LLaMA2-Accessory#26: 2 x A800 80 GB, 13B", "llama2-13b", 2, "a100-80gb", 512),
    ("DeepSpeed#3208: 1.3B on one GPU of 14.6 GiB", OPT_1B, 1, "v100-16gb", 512),
    ("blog#2245: 70B with AdamW takes 16 x 80 GB", "llama3-70b", 8, "h100-80gb", 2048),
]
RAN = [
    ("stanford_alpaca#56: two A100 80 GB worked", "llama2-7b", 2, "a100-80gb", 512),
    ("llama-cookbook#100: 4 x A100 40 GB, 29 GB reserved", "llama2-7b", 4, "a100-40gb", 512),
    ("llama-cookbook#25: 13B, 8 x A100 80 GB", "llama2-13b", 8, "a100-80gb", 2048),
    ("LlamaFactory#1158: ZeRO-3 on 4 x A800 80 GB", BAICHUAN_13B, 4, "a100-80gb", 1536),
]
# who ran out of memory although the sum just fits; the limit of nine tenths comes from these three
ON_THE_EDGE = [
    ("LlamaFactory#1158: ZeRO-3 on 8 x A100 40 GB", BAICHUAN_13B, 8, "a100-40gb", 3),
    ("LlamaFactory#1158: ZeRO-2 on 4 x A800 80 GB", BAICHUAN_13B, 4, "a100-80gb", 2),
    ("DeepSeek-Coder#78: ZeRO-3 on 8 x A800 80 GB", DEEPSEEK_33B, 8, "a100-80gb", 3),
]


@pytest.mark.parametrize(("source", "model", "gpus", "gpu", "tokens"), RAN_OUT)
def test_who_ran_out_of_memory_is_told_so(source, model, gpus, gpu, tokens):
    assert looked_up(model, gpus, gpu, tokens).best is None
    told = answer(NamedModel("it", shape(model, tokens)), gpus, gpu_memory(gpu))
    assert "It does not fit: " in told
    assert "makes it fit:" in told


@pytest.mark.parametrize(("source", "model", "gpus", "gpu", "tokens"), RAN)
@pytest.mark.parametrize("state", ["mixed", "fsdp"])
def test_who_trained_is_told_how(source, model, gpus, gpu, tokens, state):
    best = looked_up(model, gpus, gpu, tokens, state).best
    assert best is not None and not best.tight
    told = answer(NamedModel("it", shape(model, tokens)), gpus, gpu_memory(gpu), state=state)
    assert "It fits with " in told


@pytest.mark.parametrize(("source", "model", "gpus", "gpu", "zero_stage"), ON_THE_EDGE)
def test_what_just_fits_is_not_promised(source, model, gpus, gpu, zero_stage):
    fitting = looked_up(model, gpus, gpu, 2048).stages[zero_stage]
    assert all(each.tight for each in fitting)


def test_the_answer_is_in_words():
    told = answer(find_model("llama2-7b", sequence_length=2048), 8, gpu_memory("A100 40GB"))
    lines = told.splitlines()
    assert lines[0] == "llama2-7b: 6.74 billion weights, sequences of 2,048 tokens"
    assert "on 8 x a100-40gb, 39.4 GiB each: 16 bytes a weight (2 of its own, 2 of its" in lines[1]
    assert lines[3].startswith("It fits with ZeRO-3 (FSDP), without activation checkpointing, mic")
    assert "  DDP (nothing is sharded): does not fit, " in told
    assert "  ZeRO-3 or FSDP (weights too): fits, micro-batch 1 without activation " in told
    assert "Not counted: 8-bit optimizers, offloading to the CPU, inference" in told


def test_a_cure_is_one():
    """Each is tried: what is named as more GPUs, shorter sequences or a larger GPU has room."""
    model = find_model("llama2-7b")
    told = answer(model, 2, gpu_memory("a100-40gb"))
    cures = [line for line in told.splitlines() if "--gpus " in line and line.startswith("  ")]
    gpus = int(cures[0].rpartition("--gpus ")[2])
    assert "It fits" in answer(model, gpus, gpu_memory("a100-40gb"))
    assert "It fits" in answer(model, 2, gpu_memory("a100-40gb"), state="bf16") or (
        "--state bf16" not in told
    )
    larger = told.partition("--gpu ")[2].split()[0]
    assert "It fits" in answer(model, 2, gpu_memory(larger))


def test_long_sequences_are_cut_over_ranks():
    found = looked_up("llama2-7b", 8, "a100-80gb", 131072)
    assert not any(found.stages.values())
    assert found.best is not None
    shape = found.best.one.shape
    assert shape.tp * shape.cp > 1
    assert "parallelism over " in answer(
        find_model("llama2-7b", sequence_length=131072), 8, gpu_memory("a100-80gb")
    )


def test_experts_are_divided_before_layers_are_cut():
    found = looked_up("mixtral-8x7b", 16, "a100-80gb", 32768)
    assert found.best is not None
    shape = found.best.one.shape
    assert shape.ep > 1
    told = answer(find_model("mixtral-8x7b", sequence_length=32768), 16, gpu_memory("a100-80gb"))
    assert f"expert parallelism over {shape.ep} GPUs" in told


def test_more_memory_or_more_gpus_never_make_it_worse():
    for state in STATES:
        fits = [
            looked_up("llama2-13b", gpus, gpu, 2048, state).best is not None
            for gpus, gpu in ((4, "a100-40gb"), (8, "a100-40gb"), (8, "a100-80gb"), (16, "h200"))
        ]
        assert fits == sorted(fits)


@pytest.mark.parametrize(
    ("name", "title", "gib"),
    [
        ("a100-40gb", "a100-40gb", 39.4),
        ("A100 40GB", "a100-40gb", 39.4),
        ("NVIDIA_H200", "h200", 139.8),
        ("24gb", "24 GB GPU", 23.6),
        ("48 GB", "48 GB GPU", 47.3),
    ],
)
def test_a_gpu_is_named_or_has_a_memory(name, title, gib):
    found = gpu_memory(name)
    assert found.title == title
    assert found.bytes / 2**30 == pytest.approx(gib, abs=0.05)


def test_what_is_no_gpu_is_one_line():
    with pytest.raises(ValueError, match=r"unknown GPU 'a100': did you mean a100-.* such as 24gb"):
        gpu_memory("a100")
    with pytest.raises(ValueError, match="--gpus 0: give 1 to 65,536"):
        looked_up("llama2-7b", 0, "24gb", 512)
