"""The exercises on cures of lesson 07: a script without its fault.

What the learner is given is a patient's script as a function of `watch`, and a first line that
raises NotImplementedError until somebody has deleted it:

    def patient_1(watch):
        ...
        with watch(model, optimizer, loader=loader):
            ...
        return num_batches

    check("7.3", pair, patient_1, patient_2)
    check("7.8", pair, night_shift)
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from course.answer import RETURNED_NONE, Hint, is_stub, reason
from course.exercises.expect import refuse
from course.labs import l07_clinic, l07_night
from course.labs.l07_clinic import Examined
from course.labs.l07_patients import same_order
from course.pool.answers import RankError
from course.pool.ranks import Ranks
from labcode.runtime.units import type_in_words

NUMBER_REL = 1e-5  # of a number that a script returns: right cures round differently
END_REL = 1e-7  # of the sum of 18,624 weights: another order of the samples moves it by 1e-6


def cured(pair: Ranks, one: Any, other: Any) -> None:
    """The learner's `patient_1`, ...: trained under the doctor, and compared with the healthy twin.

    Args:
        pair: Two ranks.
        one, other: Functions of `watch`; their names say whose script they are.
    """
    for answer in (one, other):
        number = _number_of(answer)
        who = f"patient {number}"
        own = _treated(pair, who, answer)
        _compare(who, own, _twin(pair, number, own))


def night(pair: Ranks, answer: Any) -> None:
    """The learner's `night_shift`: five faults, of which none may be left."""
    who = "the patient of the night"
    own = _treated(pair, who, answer)
    left = [name for name in l07_night.FINDINGS if name in own[0].findings]
    if left:
        gone = len(l07_night.FINDINGS) - len(left)
        told = next(says for says in own[0].says if says.startswith(left[0]))
        raise Hint(f"{gone} of {len(l07_night.FINDINGS)} faults are gone; next, {told}")
    epochs: Sequence[int] = own[0].epochs
    if len(epochs) != len(l07_night.EPOCHS):
        epochs = l07_night.EPOCHS
    _compare(who, own, l07_clinic.in_a_folder(pair, _numbered, l07_night.run, epochs))


def _number_of(answer: Any) -> int:
    name = getattr(answer, "__name__", "")
    found = re.fullmatch(r"patient_(\d+)", name)
    if found is None:
        raise Hint(f"the function is called {name!r}: keep its name, patient_1 or another number")
    return int(found[1])


def _treated(pair: Ranks, who: str, answer: Any) -> list[Examined]:
    """The learner's script under the doctor's eyes, on each rank."""
    try:
        return l07_clinic.in_a_folder(pair, _watched, answer)
    except RankError as error:
        if is_stub(error):
            raise
        raise Hint(f"{who}: {reason(error)}") from None


def _watched(answer: Any) -> Examined:
    return l07_clinic.under_watch(answer, catch=False)


def _twin(pair: Ranks, number: int, own: Sequence[Examined]) -> list[Examined]:
    """The healthy twin; where the learner numbers the epochs, with the same numbers."""
    is_shuffled = l07_clinic.name_of(number) == "same_order"
    if is_shuffled and len(own[0].epochs) == len(same_order.EPOCHS):
        return l07_clinic.in_a_folder(pair, _numbered, same_order.run, own[0].epochs)
    return l07_clinic.examine(pair, number, healthy=True)


def _numbered(run: Any, epochs: Sequence[int]) -> Examined:
    return l07_clinic.under_watch(functools.partial(run, True, epochs=epochs))


# ---- a training and its healthy twin


def _compare(who: str, own: Sequence[Examined], twin: Sequence[Examined]) -> None:
    """Nothing is found in the learner's training, and it did the same as the healthy one.

    Args:
        who: The patient.
        own: The learner's training, of each rank.
        twin: The healthy one.
    """
    first = own[0]
    mistakes = {
        "nobody has watched the training: keep `with watch(...)` around the loop": not all(
            one.watched for one in own
        ),
        f"the doctor says, {''.join(first.says[:1])}": bool(first.says),
        "there is a DDP inside the DDP, and each gradient is sent twice": first.is_wrapped_twice,
        "no rank saves a checkpoint any more, and the healthy run has one": (
            _num_saved(twin) > 0 and _num_saved(own) == 0
        ),
    }
    refuse(mistakes, f"{who}: ")
    for rank, (one, other) in enumerate(zip(own, twin)):
        refuse(_in_training(one, other), f"{who}, rank {rank}: ")
    for rank, (one, other) in enumerate(zip(own, twin)):
        refuse(_at_the_end(one, other), f"{who}, rank {rank}: ")


def _num_saved(ranks: Sequence[Examined]) -> int:
    return sum(one.num_saved for one in ranks)


def _in_training(one: Examined, other: Examined) -> dict[str, bool]:
    """What one rank did otherwise than in the healthy run."""
    is_number = isinstance(one.number, (int, float)) and not isinstance(one.number, bool)
    mistakes = {
        RETURNED_NONE: one.number is None,
        f"it returned {type_in_words(one.number)}, expected is a number": not is_number,
        f"it made {one.steps} optimizer steps, and the healthy run {other.steps}: a cure leaves "
        "all that is not ill as it is": one.steps != other.steps,
        f"the seed is {one.seed}, and in the healthy run {other.seed}: ranks may draw different "
        "numbers; with one seed for all the fault is still there, and does not show": (
            one.seed != other.seed
        ),
    }
    if len(one.inputs) == len(other.inputs):  # who has put micro-batches together has fewer
        for place, (found, expected) in enumerate(zip(one.inputs, other.inputs)):
            text = (
                f"forward pass {place} got other samples than in the healthy run, or in another "
                "order: which samples belong to this rank?"
            )
            mistakes[text] = found != expected
    return mistakes


def _at_the_end(one: Examined, other: Examined) -> dict[str, bool]:
    """What has come out otherwise than in the healthy run."""
    assert one.end is not None and other.end is not None  # both were watched
    ratio = f": {one.number / other.number:.3g} times as much" if other.number else ""
    return {
        f"it returned {one.number:.6g}, and the healthy run {other.number:.6g}{ratio}": (
            not math.isclose(one.number, other.number, rel_tol=NUMBER_REL, abs_tol=1e-9)
        ),
        "the weights at the end are not those of the healthy run: what else does your cure "
        "change?": not math.isclose(one.end, other.end, rel_tol=END_REL),
    }
