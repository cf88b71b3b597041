"""The exercises on cures of lesson 07: a script without its fault. The assertions are hints.

What the learner is given is a patient's script as a function of `watch`, and a first line that
raises NotImplementedError until somebody has deleted it:

    def patient_1(watch):
        ...
        with watch(model, optimizer, loader=loader):
            ...
        return num_batches

    check("7.3", pair, patient_1, patient_2)
    check("7.10", pair, night_shift)
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

from labcode.pool.answers import RankError
from labcode.pool.ranks import Ranks
from labcode.teach.check import RETURNED_NONE, is_stub, reason
from labcode.teach.labs import l07_clinic, l07_night
from labcode.teach.labs.l07_clinic import Examined
from labcode.teach.labs.l07_patients import same_order

NUMBER_REL = 1e-5  # of a number that a script returns: right cures round differently
END_REL = 1e-7  # of the sum of 18,624 weights: another order of the samples moves it by 1e-6


def cured(pair: Ranks, *answers: Any) -> None:
    """The learner's `patient_1`, ...: trained under the doctor, and compared with the healthy twin.

    Args:
        pair: Two ranks.
        answers: Functions of `watch`; their names say whose script they are.
    """
    for answer in answers:
        number = _number_of(answer)
        who = f"patient {number}"
        own = _treated(pair, who, answer)
        twin = _twin(pair, number, own)
        _compare(who, own, twin)


def _twin(pair: Ranks, number: int, own: Sequence[Examined]) -> list[Examined]:
    """The healthy twin; where the learner numbers the epochs, with the same numbers."""
    is_shuffled = l07_clinic.name_of(number) == "same_order"
    if is_shuffled and len(own[0].epochs) == len(same_order.EPOCHS):
        return l07_clinic.in_a_folder(pair, _numbered, same_order.run, own[0].epochs)
    return l07_clinic.examine(pair, number, healthy=True)


def _numbered(run: Any, epochs: Sequence[int]) -> Examined:
    return l07_clinic.under_watch(functools.partial(run, True, epochs=epochs))


def night(pair: Ranks, answer: Any) -> None:
    """The learner's `night_shift`: five faults, of which none may be left."""
    who = "the patient of the night"
    own = _treated(pair, who, answer)
    left = [name for name in l07_night.FINDINGS if name in own[0].findings]
    if left:
        gone = len(l07_night.FINDINGS) - len(left)
        told = next(says for says in own[0].says if says.startswith(left[0]))
        raise AssertionError(f"{gone} of {len(l07_night.FINDINGS)} faults are gone; next, {told}")
    epochs: Sequence[int] = own[0].epochs
    if len(epochs) != len(l07_night.EPOCHS):
        epochs = l07_night.EPOCHS
    twin = l07_clinic.in_a_folder(pair, _numbered, l07_night.run, epochs)
    _compare(who, own, twin)


def _number_of(answer: Any) -> int:
    name = getattr(answer, "__name__", "")
    found = re.fullmatch(r"patient_(\d+)", name)
    assert found, f"the function is called {name!r}: keep its name, patient_1 or another number"
    return int(found[1])


def _treated(pair: Ranks, who: str, answer: Any) -> list[Examined]:
    try:
        return l07_clinic.in_a_folder(pair, _watched, answer)
    except RankError as error:
        if is_stub(error):
            raise
        raise AssertionError(f"{who}: {reason(error)}") from None


def _watched(answer: Any) -> Examined:
    return l07_clinic.under_watch(answer, catch=False)


def _compare(who: str, own: Sequence[Examined], twin: Sequence[Examined]) -> None:
    assert all(one.watched for one in own), (
        f"{who}: nobody has watched the training: keep `with watch(...)` round the loop"
    )
    if own[0].says:
        raise AssertionError(f"{who}: the doctor says, {own[0].says[0]}")
    assert not own[0].is_wrapped_twice, (
        f"{who}: there is a DDP inside the DDP, and each gradient is sent twice"
    )
    assert all(one.epochs == own[0].epochs for one in own), (
        f"{who}: rank 0 tells its sampler the epochs {own[0].epochs}, and another rank "
        f"{own[-1].epochs}: the ranks then share out different orders, and samples overlap"
    )
    assert _all_saved(own) or not _all_saved(twin), (
        f"{who}: no rank saves a checkpoint any more, and the healthy run has one"
    )
    for rank, (one, other) in enumerate(zip(own, twin)):
        where = f"{who}, rank {rank}: "
        assert not one.error, f"{where}it ended with: {one.error.splitlines()[0]}"
        assert one.number is not None, f"{where}{RETURNED_NONE}"
        assert one.steps == other.steps, (
            f"{where}it made {one.steps} optimizer steps, and the healthy run {other.steps}: a "
            "cure leaves all that is not ill as it is"
        )
        assert one.seed == other.seed, (
            f"{where}the seed is {one.seed}, and in the healthy run {other.seed}: ranks may draw "
            "different numbers; with one seed for all the fault is still there, and does not show"
        )
        _compare_inputs(where, one.inputs, other.inputs)
    for rank, (one, other) in enumerate(zip(own, twin)):
        where = f"{who}, rank {rank}: "
        assert _is_close(one.number, other.number, NUMBER_REL), (
            f"{where}it returned {one.number:.6g}, and the healthy run {other.number:.6g}"
        )
        assert _is_close(one.end, other.end, END_REL), (
            f"{where}the weights at the end are not those of the healthy run: what does your "
            "cure change besides?"
        )


def _all_saved(ranks: Sequence[Examined]) -> int:
    return sum(one.num_saved for one in ranks)


def _compare_inputs(where: str, found: Sequence[int], expected: Sequence[int]) -> None:
    """Forward pass by forward pass; who has put micro-batches together has fewer of them."""
    if len(found) != len(expected):
        return
    for place, (one, other) in enumerate(zip(found, expected)):
        assert one == other, (
            f"{where}forward pass {place} got other samples than in the healthy run, or in another "
            "order: which samples belong to this rank?"
        )


def _is_close(one: Any, other: Any, rel: float) -> bool:
    if isinstance(one, bool) or not isinstance(one, (int, float)):
        return False
    return math.isclose(one, other, rel_tol=rel, abs_tol=1e-9)
