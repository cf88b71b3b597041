"""Schedules as data: complete, runnable, as PyTorch's; wrong ones are refused in one line."""

import graphlib
import itertools

import pytest
import torch_schedules
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from labcode.schedules import (
    KINDS,
    NAMES,
    Action,
    Message,
    check_schedule,
    evaluation_plan,
    make_plan,
    messages,
    plan_pipeline,
    schedule,
    simulation,
    stage_ranks,
    ticks,
    waits_for,
)
from labcode.schedules import pipeline_plan as plan_module


def fits(name, p, m, v):
    """Whether there is such a schedule."""
    return m % p == 0 if name == "interleaved" else v == 1


SIZES = itertools.product(NAMES, range(1, 9), range(1, 17), range(1, 4))
CASES = [case for case in SIZES if fits(*case)]


def made(name, p, m, v):
    return schedule(name, p * v, m, p)


def written(*rows):
    """A schedule from one line of text per rank."""
    return {rank: [Action.parse(text) for text in row.split()] for rank, row in enumerate(rows)}


def graph(actions, num_stages):
    """`{action: what must be done before it}`, by its rank's order and by what it waits for."""
    exists = set(itertools.chain.from_iterable(actions.values()))
    before = {action: set() for action in exists}
    for order in actions.values():
        for first, second in itertools.pairwise(order):
            before[second].add(first)
        for action in order:
            for need in waits_for(action, num_stages):
                before[action].add(need if need in exists else need._replace(kind="B"))
    return before


# ---- what the schedules are


def test_every_schedule_is_complete_and_runs_to_its_end():
    assert len(CASES) == 510
    for name, p, m, v in CASES:
        actions = made(name, p, m, v)
        check_schedule(actions, p * v, m)
        assert stage_ranks(actions) == {stage: stage % p for stage in range(p * v)}
        kinds = {"F", "I", "W"} if name == "zero_bubble" else {"F", "B"}
        all_actions = list(itertools.chain.from_iterable(actions.values()))
        assert {action.kind for action in all_actions} == kinds
        assert len(all_actions) == len(kinds) * p * v * m


def test_orders_of_three_stages_by_hand():
    assert schedule("gpipe", 2, 3) == written("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert schedule("1f1b", 3, 4) == written(
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    )
    assert schedule("zero_bubble", 3, 4) == written(
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    )
    assert schedule("interleaved", 4, 2, num_ranks=2) == written(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


def test_few_microbatches_leave_ranks_idle_but_nothing_out():
    assert schedule("1f1b", 4, 1)[0] == written("0F0 0B0")[0]
    assert schedule("zero_bubble", 4, 2)[3] == written("3F0 3I0 3F1 3I1 3W0 3W1")[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (
            ("2f2b", 2, 2),
            "there is no schedule '2f2b': choose one of gpipe, 1f1b, interleaved, zero_bubble",
        ),
        (("gpipe", 0, 2), "num_stages=0: a pipeline needs a whole number, at least 1"),
        (("gpipe", 2, 1.5), "num_microbatches=1.5: a pipeline needs a whole number, at least 1"),
        (("gpipe", 2, 2, 0), "num_ranks=0: a pipeline needs a whole number, at least 1"),
        (
            ("interleaved", 3, 2, 2),
            "num_stages=3 is not a multiple of num_ranks=2: change one of them",
        ),
        (
            ("1f1b", 4, 2, 2),
            "1f1b has one stage per rank, not num_stages=4 on num_ranks=2: use interleaved",
        ),
        (
            ("interleaved", 4, 3, 2),
            "interleaved needs num_microbatches=3 to be a multiple of num_ranks=2",
        ),
    ],
)
def test_an_impossible_schedule_is_refused_in_one_line(args, words):
    with pytest.raises(ValueError) as caught:
        schedule(*args)
    assert str(caught.value) == words


@given(st.builds(Action, st.sampled_from("FBIW"), st.integers(0, 999), st.integers(0, 999)))
def test_an_action_is_written_as_pytorch_writes_it_and_read_back(action):
    assert Action.parse(str(action)) == action
    assert repr(torch_schedules.to_torch({0: [action]})[0][0]) == repr(action)


@pytest.mark.parametrize("text", ["", "F1", "1X1", "1FB2", "1F", "-1F0", "1F0 "])
def test_other_text_is_no_action(text):
    with pytest.raises(
        ValueError, match=r"is no action: write stage, one of F, B, I, W, micro-batch, as in '1F3'"
    ):
        Action.parse(text)


# ---- the table of ticks, and the messages


def clocked(actions, num_stages):
    """The table once more, tick by tick: who can run in this tick with what was done before it."""
    before = graph(actions, num_stages)
    done = set()
    left = {rank: list(order) for rank, order in actions.items()}
    table = {rank: [] for rank in actions}
    while any(left.values()):
        now = set()
        for rank, order in left.items():
            if order and before[order[0]] <= done:
                action = order.pop(0)
                now.add(action)
                table[rank].append(action)
            else:
                table[rank].append(None)
        done |= now
    return table


def test_every_action_stands_in_the_first_tick_in_which_it_can_run():
    for name, p, m, v in CASES[::5]:
        actions = made(name, p, m, v)
        assert ticks(actions, p * v) == clocked(actions, p * v)


def test_every_message_is_sent_once_and_before_it_is_needed():
    for name, p, m, v in CASES:
        last = p * v - 1
        table = ticks(made(name, p, m, v), p * v)
        when = {}
        for row in table.values():
            when.update({action: tick for tick, action in enumerate(row) if action})
        sent = messages(table, p * v)
        assert len(sent) == len(table[0])
        backward = "I" if name == "zero_bubble" else "B"
        expected = {}  # one rank sends nothing
        for stage, i in itertools.product(range(last), range(m)):
            if p > 1:
                expected["activation", stage + 1, i] = when[Action("F", stage, i)]
                expected["gradient", stage, i] = when[Action(backward, stage + 1, i)]
        found = []
        for tick, column in enumerate(sent):
            found += [(message, tick) for message in column]
        assert {message[2:]: tick for message, tick in found} == expected
        assert len(found) == len(expected)
        for message, tick in found:
            is_activation = message.kind == "activation"
            from_stage = message.stage - 1 if is_activation else message.stage + 1
            assert message.to_rank == message.stage % p
            assert message.from_rank == from_stage % p
            assert message.to_rank != message.from_rank
            kind = "F" if is_activation else backward
            assert when[Action(kind, message.stage, message.microbatch)] > tick
        for column in sent:
            senders = [message.from_rank for message in column]
            assert senders == sorted(set(senders))


def test_messages_of_the_smallest_pipeline():
    table = ticks(schedule("1f1b", 2, 1), 2)
    assert table == {
        0: [*written("0F0")[0], None, None, *written("0B0")[0]],
        1: [None, *written("1F0 1B0")[0], None],
    }
    assert messages(table, 2) == [
        [Message(0, 1, "activation", 1, 0)],
        [],
        [Message(1, 0, "gradient", 0, 0)],
        [],
    ]


# ---- plans


def as_dicts(plan):
    """The plan's orders, ticks and messages in the types of the functions that make them."""
    orders = {rank: list(order) for rank, order in enumerate(plan.orders)}
    table = {rank: list(row) for rank, row in enumerate(plan.ticks)}
    return orders, table, [list(after) for after in plan.messages]


def test_a_plan_holds_the_schedule_its_ticks_and_its_messages():
    for name, p, m, v in CASES[::7]:
        plan = plan_pipeline(name, p * v, m, p)
        table = ticks(made(name, p, m, v), p * v)
        assert as_dicts(plan) == (made(name, p, m, v), table, messages(table, p * v))
        assert plan.stage_ranks == tuple(stage % p for stage in range(p * v))
        assert plan.splits_backward == (name == "zero_bubble")
        assert (plan.num_stages, plan.num_microbatches) == (p * v, m)


def test_each_rank_finds_its_own_messages_in_the_common_order():
    for name, p, m, v in CASES[::7]:
        plan = plan_pipeline(name, p * v, m, p)
        for rank, program in enumerate(plan.programs):
            assert tuple(tick.action for tick in program) == plan.ticks[rank]
            for tick, after in zip(program, plan.messages, strict=True):
                ends = [(message.from_rank, message.to_rank) for message in after]
                own = [place for place, pair in enumerate(ends) if rank in pair]
                assert tick.messages == tuple(after[place] for place in own)


def test_a_plan_of_forwards_alone_runs_each_micro_batch_through_all_stages():
    # stages 0 and 3 on rank 0, 1 and 2 on rank 1: between 1 and 2 nothing is sent
    plan = evaluation_plan((0, 1, 1, 0), 2)
    assert as_dicts(plan)[0] == written("0F0 3F0 0F1 3F1", "1F0 2F0 1F1 2F1")
    sent = [message for after in plan.messages for message in after]
    assert sorted(sent) == [
        Message(0, 1, "activation", 1, 0),
        Message(0, 1, "activation", 1, 1),
        Message(1, 0, "activation", 3, 0),
        Message(1, 0, "activation", 3, 1),
    ]


def may_not_have_arrived(plan):
    """How many messages back from a rank's latest there is one whose receiver may not be there yet.

    What a rank has received tells it which ticks the sender had done, and what that one knew. The
    receiver of a message is there when it has done the tick of that message.
    """
    num_ranks = len(plan.ticks)
    done = [[-1] * num_ranks for _ in range(num_ranks)]  # [who knows it][of whom]: the last tick
    told = {}  # what the sender of a message knew
    sent = [[] for _ in range(num_ranks)]  # (tick, to whom)
    found = []
    for tick, after in enumerate(plan.messages):
        for rank, row in enumerate(plan.ticks):
            action = row[tick]
            kind = "activation" if action and action.kind == "F" else "gradient"
            if action and action.kind != "W":
                news = told.get((kind, action.stage, action.microbatch), done[rank])
                done[rank] = list(map(max, done[rank], news))
            done[rank][rank] = tick
        for rank, messages_of_rank in enumerate(sent):
            for behind, (at, to) in enumerate(reversed(messages_of_rank), start=1):
                if done[rank][to] < at:
                    found.append(behind)
        for message in after:
            told[message[2:]] = list(done[message.from_rank])
            sent[message.from_rank].append((tick, message.to_rank))
    return found


def test_all_but_the_last_messages_of_a_rank_have_arrived():
    """So that a runner may wait for a message when 2p later ones are on their way."""
    for name, p, m, v in CASES:
        if p > 1 and name != "gpipe":
            found = may_not_have_arrived(plan_pipeline(name, p * v, m, p))
            assert found and max(found) < 2 * p, (name, p, m, v)
    assert max(may_not_have_arrived(plan_pipeline("gpipe", 2, 16, 2))) == 16


@pytest.fixture
def simulations(monkeypatch):
    """The schedules that are simulated from here on, one entry for each time."""
    real = simulation.simulate_order
    seen = []

    def noted(actions, *args, **kwargs):
        seen.append(actions)
        return real(actions, *args, **kwargs)

    monkeypatch.setattr(simulation, "simulate_order", noted)
    monkeypatch.setattr(plan_module, "simulate_order", noted)
    return seen


def test_a_plan_is_simulated_once_however_many_steps_ask_for_it(simulations):
    plan_pipeline.cache_clear()
    evaluation_plan.cache_clear()
    plans = {plan_pipeline("1f1b", 4, 8, 4) for step in range(5)}
    assert (len(plans), len(simulations)) == (1, 1)
    plans = {evaluation_plan((0, 1, 2, 3), 3) for step in range(5)}
    assert (len(plans), len(simulations)) == (1, 2)


def test_a_plan_written_by_hand_is_simulated_once(simulations):
    make_plan(written("0F0 0B0", "1F0 1B0"), 2, 1)
    assert len(simulations) == 1


# ---- wrong schedules

WRONG = {
    "a backward before its forward": (
        written("0B0 0F0", "1F0 1B0"),
        1,
        "rank 0 cannot start 0B0: it waits for 0F0, which comes later on the same rank: "
        "put it before",
    ),
    "W before I": (
        written("0F0 0W0 0I0"),
        1,
        "rank 0 cannot start 0W0: it waits for 0I0, which comes later on the same rank: "
        "put it before",
    ),
    "wrong on the rank after": (
        written("0F0 0B0", "1B0 1F0"),
        1,
        "rank 0 cannot start 0B0: it waits for 1B0 of rank 1, which never comes: "
        "rank 1 at 1B0 waits for 1F0 of rank 1 itself",
    ),
    "a circle of two ranks": (
        written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"),
        2,
        "rank 0 cannot start 0B0: it waits for 1B0 of rank 1, which never comes: "
        "rank 0 at 0B0 waits for 1B0 of rank 1, rank 1 at 1F1 waits for 0F1 of rank 0",
    ),
    "a circle behind the first stuck rank": (
        written("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", "3F1 3B1 3F0 3B0"),
        2,
        "rank 0 cannot start 0B0: it waits for 1B0 of rank 1, which never comes: "
        "rank 2 at 2B0 waits for 3B0 of rank 3, rank 3 at 3F1 waits for 2F1 of rank 2",
    ),
    "an action missing": (
        written("0F0 0F1 0B0 0B1", "1F0 1F1 1B0"),
        2,
        "stage 1 has F for micro-batch 1: it needs F and B, or F, I and W, each once",
    ),
    "an action twice": (
        written("0F0 0F1 0B0 0B1", "1F0 1F1 1F1 1B0 1B1"),
        2,
        "stage 1 has F F B for micro-batch 1: it needs F and B, or F, I and W, each once",
    ),
    "B and W of one micro-batch": (
        written("0F0 0B0 0W0", "1F0 1B0"),
        1,
        "stage 0 has F B W for micro-batch 0: it needs F and B, or F, I and W, each once",
    ),
    "a stage nobody computes": (
        written("0F0 0B0"),
        1,
        "stage 1 has nothing for micro-batch 0: it needs F and B, or F, I and W, each once",
    ),
    "a stage on two ranks": (
        written("0F0 0F1 1F0 0B0 0B1", "1F1 1B0 1B1"),
        2,
        "stage 1 is on ranks 0 (1F0) and 1 (1F1): give it one rank",
    ),
    "a micro-batch too many": (
        written("0F0 0F1 0B0 0B1", "1F0 1F2 1B0 1B2"),
        2,
        "rank 1 has 1F2, which is no action of 2 stages and 2 micro-batches: "
        "count both from 0, the kinds are F, B, I, W",
    ),
    "something else in the list": (
        {0: [*written("0F0 0B0")[0], None]},
        1,
        "rank 0 has None, which is no action of 2 stages and 1 micro-batches: "
        "count both from 0, the kinds are F, B, I, W",
    ),
    "a rank left out": (
        {0: [], 2: []},
        1,
        "the schedule has the ranks [0, 2]: number them from 0 without gaps",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_schedule_is_refused_with_what_is_wrong(name):
    actions, num_microbatches, words = WRONG[name]
    num_stages = {"W before I": 1, "a circle behind the first stuck rank": 4}.get(name, 2)
    for refuse in (check_schedule, make_plan):
        with pytest.raises(ValueError) as caught:
            refuse(actions, num_stages, num_microbatches)
        assert str(caught.value) == words


def test_a_table_of_an_incomplete_schedule_names_what_is_missing():
    with pytest.raises(
        ValueError,
        match=r"^rank 1 cannot start 1B0: it waits for 1F0, which is on no rank: add it$",
    ):
        ticks(written("0F0 0B0", "1B0"), 2)


@st.composite
def schedules(draw, min_ranks=1):
    name, p, m, v = draw(
        st.sampled_from(
            [case for case in CASES if case[1] >= min_ranks and case[2] * case[3] <= 12]
        )
    )
    return made(name, p, m, v), p * v, m


def pick(draw, actions):
    rank = draw(st.sampled_from(sorted(actions)))
    return rank, draw(st.integers(0, len(actions[rank]) - 1))


@settings(deadline=None)
@given(schedules(), st.data())
def test_leaving_out_or_doubling_any_action_is_refused(case, data):
    actions, num_stages, m = case
    rank, place = pick(data.draw, actions)
    order = actions[rank]
    actions[rank] = data.draw(
        st.sampled_from([order[:place] + order[place + 1 :], order[: place + 1] + order[place:]])
    )
    with pytest.raises(
        ValueError,
        match=rf"^stage {order[place].stage} has .* for micro-batch {order[place].microbatch}: ",
    ):
        check_schedule(actions, num_stages, m)


@settings(deadline=None)
@given(schedules(min_ranks=2), st.data())
def test_an_action_on_another_rank_is_refused(case, data):
    actions, num_stages, m = case
    rank, place = pick(data.draw, actions)
    other = data.draw(st.sampled_from([r for r in actions if r != rank]))
    action = actions[rank].pop(place)
    actions[other].insert(data.draw(st.integers(0, len(actions[other]))), action)
    with pytest.raises(ValueError, match=f"^stage {action.stage} is on ranks .* give it one rank$"):
        check_schedule(actions, num_stages, m)


@settings(deadline=None, max_examples=200)
@given(schedules(), st.data())
def test_a_swap_is_refused_if_and_only_if_it_closes_a_circle(case, data):
    actions, num_stages, m = case
    rank, one = pick(data.draw, actions)
    two = data.draw(st.integers(0, len(actions[rank]) - 1))
    assume(one != two)
    order = actions[rank]
    order[one], order[two] = order[two], order[one]
    try:
        graphlib.TopologicalSorter(graph(actions, num_stages)).prepare()
    except graphlib.CycleError:
        with pytest.raises(
            ValueError, match=r"^rank \d+ cannot start \d+[BFIW]\d+: it waits for \d+[BFIW]\d+"
        ) as caught:
            check_schedule(actions, num_stages, m)
        stuck = Action.parse(str(caught.value).split("start ")[1].split(":")[0])
        assert stuck in actions[int(str(caught.value).split()[1])]
    else:
        check_schedule(actions, num_stages, m)


# ---- beside PyTorch


def computation(action):
    """What computes in an action of PyTorch's: itself, or the parts of an overlapped one."""
    if action is None:  # a gap
        return []
    parts = getattr(action, "sub_actions", None)
    if parts:
        return list(itertools.chain.from_iterable(map(computation, parts)))
    return [action] if action.computation_type.value in tuple(KINDS) else []


def from_torch(orders):
    """A schedule of PyTorch's as ours, without its gaps, its messages and the actions of FSDP.

    A forward and a backward that it runs overlapped become two actions, one after the other.
    """
    actions = {}
    for rank, order in orders.items():
        actions[rank] = [
            Action(part.computation_type.value, part.stage_index, part.microbatch_index)
            for part in itertools.chain.from_iterable(map(computation, order))
        ]
    return actions


def test_pytorch_accepts_every_schedule_and_keeps_its_order():
    for name, p, m, v in CASES:
        actions = made(name, p, m, v)
        lowered = torch_schedules.validate(actions, p * v, m)
        assert from_torch(lowered) == actions
        actions_of_torch = itertools.chain.from_iterable(lowered.values())
        sends = [action for action in actions_of_torch if "SEND" in str(action)]
        assert len(sends) == sum(map(len, messages(ticks(actions, p * v), p * v)))


@pytest.fixture(scope="module")
def orders_of_pytorch():
    return pytest.importorskip("torch.distributed.pipelining._schedule_visualizer").get_schedule_ops


def kind_and_stage(action):
    return (action.kind, action.stage)


def test_the_orders_are_those_of_pytorch(orders_of_pytorch):
    theirs_of = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B"}
    compared = 0
    for name, p, m, v in CASES:
        if p not in (1, 2, 3, 4, 8) or m not in (1, 2, 3, 8, 16) or name not in theirs_of:
            continue
        # PyTorch's 1F1B needs a micro-batch per stage, its interleaved schedule two stages per rank
        if (name == "1f1b" and m < p) or (name == "interleaved" and v == 1):
            continue
        orders = orders_of_pytorch(theirs_of[name], p, m, v)
        theirs = from_torch(dict(enumerate(orders)))
        ours = made(name, p, m, v)
        # torch 2.13 prints the forwards of the last rank as 1 to m in place of 0 to m-1
        if name == "1f1b":
            last_of_theirs = list(map(kind_and_stage, theirs.pop(p - 1)))
            assert last_of_theirs == list(map(kind_and_stage, ours.pop(p - 1)))
        assert ours == theirs
        compared += 1
    assert compared == 67


@pytest.mark.parametrize(
    "name", ["LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_schedules_of_pytorch_that_we_do_not_have_pass_our_check(orders_of_pytorch, name, p, m):
    actions = from_torch(dict(enumerate(orders_of_pytorch(name, p, m, 2))))
    check_schedule(actions, 2 * p, m)
    if "V" in name:  # the second stage of a rank runs back through the ranks
        assert stage_ranks(actions) == {
            stage: min(stage, 2 * p - 1 - stage) for stage in range(2 * p)
        }
        assert messages(ticks(actions, 2 * p), 2 * p)


@pytest.mark.parametrize(
    ("actions", "num_microbatches"),
    [
        (written("0B0 0F0", "1F0 1B0"), 1),
        (written("0F0 0F1 0B0 0B1", "1F0 1F1 1B0"), 2),
        (written("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"), 2),
        (written("0F0 0B0", "1F0 1B0 2F0"), 1),
    ],
)
def test_pytorch_refuses_wrong_schedules_in_one_line_too(actions, num_microbatches):
    with pytest.raises(ValueError, match=r"^PyTorch refuses the schedule: \S.*$"):
        torch_schedules.validate(actions, 2, num_microbatches)


def test_a_torch_without_its_private_names_says_so(monkeypatch):
    monkeypatch.delattr("torch.distributed.pipelining.schedules._Action")
    with pytest.raises(
        RuntimeError, match=r"^torch .* has no torch.distributed.pipelining.schedules._Action: use "
    ):
        torch_schedules.to_torch({})
