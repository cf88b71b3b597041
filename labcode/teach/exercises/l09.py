"""Checks of lesson 09, tensor parallelism. The text of each assertion is a hint.

Every answer runs on four ranks, first in two groups of two that read different data, then in one
group of four. The checks themselves are in the files beside this one: the operators f and g, the
linear layers and the MLP made of them, and what is cut along the vocabulary.
"""

from labcode.teach.check import Exercise
from labcode.teach.exercises.l09_linear import column_parallel, row_parallel, swiglu
from labcode.teach.exercises.l09_operators import copy_and_reduce
from labcode.teach.exercises.l09_vocabulary import vocabulary_embedding, vocabulary_loss

__all__ = [
    "EXERCISES",
    "column_parallel",
    "copy_and_reduce",
    "row_parallel",
    "swiglu",
    "vocabulary_embedding",
    "vocabulary_loss",
]

EXERCISES = {
    "9.1": Exercise(
        praise="two mirror images, on any group, and nothing was overwritten",
        hints=(
            "Which of the four methods sum over the ranks, and which hand their tensor on?",
            "`dist.all_reduce` changes the tensor that it is given. Is that tensor yours?",
            "A backward returns one gradient for each argument of forward, so two here.",
        ),
    ),
    "9.2": Exercise(
        praise="each rank keeps its columns, and one sum in backward is all that is sent",
        hints=(
            "PyTorch stores [outputs, inputs]. Along which dim are the outputs cut?",
            "`whole.chunk(p, dim=0)[rank]` is a view. What else does a parameter need?",
            "Where does the input become something that differs by rank: f or g?",
        ),
    ),
    "9.3": Exercise(
        praise="one sum in forward, and the bias is added once",
        hints=(
            "Along which dim does this layer cut the weight [outputs, inputs]?",
            "The products of the ranks are summands of one output: f or g?",
            "Is the bias part of every summand, or of the sum?",
        ),
    ),
    "9.4": Exercise(
        praise="a share of the work on each rank, and one sum each way, although x is used twice",
        hints=(
            "Which of the three weights are cut by rows of the stored tensor, which by columns?",
            "x enters two products on each rank. How often does it pass f?",
            "The product of silu(gate) and up works on each feature alone: nothing is sent for it.",
        ),
    ),
    "9.5": Exercise(
        praise="every token is looked up by the one rank that has it",
        hints=(
            "Which row of its own part is token t on a rank whose first token is `first`?",
            "A token of another rank needs some valid row, and a zero vector afterwards.",
            "After that every rank has one summand of the result.",
        ),
    ),
    "9.6": Exercise(
        praise="uneven columns, large logits, right gradients, and three numbers for each token",
        hints=(
            "Which of the three numbers need all columns, and how does each combine over ranks?",
            "`reduce_from` sums forward, and hands the gradient on. `dist.all_reduce` has none.",
            "The maximum needs no gradient: `logits.detach().amax(-1)`.",
        ),
    ),
}
