"""`python -m tests.faults.slow ARGS`: a training with time for a signal in each of its steps."""

import sys
import threading
import time
from typing import Any

from labcode.train.__main__ import main as train

STEP_S = 0.4


def main() -> int:
    """Train with a pause before each update."""
    # the program itself imports torch, at the moment that it wants
    threading.Thread(target=_slow_down, daemon=True).start()
    return train(sys.argv[1:])


def _slow_down() -> None:
    while "labcode.train.loop" not in sys.modules:
        time.sleep(0.01)
    import torch

    original = torch.optim.AdamW.step

    def slow(self: Any, *args: Any, **options: Any) -> Any:
        time.sleep(STEP_S)
        return original(self, *args, **options)

    torch.optim.AdamW.step = slow  # pyright: ignore


if __name__ == "__main__":
    sys.exit(main())
