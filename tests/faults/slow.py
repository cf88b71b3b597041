"""`python -m tests.faults.slow ARGS`: a training with time for a signal in each of its steps."""

import sys
import time
from typing import Any

import torch

STEP_S = 0.4


def main() -> int:
    """Train with a pause before each update."""
    original = torch.optim.AdamW.step

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(STEP_S)
        return original(self, *args, **options)

    torch.optim.AdamW.step = slow  # pyright: ignore
    from labcode.train.__main__ import main as train

    return train(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
