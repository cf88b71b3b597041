"""Solutions that cells of lesson 12 show and use; `make notebooks` writes this."""

from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models import layers
import torch


config = GPTConfig(
    vocab_size=83, context_length=32, num_layers=6, num_heads=4, hidden_size=64
)
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(83, (5, 8, 2, 33), generator=generator)

# five steps of eight micro-batches of two samples; the target is the next token
batches = []
for step in tokens:
    batches.append([(part[:, :-1], part[:, 1:]) for part in step])

def build():
    """The GPT, the same in every process."""
    return layers.initialize(gpt.GPT(config), 0).double()
