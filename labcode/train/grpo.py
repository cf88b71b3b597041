"""Group relative policy optimisation: learn from rewards, with other answers as the yardstick.

For each prompt the generator draws a group of G answers. An answer is as good as its reward is
above those of its group, so that no second model has to judge:

    advantage_i = (reward_i - mean of the group) / (std of the group)
    ratio_it    = p_learner(token t of answer i) / p_generator(the same)
    loss        = -sum over i, t of  weight_it min(ratio_it A_i, clip(ratio_it, 1-low, 1+high) A_i)

    average     weight of token t of answer i, of N answers with |o_i| tokens of at most T
    "sequence"  1 / (N |o_i|)         GRPO: a token of a long answer counts less
    "token"     1 / sum of all |o_i|  DAPO: all tokens alike
    "constant"  1 / (N T)             Dr. GRPO: the same, whatever the lengths of the batch

Dr. GRPO also leaves out the division by std, which gives prompts that nearly all or nearly no
answer solves more weight than others. DAPO has `clip_high` above `clip_low`, 0.28 and 0.2.

The ratio is 1 before the first update only if both fleets compute alike. Measured after 60 steps on
brackets (a GPT of 2 layers and 32 features, 1024 answers, PyTorch 2.13 on a CPU, 2026-11-30):

    learner    generator    largest |log p - log p'|    ratios            mean |ratio - 1|
    float64    float64      7e-15                       1                 2e-16
    float64    float32      5e-6                        1                 8e-8
    float32    bfloat16     0.32                        0.88 to 1.37      2e-3
    bfloat16   bfloat16     5e-7                        1                 5e-8

So bfloat16 in the generator alone moves 4 of 10,000 tokens out of the clipped range before anything
was learnt from them.

Source: Shao et al. 2024 (arXiv:2402.03300), eq. 3, section 4.1.2 for the advantage; Yu et al. 2025
    (DAPO, arXiv:2503.14476), sections 3.1 and 3.3; Liu et al. 2025 (Dr. GRPO, arXiv:2503.20783),
    section 3; Schulman 2020 (joschu.net/blog/kl-approx.html) for the estimate of KL.
Held by: tests/unit/test_grpo.py, tests/ranks/test_two_fleets.py
"""

from dataclasses import dataclass
from typing import Literal

import torch

from labcode.parallel.model import ParallelModel
from labcode.parallel.tensor import vocab_parallel_cross_entropy
from labcode.train.rollouts import Batch

Average = Literal["sequence", "token", "constant"]


@dataclass(frozen=True)
class GRPO:
    """The loss; the values are those of GRPO, without KL."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    by_std: bool = True
    average: Average = "sequence"
    kl_weight: float = 0.0


def advantages(rewards: torch.Tensor, by_std: bool = True) -> torch.Tensor:
    """How much better each answer is than its group: [.., G] to [.., G]; 0 if all are alike."""
    above = rewards - rewards.mean(-1, keepdim=True)
    if not by_std:
        return above
    return above / (rewards.std(-1, keepdim=True) + 1e-6)


def token_weights(counts: torch.Tensor, average: Average) -> torch.Tensor:
    """The weight of each token in the loss of a whole batch: [B, T] bool to [B, T]."""
    mask = counts.double()
    num_answers, max_tokens = counts.shape
    if average == "sequence":
        return mask / mask.sum(1, keepdim=True) / num_answers
    return mask / (mask.sum() if average == "token" else num_answers * max_tokens)


def policy_loss(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantage: torch.Tensor,
    weights: torch.Tensor,
    options: GRPO,
) -> torch.Tensor:
    """The clipped loss. Args: [B, T], [B, T], [B], [B, T]. Returns a scalar.

    A gradient flows to `log_probs` alone: what the generator and the rewards gave is constant.
    Within the clipped range its gradient is that of `-weight * A * ratio`. Outside, a token whose
    ratio has already moved where its advantage wants it has no gradient any more.
    """
    ratio = (log_probs - old_log_probs.detach()).exp()
    advantage = advantage.detach()
    clipped = ratio.clamp(1 - options.clip_low, 1 + options.clip_high)
    gain = torch.minimum(ratio * advantage[:, None], clipped * advantage[:, None])
    return -(weights * gain).sum()


def token_log_probs(model: ParallelModel, tokens: torch.Tensor, num_new: int) -> torch.Tensor:
    """log p of the last `num_new` tokens, [B, num_new], the same on every rank of tp.

    Communicates: what a forward and `vocab_parallel_cross_entropy` do.
    """
    logits = model(tokens[:, :-1])[:, -num_new:]  # position t gives token t + 1: [B, T, V/tp]
    targets = tokens[:, -num_new:]
    group = model.grid.group("tp")
    return -vocab_parallel_cross_entropy(logits, targets, group, model.config.vocab_size)


def learn(
    model: ParallelModel,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    rewards: torch.Tensor,
    options: GRPO,
    reference: torch.Tensor | None = None,
) -> None:
    """One update from a whole batch; the ranks of dp take neighbouring answers of it.

    Args:
        model, optimizer: What learns.
        batch: The same on every rank of the learner.
        rewards: [prompts, G]; the G answers to a prompt follow each other in the batch.
        options: How.
        reference: [B, T], log-probabilities of the model that KL keeps this one near to.
    """
    advantage = advantages(rewards, options.by_std).flatten()  # [B]
    # Weights of the whole batch, taken apart only then: a mean of each rank's mean over its own
    # tokens would count a token more where its neighbours are short.
    weights = token_weights(batch.counts, options.average)
    dp = model.grid.size("dp")
    weights = weights * dp  # since dp averages gradients
    own = torch.arange(len(batch.tokens)).tensor_split(dp)[model.grid.coord("dp")]
    log_probs = token_log_probs(model, batch.tokens[own], batch.counts.shape[1])
    loss = policy_loss(log_probs, batch.log_probs[own], advantage[own], weights[own], options)
    if reference is not None:
        away = reference[own] - log_probs
        loss = loss + options.kl_weight * (weights[own] * (away.exp() - away - 1)).sum()
    loss.backward()
    model.finish_gradient_sync()
    optimizer.step()
    model.gather_parameters()
    optimizer.zero_grad()
