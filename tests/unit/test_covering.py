"""The pairwise covering of the test matrices."""

import itertools

from covering import covering, first, pairs_of


def in_short_run(parameters):
    return [parameter.values for parameter in parameters if not parameter.marks]


def test_every_pair_occurs_in_the_short_run_and_every_case_in_the_full_one():
    cases = list(itertools.product("abc", (1, 2, 3), (True, False)))
    parameters = covering(cases)
    assert [parameter.values for parameter in parameters] == cases
    chosen = in_short_run(parameters)
    assert 9 <= len(chosen) <= 11  # 18 cases; three times three pairs need nine
    every_pair = set().union(*map(pairs_of, cases))
    assert set().union(*map(pairs_of, chosen)) == every_pair


def test_pairs_of_features_count_instead_of_pairs_of_arguments():
    cases = [("a", (1, 2)), ("a", (2, 1)), ("b", (1, 2))]
    chosen = in_short_run(covering(cases, lambda name, sizes: sizes))
    assert chosen == [("a", (1, 2)), ("a", (2, 1))]


def test_of_a_list_the_first_cases_are_in_the_short_run():
    parameters = first(2, ["a", "b", "c"])
    assert [parameter.values for parameter in parameters] == [("a",), ("b",), ("c",)]
    assert in_short_run(parameters) == [("a",), ("b",)]
