"""The model and the data of the script that exercise 4.4 asks for."""

from torch import nn
from torch.utils.data import TensorDataset

from labcode.config import GPTConfig, TextData
from labcode.data import text
from labcode.models.gpt import GPT
from labcode.models.layers import initialize

NUM_SAMPLES = 96
CONTEXT = 32

_splits = text.load(TextData(), context_length=CONTEXT)
_inputs, _targets = _splits.train[list(range(NUM_SAMPLES))]

# 96 pieces of Shakespeare, 32 characters each: (inputs, targets)
dataset = TensorDataset(_inputs, _targets)

CONFIG = GPTConfig(
    vocab_size=_splits.tokenizer.vocab_size,
    num_layers=1,
    num_heads=2,
    hidden_size=32,
    context_length=CONTEXT,
)


def build_model() -> nn.Module:
    """A small GPT. Its weights are drawn from the process's own random numbers."""
    return initialize(GPT(CONFIG))
