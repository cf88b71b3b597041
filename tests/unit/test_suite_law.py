"""What no test may do, since its verdict would then depend on the machine.

A test waits with `until` and takes ports from `free_port`, both of tests/faults/waiting.py. What
runs on a rank may sleep: a slow rank is what some tests are about.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HELPER = TESTS / "faults" / "waiting.py"
CLOCKS = {"time", "monotonic", "perf_counter"}


class Law(ast.NodeVisitor):
    """Collects the offences of one file."""

    def __init__(self) -> None:
        self.offences: list[str] = []
        self._functions: list[str] = []
        self._loops = 0

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        loops, self._loops = self._loops, 0
        self._functions.append(node.name)
        if node.name == "free_port":
            self._offence(node, "asks for a port by itself: take free_port of faults/waiting.py")
        self.generic_visit(node)
        self._functions.pop()
        self._loops = loops

    def visit_While(self, node: ast.While) -> None:
        self._loops += 1
        self.generic_visit(node)
        self._loops -= 1

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self._functions.append("lambda")
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        in_test = bool(self._functions) and self._functions[-1].startswith("test_")
        if _name(node.func) == "sleep" and (in_test or self._loops) and not _is_hang(node):
            self._offence(node, "sleeps: wait with until of faults/waiting.py")
        self.generic_visit(node)

    def visit_Assert(self, node: ast.Assert) -> None:
        for each in ast.walk(node.test):
            if isinstance(each, ast.Compare) and _is_limit(each):
                self._offence(node, "compares a time: a busy machine decides")
        self.generic_visit(node)

    def _offence(self, node: ast.stmt | ast.expr, what: str) -> None:
        self.offences.append(f"line {node.lineno}: {what}")


def _name(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_hang(call: ast.Call) -> bool:
    """A sleep of a minute and more stands for what never comes."""
    (seconds,) = call.args
    return isinstance(seconds, ast.Constant) and seconds.value >= 60


def _is_limit(compared: ast.Compare) -> bool:
    """Whether something has to be quick; that it takes some time is true on any machine."""
    if not any(isinstance(operator, ast.Lt | ast.LtE) for operator in compared.ops):
        return False
    for each in ast.walk(compared):
        if isinstance(each, ast.Attribute) and ast.unparse(each) == "done.seconds":
            return True
        if isinstance(each, ast.Call) and _name(each.func) in CLOCKS:
            return True
    return False


def offences(text: str) -> list[str]:
    law = Law()
    law.visit(ast.parse(text))
    return law.offences


def test_no_test_sleeps_compares_a_time_or_asks_for_a_port():
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path != HELPER and path.parent.name != "exercises":  # answers, which are no tests
            found += [f"{path.relative_to(TESTS)}, {each}" for each in offences(path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "def test_a():\n    time.sleep(1)",
        "def helper():\n    while not done():\n        sleep(0.1)",
        "def test_a():\n    assert done.seconds < 30",
        "def test_a():\n    assert time.monotonic() - begun < 30",
        "def free_port():\n    pass",
    ],
)
def test_each_offence_is_found(text):
    assert len(offences(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "def test_a():\n    def late(rank):\n        time.sleep(3)\n    ranks.run(late)",
        "def test_a():\n    assert done.seconds > 0",
    ],
)
def test_a_rank_may_be_slow_and_time_may_pass(text):
    assert offences(text) == []
