"""The pool of ranks: what travels, what a failure looks like, and that nothing is left behind."""

import functools
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from faults.waiting import until

from course.pool import wire
from course.pool.ranks import RankError, Ranks

FACTOR = 3


class Scale(torch.autograd.Function):
    """Multiplies; backward adds over the ranks, as a data-parallel hook does."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        grad = grad * ctx.factor
        dist.all_reduce(grad)
        return grad, None


def helper(x):
    return FACTOR * x


def family(pid=None):
    return psutil.Process(pid).children(recursive=True)


def pids(pool):
    return pool.run(os.getpid)


def works(pool):
    """A collective over all ranks succeeds."""
    return pool.run(lambda rank: all_reduced(rank)) == [sum(range(pool.n))] * pool.n


def all_reduced(value):
    x = torch.tensor([value])
    dist.all_reduce(x)
    return x.item()


@pytest.fixture(scope="module")
def brief():
    """A pool that tests may break."""
    with Ranks(2) as pool:
        yield pool


# ---- calls


def test_results_come_in_rank_order(ranks4):
    def late_first(rank):
        time.sleep(0.02 * (3 - rank))
        return rank, dist.get_rank(), dist.get_world_size()

    assert ranks4.run(late_first) == [(r, r, 4) for r in range(4)]
    assert len(ranks4) == ranks4.n == 4


def test_one_rank_is_a_pool_too(ranks1):
    assert ranks1.run(lambda rank, x: (rank, x, all_reduced(5)), 7) == [(0, 7, 5)]


@pytest.mark.parametrize(("value", "given"), [(None, "None"), (3, "an object of type int")])
def test_what_is_no_function_is_refused_before_it_is_sent(ranks2, value, given):
    with pytest.raises(TypeError, match=rf"^`run` was given {given} and no function: .* without "):
        ranks2.run(value)


def test_a_pool_far_larger_than_the_machine_says_so(monkeypatch):
    said = []
    monkeypatch.setattr("course.pool.ranks.usable_cores", lambda: frozenset({5}))
    monkeypatch.setattr(Ranks, "start", lambda _: None)
    monkeypatch.setattr(Ranks, "warn", staticmethod(said.append))
    Ranks(4)
    assert said == []
    Ranks(5)
    (line,) = said
    assert line.startswith("5 ranks share 1 core here: they take turns")


def test_the_rank_is_passed_to_a_first_parameter_of_that_name_only(ranks2):
    assert ranks2.run(lambda rank, x, y=0: (rank, x, y), 5, y=6) == [(0, 5, 6), (1, 5, 6)]
    assert ranks2.run(lambda x, rank=None: (x, rank), 5) == [(5, None)] * 2
    assert ranks2.run(functools.partial(lambda rank, x: rank + x, x=10)) == [10, 11]
    assert ranks2.run(os.getcwd) == [os.getcwd()] * 2


def test_the_caller_may_decide_whether_the_rank_is_passed(ranks2):
    assert ranks2.run(lambda me, x: (me, x), 5, pass_rank=True) == [(0, 5), (1, 5)]
    assert ranks2.run(lambda rank: rank, 5, pass_rank=False) == [5, 5]


def test_functions_and_classes_travel_with_what_they_mention(ranks2):
    offset = 100

    class Local:
        def __init__(self, x):
            self.x = x

    def nested(rank):
        inner = lambda: Local(helper(rank) + offset)  # noqa: E731
        x = torch.ones(2, requires_grad=True)
        Scale.apply(x, rank + 1.0).sum().backward()
        return inner().x, x.grad.tolist(), isinstance(Local(0), Local)

    assert ranks2.run(nested) == [(100, [3.0, 3.0], True), (103, [3.0, 3.0], True)]
    assert ranks2.run(lambda kind: kind(2).x, Local) == [2, 2]
    assert type(ranks2.run(Local, 4)[0]) is Local  # and back again


def test_a_new_definition_is_used_at_once(ranks2):
    def define(value):
        class Answer:
            def get(self):
                return value

        return lambda: Answer().get()

    assert [ranks2.run(define(value))[0] for value in (1, 2)] == [1, 2]


def test_tensors_travel_both_ways(ranks2):
    x = torch.randn(3, 4, dtype=torch.float64)
    back = ranks2.run(lambda x: {"whole": x, "view": x[1:], "grown": (x.requires_grad_() * 2)}, x)[
        1
    ]
    assert torch.equal(back["whole"], x) and torch.equal(back["view"], x[1:])
    # a result carries no graph
    assert torch.equal(back["grown"], 2 * x) and not back["grown"].requires_grad
    big = torch.arange(12_500_000, dtype=torch.float32)  # 50 MB
    sums = ranks2.run(lambda rank, x: (x + rank, x.double().sum().item()), big)
    assert torch.equal(sums[1][0], big + 1) and sums[0][1] == big.double().sum().item()


def test_a_sum_that_is_under_way_is_waited_for(ranks2):
    def total(rank):
        from torch.distributed import _functional_collectives

        return _functional_collectives.all_reduce(torch.ones(2) * rank, "sum", dist.group.WORLD)

    for found in ranks2.run(total):
        assert type(found) is torch.Tensor
        assert torch.equal(found, torch.ones(2))


def test_a_view_does_not_carry_its_storage():
    data = torch.randn(1000, 1000)
    sent = wire.dumps({"batch": data[3:5], "weight": torch.nn.Parameter(torch.ones(2))})
    assert len(sent) < 20_000
    assert torch.equal(pickle.loads(sent)["batch"], data[3:5])
    assert pickle.loads(sent)["weight"].requires_grad


def test_prints_come_after_the_call_labelled_in_rank_order(ranks4, capsys):
    def talk(rank):
        time.sleep(0.02 * (3 - rank))
        print("hello from", rank)
        print("and\nmore", end="")
        print("careful", file=sys.stderr)

    ranks4.run(talk)
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        f"[rank {r}] {line}" for r in range(4) for line in (f"hello from {r}", "and", "more")
    ]
    assert err.splitlines() == [f"[rank {r}] careful" for r in range(4)]


def test_each_of_several_ranks_has_one_thread(ranks2):
    assert ranks2.run(torch.get_num_threads) == [1, 1]


def test_the_ranks_of_a_notebook_see_no_gpu(ranks2):
    assert ranks2.run(lambda: os.environ["CUDA_VISIBLE_DEVICES"]) == ["", ""]


def test_groups_of_a_call_do_not_pile_up(ranks2):
    def make_groups():
        circle = [dist.new_group([0, 1]) for _ in range(5)]
        for group in circle:
            dist.barrier(group)
        circle.append(circle)  # as a model with hooks: only the garbage collector frees it

    def resources():
        process = psutil.Process()
        return process.num_threads(), process.num_fds()

    ranks2.run(make_groups)
    threads, files = ranks2.run(resources)[0]
    for _ in range(5):
        ranks2.run(make_groups)
    threads_after, files_after = ranks2.run(resources)[0]
    assert threads_after == threads
    assert files_after < files + 5
    assert works(ranks2)


# ---- failures


def in_all_reduce(rank):
    dist.all_reduce(torch.ones(3))


def in_a_subgroup(rank):
    low, high = dist.new_group([0, 1]), dist.new_group([2, 3])
    if rank == 2:
        raise ValueError("boom")
    while True:
        dist.all_reduce(torch.ones(3), group=low if rank < 2 else high)


def in_new_group(rank):
    dist.new_group([0, 1, 2, 3])


def in_backward(rank):
    x = torch.ones(3, requires_grad=True)
    Scale.apply(x, 2.0).sum().backward()


def in_python(rank):
    while True:
        pass


def asleep(rank):
    time.sleep(300)


@pytest.mark.parametrize(
    "others", [in_all_reduce, in_a_subgroup, in_new_group, in_backward, in_python, asleep]
)
def test_an_exception_on_one_rank_while_the_others_wait(ranks4, others, capsys):
    def fail_on_two(rank):
        print("started")
        if rank == 2 and others is not in_a_subgroup:
            raise ValueError("boom")
        others(rank)

    with pytest.raises(RankError) as caught:
        ranks4.run(fail_on_two)
    assert str(caught.value) == "rank 2: ValueError: boom" and caught.value.rank == 2
    notes = "\n".join(caught.value.__notes__)
    assert 'raise ValueError("boom")' in notes and Path(__file__).name in notes
    assert notes.count("Traceback") == 1 and "rank 0" not in notes
    assert capsys.readouterr().out.splitlines() == [f"[rank {r}] started" for r in range(4)]
    assert works(ranks4)


def test_a_rank_that_leaves_is_a_failure_too(ranks2):
    def leave(rank):
        sys.exit("enough") if rank == 1 else dist.barrier()

    with pytest.raises(RankError, match=r"^rank 1: SystemExit: enough"):
        ranks2.run(leave)
    assert works(ranks2)


def test_when_all_fail_alike_the_first_rank_is_named(ranks4):
    def fail(rank):
        time.sleep(0.02 * (3 - rank))
        raise KeyError("all")

    with pytest.raises(RankError, match=r"^rank 0: KeyError: 'all'"):
        ranks4.run(fail)


def test_what_cannot_travel_is_one_clear_line(ranks2):
    for argument, reason in (
        (threading.Lock(), "cannot pickle '_thread.lock' object"),
        (ranks2, "a pool of ranks"),
    ):
        with pytest.raises(
            TypeError, match=rf"^fn cannot be sent to the ranks: {reason}"
        ) as caught:
            fn = lambda x: x  # noqa: E731
            fn.__name__ = "fn"
            ranks2.run(fn, argument)
        assert "\n" not in str(caught.value)
    with pytest.raises(
        RankError,
        match=r"^rank 0: TypeError: the result, a generator, cannot be sent back: cannot pickle",
    ):
        ranks2.run(lambda: (x for x in range(3)))
    assert works(ranks2)


def test_a_missing_rank_is_an_error_after_the_time_out(brief, monkeypatch):
    monkeypatch.setattr("course.pool.ranks.HANG_S", 1e9)  # the watch would say it earlier

    def miss(rank):
        group = dist.new_group(timeout=timedelta(seconds=4))
        if rank == 0:
            dist.barrier(group)

    with pytest.raises(RankError, match=r"^rank 0: .*Timed out waiting 4000ms") as caught:
        brief.run(miss)
    assert "finished before: rank 1" in caught.value.__notes__
    assert works(brief)


def deaf(rank):
    while rank:
        try:
            time.sleep(300)
        except BaseException:
            continue
    raise ValueError("boom")


def test_the_next_call_has_new_ranks_whatever_the_old_ones_do(brief, survivors):
    old = [psutil.Process(pid) for pid in pids(brief)]
    with pytest.raises(RankError, match=r"^rank 0: ValueError: boom"):
        brief.run(deaf)
    assert survivors(old) == []
    assert works(brief)


def killed(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(300)


def test_a_killed_rank_is_an_error_at_once_and_the_next_call_has_new_ones(brief):
    message = (
        r"^process of rank 1 died \(killed by signal 9\): the next call starts all ranks anew$"
    )
    with pytest.raises(RankError, match=message):
        brief.run(killed)
    assert works(brief)
    os.kill(pids(brief)[1], signal.SIGKILL)  # between two calls
    until(lambda: brief._processes.death())
    with pytest.warns(
        UserWarning, match=r"^process of rank 1 died .*: all ranks are started anew$"
    ):
        assert works(brief)


def test_new_ranks_are_forks_of_the_same_process(brief):
    server = brief._server.pid
    before = pids(brief)
    brief.restart()
    assert not set(before) & set(pids(brief))
    assert brief._server.pid == server
    assert {psutil.Process(pid).ppid() for pid in pids(brief)} == {server}


# ---- end


def test_a_closed_pool_says_so_and_leaves_nothing(survivors):
    pool = Ranks(1)
    mine = [psutil.Process(pid) for pid in pids(pool)]
    folder = pool._processes.folder
    pool.start()  # runs already
    assert folder.is_dir() and pids(pool)[0] in {p.pid for p in family()}
    pool.close()
    assert survivors(mine) == []
    assert not folder.exists()
    with pytest.raises(RuntimeError, match=r"^this pool of 1 ranks is closed: call restart\(\)"):
        pool.run(lambda: 1)


def test_bad_arguments_are_one_line():
    for n, timeout_s in ((0, 30), (2, 0)):
        with pytest.raises(
            ValueError,
            match=rf"^Ranks\(n={n}, timeout_s={timeout_s}\): a pool needs at least 1 rank",
        ):
            Ranks(n, timeout_s=timeout_s)


OWNER = """
import gc, sys, time
from pathlib import Path
import psutil
from course.pool import ranks
from course.pool.ranks import Ranks

ranks.HANG_S = 3000  # here a person ends the hang

def hang(rank, folder):
    import torch, torch.distributed as dist
    Path(folder, f"hangs-{rank}").touch()
    dist.recv(torch.ones(1), src=1 - rank)

pool = Ranks(2, timeout_s=3000)
try:
    pool.run(hang, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", pool.run(lambda rank: rank), flush=True)
for path in Path(sys.argv[1]).glob("hangs-*"):
    path.unlink()
if sys.argv[2] == "again":
    pool.run(hang, sys.argv[1])
if sys.argv[2] == "drop":
    del pool
    gc.collect()
    print(len(psutil.Process().children(recursive=True)), "left", flush=True)
"""


def start_owner(folder, *words):
    """A process that owns a pool of two, both of whose ranks hang in a collective."""
    script = folder / "owner.py"
    script.write_text(OWNER)
    owner = subprocess.Popen(
        [sys.executable, str(script), str(folder), *words], stdout=subprocess.PIPE, text=True
    )
    wait_for_hang(folder)
    return owner


def wait_for_hang(folder):
    until(lambda: len(list(Path(folder).glob("hangs-*"))) == 2)


def test_interrupt_ends_a_hung_collective_and_a_killed_owner_leaves_no_process(tmp_path, survivors):
    owner = start_owner(tmp_path, "again")
    owner.send_signal(signal.SIGINT)
    assert owner.stdout.readline() == "interrupted [0, 1]\n"
    wait_for_hang(tmp_path)
    children = family(owner.pid)
    assert len(children) >= 3  # two ranks, and the process that they are forks of
    folder = Path(next(word for word in children[0].cmdline() if "labcode-ranks-" in word))
    owner.kill()
    owner.wait()
    assert survivors(children) == []
    until(lambda: not folder.exists())


def test_a_dropped_pool_and_a_process_that_ends_leave_no_process(tmp_path, survivors):
    owner = start_owner(tmp_path, "drop")
    children = family(owner.pid)
    owner.send_signal(signal.SIGINT)
    assert owner.stdout.read() == "interrupted [0, 1]\n0 left\n" and owner.wait(60) == 0
    assert survivors(children) == []


# ---- notebook

HANG = "open({folder!r} + '/hangs-%d' % rank, 'w').close(); dist.recv(torch.ones(1), src=1 - rank)"
PEOPLE = """
import os, psutil
people = psutil.Process().children(recursive=True)
print(os.getpid(), *(person.pid for person in people))
"""
TOTAL = """
def total(rank, y):
    x = torch.tensor([y + rank])
    dist.all_reduce(x)
    print('at', rank)
    return x.item() + Box.size
"""
START = """
import course.pool.ranks
from course.pool.ranks import Ranks
import torch
course.pool.ranks.HANG_S = 3000  # here a person ends the hang
course.pool.ranks.WHERE_S = 3000  # each rank says where it is, however busy the machine is
ranks = Ranks(2, timeout_s=3000)
ranks
"""
REDUCE_STATE = """%%px
state = torch.ones(1) * rank
dist.all_reduce(state)
print('rank', rank, 'of', world_size)
"""
FAIL_ON_ONE = """%%px
print('on')
if rank == 1:
    raise ValueError('boom')
dist.all_reduce(state)
"""
ALL_FAIL = """
def fail(rank):
    raise KeyError('all')

ranks.run(fail)
"""
LEAVE = """%%px
if rank == 1:
    import os
    os._exit(3)
dist.barrier()
"""
GONE = "what %%px cells defined is gone: all ranks are started anew\n"
INTERRUPTED = (
    "KeyboardInterrupt: you interrupted: ranks 0 and 1 were in {}; the next call starts all ranks "
    "anew"
)
EXIT = "RankError: rank 0 called exit(): its process is needed: use return"
AFTER_CLOSE = """
first.run(lambda rank: rank), ranks
"""
STARTED_AGAIN = "Ranks(2) was closed: its ranks are started again\n([0, 1], Ranks(2, not running))"
# A cell and what a reader sees after it; None where a later line of the test looks at it.
CELLS = [
    (START, "Ranks(2, running)"),
    ("import torch.distributed as dist\nclass Box:\n    size = 4", ""),
    (TOTAL, ""),
    ("ranks.run(total, 10)", "[rank 0] at 0\n[rank 1] at 1\n[25, 25]"),
    ("class Box:\n    size = 5", ""),
    ("ranks.run(total, 10)", "[rank 0] at 0\n[rank 1] at 1\n[26, 26]"),
    (REDUCE_STATE, "[rank 0] rank 0 of 2\n[rank 1] rank 1 of 2"),
    ("%%px\nstate.item()", "[rank 0] 1.0\n[rank 1] 1.0"),
    ("ranks.run(lambda rank: state.item() + rank)", "[1.0, 2.0]"),
    (FAIL_ON_ONE, "[rank 0] on\n[rank 1] on\nRankError: rank 1: ValueError: boom"),
    ("Ranks.warn = staticmethod(print)", ""),
    ("ranks.run(lambda: 'state' in globals())", GONE + "[False, False]"),
    (ALL_FAIL, "RankError: rank 0: KeyError: 'all'"),
    ("%%px\n" + HANG, INTERRUPTED.format("line 1")),
    ("def hang(rank):\n    " + HANG + "\nranks.run(hang)", INTERRUPTED.format("hang, line 2")),
    ("%%px\nexit()", EXIT),
    ("def leave():\n    exit()\nranks.run(leave)", EXIT),
    ("%px print('still here')", "[rank 0] still here\n[rank 1] still here"),
    (LEAVE, "RankError: process of rank 1 died (exit code 3): the next call starts all ranks anew"),
    (PEOPLE, None),
    ("first = ranks\nranks = Ranks(2)\nfirst, ranks", "(Ranks(2, not running), Ranks(2, running))"),
    (AFTER_CLOSE, STARTED_AGAIN),
    ("%%px\nprint(rank)", "[rank 0] 0\n[rank 1] 1"),
    (PEOPLE, None),
]


def text_of(cell):
    """What a reader of the notebook sees, without colours."""
    shown = []
    for output in cell.outputs:
        if output.output_type == "error":
            shown.append(f"{output.ename}: {output.evalue}")
        else:
            shown.append(output.get("text") or output.data["text/plain"])
    text = "".join(shown).strip()
    return text.replace("\x1b[0;31m", "").replace("\x1b[0m", "")


def test_in_a_notebook(tmp_path, survivors):
    import nbformat
    from nbclient import NotebookClient

    sources = [source.replace("{folder!r}", repr(str(tmp_path))) for source, _ in CELLS]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in sources]
    )
    client = NotebookClient(notebook, timeout=280, allow_errors=True, kernel_name="python3")

    def interrupt_when_it_hangs():
        wait_for_hang(tmp_path)
        for path in tmp_path.glob("hangs-*"):
            path.unlink()
        os.kill(client.km.provisioner.pid, signal.SIGINT)

    with client.setup_kernel():
        seen, people = [], []
        for index, cell in enumerate(notebook.cells):
            if "hangs-" in cell.source:
                threading.Thread(target=interrupt_when_it_hangs, daemon=True).start()
            client.execute_cell(cell, index)
            # whether both have come to recv by then is chance
            seen.append(re.sub(r" \(rank.* recv .*\); ", "; ", text_of(cell)))
            if cell.source == PEOPLE:  # the kernel and all below it
                people.append([psutil.Process(int(pid)) for pid in seen[-1].split()])
        assert [text for text, (_, due) in zip(seen, CELLS) if due is not None] == [
            due for _, due in CELLS if due is not None
        ]
        old, new = people
        kernel = old[0]
        # the cell with Ranks(2) ran again: of the first pool nothing is left but the kernel and the
        # process of which all ranks are forks
        stays = [process for process in old if process in new]
        assert stays[0] == kernel and len(stays) == 2 and len(new) == 4
        assert survivors([process for process in old if process not in stays]) == []
        kernel.kill()
        assert survivors(new) == []
