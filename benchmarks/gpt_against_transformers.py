"""Time of one training step of our GPT against the same GPT-2 of `transformers`.

    python benchmarks/gpt_against_transformers.py \\
        [--rounds 25] [--threads 1] [--only gpt_tiny] [--out FILE.json]

A step is forward, backward and AdamW. All contestants start from the same weights, see the same
tokens and take turns in one process, in changing order, so that whatever else the machine does hits
them alike. The ratio is the median over the rounds of (ours / theirs in that round). Before
anything is timed, their losses over three optimizer steps must agree: it is the same work. On a
machine with CUDA the same runs there, under bf16 autocast.
"""

import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from side_by_side import options, outer_quartiles, taking_turns, write
from torch import nn

from labcode import recipes
from labcode.config import GPTConfig
from labcode.models import hub
from labcode.models.gpt import GPT, loss
from labcode.runtime.hardware import usable_cores

RESULTS = Path(__file__).parent / "results"
# Work per contestant and round: short turns meet the same neighbours, shorter ones the clock.
TARGET_S = 0.3


def setups() -> dict[str, tuple[GPTConfig, int]]:
    """{name: (model, batch)}: the models of the recipes, with learned positions.

    GPT-2 has no others.
    """
    vocab_sizes = {"gpt_tiny": 84, "gpt_10m": 8192}  # of the recipes' tokenizers, within a token
    found = {}
    for name, vocab_size in vocab_sizes.items():
        changes = {"model.vocab_size": vocab_size, "model.positions": "learned"}
        recipe = recipes.with_changes(recipes.get(name), changes)
        found[name] = (recipe.model, recipe.train.micro_batch or recipe.train.global_batch)
    return found


def gpt2(config: GPTConfig, activation: str) -> transformers.GPT2LMHeadModel:
    """A randomly initialised GPT2LMHeadModel of the shape of `config`."""
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=config.vocab_size,
            n_positions=config.context_length,
            n_embd=config.hidden_size,
            n_layer=config.num_layers,
            n_head=config.num_heads,
            n_inner=config.ffn,
            activation_function=activation,
            resid_pdrop=config.dropout,
            embd_pdrop=config.dropout,
            attn_pdrop=config.dropout,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


class Contestant:
    """A model with its optimizer; `forward` maps tokens to logits."""

    def __init__(
        self,
        model: nn.Module,
        forward: Callable[[nn.Module, torch.Tensor], torch.Tensor],
        device: str,
    ) -> None:
        self.model = model.to(device).train()
        self.forward, self.device = forward, device
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, weight_decay=0.1, fused=True
        )

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """One training step on the batch; returns the loss before it."""
        with torch.autocast("cuda", torch.bfloat16) if self.device == "cuda" else nullcontext():
            value = loss(self.forward(self.model, tokens), targets)
        value.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value.detach()

    def seconds(self, tokens: torch.Tensor, targets: torch.Tensor, steps: int) -> float:
        """Mean time of a step over `steps` of them."""
        start = self._now()
        for _ in range(steps):
            self.step(tokens, targets)
        return (self._now() - start) / steps

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def contestants(config: GPTConfig, device: str) -> dict[str, Contestant]:
    """Ours; GPT-2 as it comes; GPT-2 with a fused GELU.

    The fused one is PyTorch's single kernel in place of the six operations of `gelu_new`.
    """
    as_it_comes, one_kernel = gpt2(config, "gelu_new"), gpt2(config, "gelu_pytorch_tanh")
    ours = hub.load(GPT(config), as_it_comes.state_dict())
    return {
        "labcode": Contestant(ours, lambda model, tokens: model(tokens), device),
        "transformers": Contestant(
            as_it_comes, lambda model, tokens: model(tokens, use_cache=False).logits, device
        ),
        "transformers, fused GELU": Contestant(
            one_kernel, lambda model, tokens: model(tokens, use_cache=False).logits, device
        ),
    }


def compare(name: str, config: GPTConfig, batch: int, rounds: int, device: str) -> dict[str, Any]:
    """Runs one setup and returns its record."""
    field = contestants(config, device)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(
        config.vocab_size, (batch, config.context_length + 1), generator=generator
    ).to(device)
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    losses = {}
    for who, contestant in field.items():
        losses[who] = [contestant.step(tokens, targets).item() for _ in range(3)]
    for who in field:
        torch.testing.assert_close(
            losses[who], losses["labcode"], rtol=1e-2 if device == "cuda" else 1e-4, atol=0
        )
    steps = max(1, round(TARGET_S / field["labcode"].seconds(tokens, targets, 2)))
    times = taking_turns(field, rounds, lambda one: one.seconds(tokens, targets, steps))
    rows = {}
    for who, found in times.items():
        ratios = [ours / theirs for ours, theirs in zip(times["labcode"], found)]
        rows[who] = {
            "step_ms": round(statistics.median(found) * 1e3, 3),
            "fastest_ms": round(min(found) * 1e3, 3),
            "ratio": round(statistics.median(ratios), 3),
            "ratio_quartiles": outer_quartiles(ratios),
        }
    return {
        "setup": name,
        "layers": config.num_layers,
        "heads": config.num_heads,
        "hidden": config.hidden_size,
        "context": config.context_length,
        "vocab": config.vocab_size,
        "batch": batch,
        "parameters": config.num_parameters,
        "rounds": rounds,
        "steps_per_round": steps,
        "results": rows,
    }


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on, without saying whose machine it is."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "cores": len(usable_cores()),
        "torch_threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "compute": "bf16 autocast" if device == "cuda" else "float32",
    }


def main() -> None:
    parser = options(__doc__, rounds=25)
    parser.add_argument(
        "--threads", type=int, help="of torch; default: its own choice, the cores of the machine"
    )
    parser.add_argument("--only", choices=setups())
    parser.add_argument(
        "--out", type=Path, help="default: results/gpt_against_transformers_cpu.json or _cuda.json"
    )
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    # else it warns that the vocabulary lacks GPT-2's end-of-text token
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {"machine": machine(device), "setups": []}
    print(", ".join(f"{key} {value}" for key, value in record["machine"].items()), "\n")
    print(
        "| model | implementation | ms per step, median | fastest "
        "| ours / this, median | quartiles |"
    )
    print("|---|---|---:|---:|---:|---:|")
    for name, (config, batch) in setups().items():
        if args.only in (None, name):
            found = compare(name, config, batch, args.rounds, device)
            record["setups"].append(found)
            for who, row in found["results"].items():
                low, high = row["ratio_quartiles"]
                cells = (
                    name,
                    who,
                    f"{row['step_ms']:.1f}",
                    f"{row['fastest_ms']:.1f}",
                    f"{row['ratio']:.3f}",
                )
                print("| " + " | ".join(cells) + f" | {low:.3f} to {high:.3f} |", flush=True)
    out = args.out or RESULTS / f"gpt_against_transformers_{device}.json"
    write(out, record)


if __name__ == "__main__":
    main()
