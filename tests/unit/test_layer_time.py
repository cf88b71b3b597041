"""The roofline of a layer."""

from dataclasses import replace

import pytest

from labcode.perf.cluster import load_gpu
from labcode.perf.layer_time import SUSTAINED, Cut, Work, layer_work, product_s, tile_share
from labcode.perf.transformer import load_model


def test_the_last_wave_of_tiles_may_be_almost_empty():
    # 108 tiles of 256 x 128 for 108 multiprocessors: full
    assert tile_share(256 * 12, 128 * 9, 108) == 1.0
    # one tile more needs a second wave; smaller tiles lose less
    assert tile_share(256 * 109, 128, 108) < 0.95
    assert tile_share(256, 128, 108) < 0.1
    assert tile_share(256, 128, None) == 1.0


def test_a_large_product_is_bound_by_arithmetic_and_a_thin_one_by_memory():
    gpu = load_gpu("a100-80gb")
    rate = gpu.matmul_flops_per_s("bfloat16") * SUSTAINED
    size = 128 * 108
    assert product_s(gpu, "bfloat16", size, size, size) == pytest.approx(
        2 * size**3 / rate, rel=0.02
    )
    thin = product_s(gpu, "bfloat16", 2**24, 8, 8)
    assert thin >= 2 * 2**24 * (8 + 8) / gpu.stream_bytes_per_s


def test_work_waits_for_the_host_only_when_it_is_slower():
    work = Work(product=1.0, attention=0.5, elementwise=0.5, launches=100)
    assert work.waits_s(0.01) == 0
    assert work.waits_s(0.03) == pytest.approx(1.0)
    assert work.plus(work) == work.times(2)


def test_a_host_that_computes_does_the_one_and_then_the_other():
    work = Work(product=1.0, attention=0.5, elementwise=0.5, launches=100)
    assert work.waits_s(0.01, host_computes=True) == pytest.approx(1.0)


def test_a_causal_attention_may_have_a_rate_of_its_own():
    model = load_model("gpt3-175b")
    gpu = load_gpu("a100-80gb")
    shares = {"flash2": 0.5, "flash2_causal": 0.25}
    plain, _ = layer_work(model, replace(gpu, attention_share={"flash2": 0.5}), Cut(1))
    apart, _ = layer_work(model, replace(gpu, attention_share=shares), Cut(1))
    full, _ = layer_work(replace(model, causal=False), replace(gpu, attention_share=shares), Cut(1))
    assert apart.attention == pytest.approx(2 * plain.attention)
    assert full.attention == pytest.approx(2 * plain.attention)


def test_heads_that_are_not_aligned_leave_the_tensor_cores():
    """BigScience measured 150 % of the step time with 108 features a head in place of 144."""
    model = load_model("bloom-176b")
    gpu = load_gpu("a100-80gb")
    cut = Cut(2, tp=4, attention="unfused", dtype="float16")
    aligned, _ = layer_work(model, gpu, cut)
    # 14336 / 64 = 224 is, 14336 / 1792 = 8 is, 14336 / 512 = 28 is not a multiple of 8
    crooked, _ = layer_work(replace(model, num_heads=512, kv_heads=512), gpu, cut)
    assert crooked.attention > 3 * aligned.attention
    assert crooked.product == aligned.product


def test_experts_compute_for_the_tokens_that_they_get():
    """Two of eight experts for each token are the arithmetic of an MLP twice as wide."""
    gpu = load_gpu("a100-80gb")
    mixtral = load_model("mixtral-8x7b")
    dense = replace(mixtral, experts=0, ffn_size=2 * mixtral.ffn)
    many = Cut(8)
    routed, _ = layer_work(mixtral, gpu, many)
    plain, _ = layer_work(dense, gpu, many)
    assert routed.product == pytest.approx(plain.product, rel=0.1)
    assert routed.attention == plain.attention
    assert routed.elementwise > plain.elementwise


def test_what_tp_cuts_and_what_it_leaves_whole():
    model = load_model("llama3-70b")
    gpu = load_gpu("h100-80gb")
    one, _ = layer_work(model, gpu, Cut(1))
    whole, _ = layer_work(model, gpu, Cut(1, tp=8))
    cut, _ = layer_work(model, gpu, Cut(1, tp=8, sequence_parallel=True))
    assert cut.elementwise == pytest.approx(one.elementwise / 8, rel=1e-6)
    assert whole.elementwise > 2 * cut.elementwise
    assert cut.attention == pytest.approx(one.attention / 8)
    with pytest.raises(ValueError, match="attention='torch': choose one of"):
        layer_work(model, gpu, Cut(1, attention="torch"))
