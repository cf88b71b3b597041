"""What adapters and the frozen model beside them take, against modules and against the papers."""

import pytest
import torch

from labcode.config import GPTConfig, LoraConfig
from labcode.models.gpt import GPT
from labcode.models.lora import add_adapters, is_adapter
from labcode.perf.adapters import NF4_BYTES, layer_adapters
from labcode.perf.cli import main
from labcode.perf.find_model import NamedModel, find_model, from_numbers
from labcode.perf.fits import answer, gpu_memory, search
from labcode.perf.settings import STATES, Settings
from labcode.perf.transformer import load_model

GPT_2 = GPTConfig(vocab_size=50, context_length=16, num_layers=3, num_heads=4, hidden_size=32)
LLAMA = GPTConfig(
    vocab_size=50,
    context_length=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    hidden_size=32,
    ffn_size=88,
    positions="rotary",
    norm="rms",
    mlp="swiglu",
    bias=False,
)


@pytest.mark.parametrize("config", [GPT_2, LLAMA])
def test_as_many_weights_as_the_modules_have(config):
    with torch.device("meta"):
        model = add_adapters(GPT(config), LoraConfig(rank=5))
    sizes = [param.numel() for name, param in model.named_parameters() if is_adapter(name)]
    assert config.num_layers * layer_adapters(config, 5) == sum(sizes)


def test_four_bits_and_their_scales():
    """Dettmers et al. 2023, section 3: scales of 0.5 bits become 0.127 bits a weight."""
    bits = 8 * NF4_BYTES
    assert bits == pytest.approx(4 + 0.127, abs=5e-4)


def of_65b(gpus, gpu, **how):
    numbers = {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 22016}
    shape = from_numbers(numbers, like="llama", vocab_size=32000, sequence_length=512).shape
    return search(shape, gpus, gpu_memory(gpu).bytes, Settings(1, **STATES["mixed"], **how))


def test_65b_on_one_gpu_of_48_gb():
    """Dettmers et al. 2023, abstract: from above 780 GB for all weights to one GPU of 48 GB."""
    assert of_65b(1, "48gb", adapter_rank=16, four_bit=True).best is not None
    assert of_65b(1, "48gb", adapter_rank=16).best is None
    # rank 64, which the paper has, is 800 million weights; it pages their state to the CPU
    of_rank_64 = of_65b(1, "48gb", adapter_rank=64, four_bit=True).least_of_all
    assert 48e9 < of_rank_64.needed_bytes < 48e9 + 4 * 800e6
    assert of_65b(1, "48gb").least_of_all.needed_bytes > 780e9


def told(gpu, **how):
    shape = find_model("llama2-7b", sequence_length=512).shape
    return answer(NamedModel("it", shape), 1, gpu_memory(gpu), base=Settings(1, **how))


def test_a_fine_tune_of_7b_on_one_gpu_of_24_gb():
    whole = told("24gb")
    assert "It does not fit: " in whole
    assert "adapters beside the frozen model (LoRA): --lora 16" in whole
    adapted = told("24gb", adapter_rank=16)
    assert "beside frozen weights of 2 bytes (LoRA)" in adapted and "It fits" in adapted
    assert "It does not fit: " in told("12gb", adapter_rank=16)
    assert "(QLoRA): --lora 16 --four-bit" in told("12gb")
    in_four_bits = told("12gb", adapter_rank=16, four_bit=True)
    assert "beside frozen weights of 0.516 bytes (QLoRA)" in in_four_bits
    assert "It does not fit" not in in_four_bits


def test_the_command_asks_for_adapters_beside_four_bits(capsys):
    words = ["fits", "--model", "llama2-7b", "--gpus", "1", "--gpu", "24gb"]
    assert main([*words, "--four-bit"]) == 2
    assert "--four-bit without --lora: 4 bits cannot be trained" in capsys.readouterr().err
    assert main([*words, "--lora", "8", "--sequence-length", "512"]) == 0
    found = capsys.readouterr().out
    assert "adapters of rank 8 (" in found and "a weight that trains" in found


def test_a_mixture_has_no_adapters():
    with pytest.raises(ValueError, match="a mixture of experts"):
        layer_adapters(load_model("mixtral-8x7b"), 8)
