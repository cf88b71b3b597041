"""Adapters as `peft` has them: the names of their weights, and what adapter_config.json says.

    base_model.model.MODULE.lora_A.weight    [r, in]
    base_model.model.MODULE.lora_B.weight    [out, r]

MODULE is the layer in `transformers`. Where that has several layers for one here, as q, k and v of
a Llama, all of them get the same A, and each its rows of B: the products are the same. GPT-2 keeps
its weights as [in, out], which `fan_in_fan_out` says; A and B are not turned around there.

Source: huggingface.co/docs/peft, "PEFT checkpoint format"; `LoraConfig` in peft's
    tuners/lora/config.py.
Held by: tests/unit/test_hub_adapter.py
"""

from collections.abc import Mapping
from typing import Any

import torch

from labcode.config import GPTConfig, LoraConfig
from labcode.models.hub import GPT2, family_of

PREFIX = "base_model.model."
MODULES = {
    "qkv": "attention.qkv",
    "proj": "attention.proj",
    "up": "mlp.up",
    "down": "mlp.down",
}


def adapter_state_dict(
    config: GPTConfig, adapters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The content of adapter_model.safetensors.

    Args:
        config: The config of the GPT.
        adapters: {name here: A or B, whole}.

    Raises:
        ValueError: The hub has no such model.
    """
    family = family_of(config)
    found = {}
    for ours, pieces in family.pieces(config).items():
        layer = ours.removesuffix(".weight")
        if f"{layer}.lora_a" not in adapters:
            continue
        lora_a = adapters[f"{layer}.lora_a"]
        lora_b = adapters[f"{layer}.lora_b"]
        for piece in pieces:
            rows = lora_b
            if piece.rows is not None:
                rows = lora_b.narrow(0, piece.first, piece.rows)
            module = PREFIX + family.prefix + piece.name.removesuffix(".weight")
            # copies: tensors that share memory cannot be in one safetensors file
            found[f"{module}.lora_A.weight"] = lora_a.clone().contiguous()
            found[f"{module}.lora_B.weight"] = rows.clone().contiguous()
    return found


def adapter_config(config: GPTConfig, lora: LoraConfig, base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json.

    Args:
        config: The config of the GPT.
        lora: Config of its adapters.
        base: Where the model is that was frozen; None: nobody has written it.

    Raises:
        ValueError: The hub has no such model.
    """
    family = family_of(config)
    targets: list[str] = []
    for target in lora.targets:
        targets += family.modules[MODULES[target]]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        # a whole number in peft's own files
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": targets,
        "fan_in_fan_out": family is GPT2,
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
