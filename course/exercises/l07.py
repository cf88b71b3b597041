"""Checks of lesson 07, the DDP clinic."""

from course.answer import Exercise
from course.exercises.l07_batch_norm import batch_norm
from course.exercises.l07_chart import chart, differing
from course.exercises.l07_cures import cured, night
from course.exercises.l07_waiting import roll_call, shares

EXERCISES = {
    "7.1": Exercise(
        check=differing,
        praise="one call of all ranks, and everybody knows who is different",
        hints=(
            "Every rank has its own value and needs those of all. Which collective brings them?",
            "`dist.all_gather_object(values, value, group=group)` fills a list that has one place "
            "for each rank of the group.",
        ),
    ),
    "7.2": Exercise(
        check=chart,
        praise="your chart sees what every DDP training has, without touching its code",
        hints=(
            "`register_forward_pre_hook` calls you with the model and the inputs, "
            "`register_step_pre_hook` with the optimizer. Both return a handle.",
            "A sum forgets the order of its numbers. Which function of some bytes does not?",
            "The norm of all gradients is one root over the squares of all of them.",
            "A parameter that got no gradient has None there.",
            "What do your hooks and `__exit__` return? PyTorch and Python make use of it.",
        ),
    ),
    "7.3": Exercise(
        check=cured,
        praise="each rank reads its own samples, and each epoch has its own order",
        hints=(
            "Who decides which samples a DataLoader gives, and does that one know of ranks?",
            "From which number does the sampler draw its order, and who changes that number?",
            "Two ranks share out one order. What must be equal on both, so that it is one?",
        ),
    ),
    "7.4": Exercise(
        check=cured,
        praise="both ranks train one model, and it is the one that was wanted",
        hints=(
            "DDP does two things when it is built. What happens to what changes afterwards?",
            "Does the error go away because the cause has gone, or because nobody looks any more?",
            "Would it still be right if each rank drew other random numbers?",
        ),
    ),
    "7.5": Exercise(
        check=cured,
        praise="the gradient of a step is now that of one process with all the targets",
        hints=(
            "The loss of one process is a mean over all targets of the step. Which factor does "
            "each target have here?",
            "DDP divides the sum of the ranks' gradients by the number of ranks, whatever the loss "
            "was.",
            "Patient 8: by which number does one process divide, and who knows it? A rank sees "
            "the padding of its own samples only.",
            "When the first micro-batch goes into backward, the number must be known already: "
            "count the targets of all micro-batches before, and add the counts of all ranks.",
        ),
    ),
    "7.6": Exercise(
        check=roll_call,
        praise="nobody waits for ever, and the absent ones are named",
        hints=(
            "Each rank leaves a note and then looks for those of the others.",
            "`store.wait([key], timedelta(seconds=...))` raises RuntimeError when the time is "
            "over. How much of the time is left for the next rank?",
            "A wait of no time may miss a note that is there. What asks without waiting?",
        ),
    ),
    "7.7": Exercise(
        check=cured,
        praise="all ranks make the same calls, and the loop comes to its end",
        hints=(
            "Which ranks come to the line that hangs, and how often each?",
            "May a collective stand inside an `if` whose answer differs between ranks?",
            "Patient 15: how many samples does each rank read, and how many batches are these?",
        ),
    ),
    "7.8": Exercise(
        check=night,
        praise="all five faults are gone, and the script trains like its healthy twin",
        hints=(
            "Take one finding at a time, change one thing, and run the check again.",
            "Which lines of the healthy scripts above have no counterpart here?",
            "Two of them are no error in the numbers: what is sent, and what is searched for?",
        ),
    ),
    "7.9": Exercise(
        check=shares,
        praise="no other shares make the step shorter",
        hints=(
            "The step is as long as the longest rank. Who should get the next sample?",
            "Give the samples out one by one, each to the rank that would be ready first with it.",
        ),
    ),
    "7.10": Exercise(
        check=batch_norm,
        praise="statistics and gradients of the whole batch, and only a few numbers travel",
        hints=(
            "A rank knows its count, its sums and its squares. Which of these add up over ranks?",
            "The mean is a sum over all values divided by their number: how do you get both, when "
            "ranks have different numbers of samples?",
            "In backward, `sum(dy)` and `sum(dy x_hat)` go over the samples of all ranks, because "
            "each x moves the statistics that all of them use.",
            "The gradients of weight and bias go into `.grad`, and data parallelism averages that "
            "afterwards, as for every other weight.",
        ),
    ),
    "7.11": Exercise(
        check=cured,
        praise="one sends once in a step, and the other finds out what it used",
        hints=(
            "Only the last backward of a step has to send. Forward and backward of the others "
            "stand inside `with model.no_sync():`.",
            "Two parts of a model, and each step uses one. For what does DDP wait?",
        ),
    ),
}
