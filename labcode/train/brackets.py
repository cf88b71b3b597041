"""A task whose answers a line of code can check: close all brackets that are open.

    prompt  ( [ { ( [      right answer  ] ) } ] ) .

The reward is 1 for the right answer and 0 for every other one. Two thirds of the tokens of a wrong
answer may be right: nothing tells the model which.
"""

import torch
import torch.nn.functional as F

from labcode.models.gpt import GPT

TOKENS = "([{)]}."
NUM_KINDS = 3
END = 6
VOCAB_SIZE = len(TOKENS)


def draw_prompts(num: int, depth: int, generator: torch.Generator) -> torch.Tensor:
    """Opening brackets, [num, depth] int64."""
    return torch.randint(NUM_KINDS, (num, depth), generator=generator)


def answers(prompts: torch.Tensor) -> torch.Tensor:
    """The right answers, [B, depth + 1] int64: the closing brackets backwards, and the end."""
    end = prompts.new_full((len(prompts), 1), END)
    return torch.cat((prompts.flip(1) + NUM_KINDS, end), dim=1)


def rewards(prompts: torch.Tensor, answered: torch.Tensor) -> torch.Tensor:
    """1.0 where [B, depth + 1] new tokens are the right answer, else 0.0: [B]."""
    return (answered == answers(prompts)).all(dim=1).double()


def text(tokens: torch.Tensor) -> str:
    """[S] as people read it."""
    return "".join(TOKENS[token] for token in tokens.tolist())


def supervised_start(
    model: GPT, steps: int, depth: int, generator: torch.Generator, learning_rate: float = 3e-3
) -> None:
    """Train on right answers for a few steps, so that some answers of the model are right.

    Where none is, every reward of a group is 0 and GRPO has nothing to learn from. Measured with a
    GPT of 2 layers and 32 features, depth 6, 16 prompts of 16 answers, AdamW at 1e-3 and five
    seeds, as the mean reward of steps 0 to 9 and of steps 50 to 59 of GRPO:

        after 120 steps    .82 .63 .65 .88 .23   ->   .91 .93 .89 .97 .76
        after 90 steps     .34 .48 .28 .35 .12   ->   .79 .84 .76 .84 .13
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(steps):
        prompts = draw_prompts(64, depth, generator)
        tokens = torch.cat((prompts, answers(prompts)), dim=1)
        logits = model(tokens[:, :-1])[:, depth - 1 :]  # of the answer alone
        F.cross_entropy(logits.flatten(0, 1), tokens[:, depth:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
