"""LAMB and LARS of the package pytorch-optimizer, set up as in their papers.

Both move a matrix W by a length in proportion to its own: `lr * |W|` for LAMB,
`lr * trust * |W|` for LARS, whatever the gradient's length is.
"""

from typing import Any

import torch
from pytorch_optimizer import LARS as LARS  # re-exported, beside the one below
from pytorch_optimizer import Lamb

DISPLAYED = ("weight_norm", "adam_norm", "trust_ratio")


class LAMB(Lamb):
    """Adam's update plus decay, rescaled for each matrix to its length.

        r = m / (sqrt(v) + eps) + decay * W          W -= lr * min(|W|, 10) / |r| * r

    Args:
        params: Groups; one with `"adam": True` is not rescaled.
        lr: Learning rate.
        betas: Decay rates of m and v.
        foreach: One kernel for each operation on all weights.

    The package would divide `lr` by 1 - beta1^t, which is Adam's correction of m. Here the length
    of m does not matter any more, since r is rescaled: the correction would only make the first
    step 1 / (1 - beta1) times too long. `adam_debias` leaves it out.

    Source: You et al. 2019 (arXiv:1904.00962), algorithm 2 and section 3.
    Held by: tests/unit/test_optim.py::test_lamb_is_that_of_the_paper
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        foreach: bool,
    ) -> None:
        super().__init__(
            params, lr=lr, betas=betas, weight_decouple=False, foreach=foreach, adam_debias=True
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update. The package stores norms for display in the state; they are removed."""
        loss = super().step(closure)
        for state in self.state.values():
            for key in DISPLAYED:
                state.pop(key, None)
        return loss
