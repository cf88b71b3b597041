"""An error on one rank becomes one message on all, and nobody waits for it."""


def attempt(rank, failing):
    """What this rank sees when the `failing` ranks raise."""
    from labcode.runtime.agreement import on_every_rank

    def work():
        if rank in failing:
            raise ValueError(f"no data on {rank}")
        return rank * 10

    try:
        return on_every_rank(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_on_one_rank_reaches_all_as_one_message(ranks4):
    from_2 = "PeerError: rank 2: ValueError: no data on 2"
    assert ranks4.run(attempt, [2]) == [from_2, from_2, "ValueError: no data on 2", from_2]
    assert ranks4.run(attempt, [3, 1])[0] == "PeerError: rank 1: ValueError: no data on 1"
    assert ranks4.run(attempt, []) == [0, 10, 20, 30]


def check(rank, failing):
    """What this rank sees of three checks; `failing` is {rank: the check that fails on it}."""
    from labcode.runtime.agreement import agreed

    made = []

    def passes(number):
        made.append(number)
        if failing.get(rank) == number:
            raise OSError(f"check {number} on {rank}")

    try:
        agreed(lambda: passes(0), lambda: passes(1), lambda: passes(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}", made
    return "", made


def test_of_several_checks_the_first_that_fails_anywhere_is_told(ranks4):
    assert ranks4.run(check, {}) == [("", [0, 1, 2])] * 4
    # the later check of rank 0 is not told: with an agreement on each it would not have been made
    found = ranks4.run(check, {0: 2, 1: 1, 3: 1})
    of_1 = "PeerError: rank 1: OSError: check 1 on 1"
    assert [text for text, _ in found] == [
        of_1,
        "OSError: check 1 on 1",
        of_1,
        "OSError: check 1 on 3",
    ]
    assert [made for _, made in found] == [[0, 1, 2], [0, 1], [0, 1, 2], [0, 1]]
    assert ranks4.run(check, {2: 0})[0][0] == "PeerError: rank 2: OSError: check 0 on 2"


def first(rank, fail):
    from labcode.runtime.agreement import on_first_rank

    def work():
        if fail:
            raise OSError("disk full")
        return f"made by {rank}"

    try:
        return on_first_rank(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_the_first_rank_works_for_all(ranks2):
    assert ranks2.run(first, False) == ["made by 0", "made by 0"]
    assert ranks2.run(first, True) == [
        "OSError: disk full",
        "PeerError: rank 0: OSError: disk full",
    ]
