"""The laws of the house, read from the sources.

Who imports whom, what is done in one place only, and how much one statement may hold. Every law is
a generator of what breaks it, and has an example of an offence that it must find.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMED_TEST = re.compile(r"(tests/[\w/]*test_\w+\.py)(?:::\s*(test_\w+))?")
sys.path.insert(0, str(ROOT))

from tools.rooms import (  # noqa: E402  (tools/ is not installed)
    DOORS,
    FLOORS,
    GROUND,
    NO_TORCH,
    WITH_TORCH,
)

PACKAGES = (ROOT / "labcode", ROOT / "course")
NOT_FOR_DATA = {"perf", "slurm"}
RANK_AWARE = ("labcode.comm", "labcode.parallel", "torch.distributed")
GROUP_MAKERS = {"new_group", "new_subgroups", "split_group"}
ENVIRONMENT = ("environ", "environb", "getenv", "getenvb", "putenv", "unsetenv", "expandvars")
USE_THE_COURSE = {"images.py", "maps.py", "handout.py"}  # of tools/: figures; solutions, packed
READS_ENVIRONMENT = (
    "labcode.runtime.bootstrap",
    "labcode.doctor.__main__",  # looks for what is wrong in it
    "course.pool.fork_server",  # sets those of its children
    "labcode.runtime.launch",  # hands its own on to its children
    "labcode.slurm.run.client",  # takes a job's variables out of it, for the commands of SLURM
    "labcode.slurm.run.local",  # stands in for the shell, which expands the path of the runs
    "course.exercises.simulated.baton",  # gives each simulated rank what torchrun sets
    "labcode.train.__main__",  # says how the threads of OpenMP wait, before torch starts them
    "course.labs.l14_stand_in",  # stands in for SLURM, which hands its variables to jobs
)


def room_of(name: str) -> str:
    """The room of a module: "comm" of labcode.comm.grid, "course" of course.labs.emulate."""
    package, *rest = name.split(".")
    if package == "course":
        return package
    first = rest[0] if rest else package
    return "ground" if first in GROUND else first


class Module:
    """One source file: its dotted name, its room, its syntax tree and all that it imports."""

    def __init__(self, file: str, text: str):
        self.file, self.text, self.tree = file, text, ast.parse(text)
        self.name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        self.package = file.endswith("__init__.py")
        self.room = DOORS.get(self.name) or room_of(self.name)
        self.imports = set(self._imports())

    def _imports(self):
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parents = self.name.split(".")
                    parents = parents[: len(parents) - node.level + self.package]
                    base = ".".join([*parents, base] if base else parents)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names)

    def calls(self):
        """(name of the called function, call) for each call."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield getattr(node.func, "attr", getattr(node.func, "id", "")), node

    @functools.cached_property
    def names(self):
        """Every name and attribute, and the last part of what is imported."""
        found = {getattr(node, "attr", getattr(node, "id", None)) for node in ast.walk(self.tree)}
        return found | {name.rpartition(".")[2] for name in self.imports if "." in name}

    def uses(self, name):
        """Whether `name` occurs as a name, an attribute or an imported name."""
        return name in self.names


def modules_of(sources):
    """`{file: text}` as `{dotted name: Module}`."""
    modules = [Module(file, text) for file, text in sources.items()]
    return {module.name: module for module in modules}


@pytest.fixture(scope="module")
def house():
    sources = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            sources[str(path.relative_to(ROOT))] = path.read_text()
    return modules_of(sources)


def edges(modules):
    """`{module: the labcode modules that it imports}`.

    A package counts only where nothing inside it is named.
    """
    found = {}
    for module in modules.values():
        known = {name for name in module.imports if name in modules and name != module.name}
        found[module.name] = {
            n for n in known if not any(other.startswith(n + ".") for other in known)
        }
    return found


# ---- the laws: each yields what breaks it


def climbs(modules):
    """Imports from a floor above, and from a room that is not for the importer."""
    for name, targets in edges(modules).items():
        room = modules[name].room
        if room not in FLOORS:
            yield f"{name}: the room {room}/ has no floor; give it one in this test"
            continue
        for target in sorted(targets):
            other = modules[target].room
            if FLOORS.get(other, 99) > FLOORS[room] or (room == "data" and other in NOT_FOR_DATA):
                yield f"{name} ({room}) imports {target} ({other})"


def imported_at_run_time(module, modules):
    """The modules that `import_module("labcode...")` may mean, also with a name that is begun."""
    for name, call in module.calls():
        if name == "import_module" and call.args:
            text = getattr(call.args[0], "values", call.args)[0]
            begun = str(getattr(text, "value", ""))
            if begun.startswith(("labcode.", "course.")):
                yield from (other for other in modules if other.startswith(begun))


def circles(modules):
    """Modules that import each other, directly or through others, now or at run time."""
    graph, done = edges(modules), set()
    for module in modules.values():
        graph[module.name] |= set(imported_at_run_time(module, modules))

    def walk(name, path):
        if name in path:
            yield " -> ".join([*path[path.index(name) :], name])
        elif name not in done:
            for target in sorted(graph[name]):
                yield from walk(target, [*path, name])
            done.add(name)

    for name in graph:
        yield from walk(name, [])


def torch_without_leave(modules):
    """Modules of the ground and the planning side that reach torch, with the way they take."""
    graph = edges(modules)
    for start in modules.values():
        if start.room not in NO_TORCH or start.name in WITH_TORCH:
            continue
        queue, seen = [[start.name]], {start.name}
        while queue:
            path = queue.pop(0)
            if any(imported.split(".")[0] == "torch" for imported in modules[path[-1]].imports):
                yield " -> ".join([*path, "torch"])
                break
            queue += [[*path, target] for target in graph[path[-1]] if target not in seen]
            seen |= graph[path[-1]]


def minislurm_leaning_on_labcode(modules):
    """Whatever minislurm/ imports from the rest of labcode: it could be published alone."""
    for module in modules.values():
        if module.room != "minislurm":
            continue
        for name in sorted(module.imports):
            inside = (name + ".").startswith("labcode.minislurm.")
            if name.split(".")[0] == "labcode" and not inside:
                yield f"{module.name} imports {name}"


def teachers_pets(modules):
    """What imports course/ without being a lesson or a test."""
    for module in modules.values():
        if module.room != "course" and any(
            (name + ".").startswith("course.") for name in module.imports
        ):
            yield f"{module.name} imports course"


def ranks_in_models(modules):
    """Models that know of ranks: only a model's plan and `models/parallelize.py` know both."""
    for module in modules.values():
        knows_both = module.name.endswith("_plan") or module.name == "labcode.models.parallelize"
        if module.room == "models" and not knows_both:
            for name in sorted(module.imports):
                if any((name + ".").startswith(aware + ".") for aware in RANK_AWARE):
                    yield f"{module.name} imports {name}"
            if "torch.distributed" in {
                ast.unparse(n) for n in ast.walk(module.tree) if isinstance(n, ast.Attribute)
            }:
                yield f"{module.name} uses torch.distributed"


def groups_made_elsewhere(modules):
    """Groups made outside comm/grid.py, or the default group outside runtime/bootstrap.py."""
    for module in modules.values():
        for name, _ in module.calls():
            if name in GROUP_MAKERS and module.name != "labcode.comm.grid":
                yield f"{module.name} calls {name}"
            if name == "init_process_group" and module.name != "labcode.runtime.bootstrap":
                yield f"{module.name} calls {name}"


def hidden_state(modules):
    """`global` statements, and environment variables outside runtime/bootstrap.py."""
    for module in modules.values():
        if any(isinstance(node, ast.Global) for node in ast.walk(module.tree)):
            yield f"{module.name} has a global statement"
        if module.name in READS_ENVIRONMENT:
            continue
        for name in ENVIRONMENT:
            if module.uses(name):
                yield f"{module.name} uses os.{name}"


def unsafe_calls(modules):
    """torch.load that may run code from the file, and shells."""
    for module in modules.values():
        for name, call in module.calls():
            options = {word.arg: getattr(word.value, "value", None) for word in call.keywords}
            target = ast.unparse(call.func)
            if target == "torch.load" and options.get("weights_only") is not True:
                yield f"{module.name}, line {call.lineno}: torch.load without weights_only=True"
            if options.get("shell") is True or target in ("os.system", "os.popen"):
                yield f"{module.name}, line {call.lineno}: {name} through a shell"


def undocumented(modules):
    """Public modules, functions and classes without a docstring; an empty file needs none."""
    for module in modules.values():
        if module.text.strip() and not ast.get_docstring(module.tree):
            yield f"{module.name} has no docstring"
        for node in module.tree.body:
            public = (
                isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
                and node.name[0] != "_"
            )
            if public and not ast.get_docstring(node):
                yield f"{module.name}.{node.name} has no docstring"


# ---- the laws of wording: one statement, one thought

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SEQUENCES = (ast.JoinedStr, ast.List, ast.Tuple, ast.ListComp)
TRUTHS = (ast.Compare, ast.BoolOp)


def statements(tree: ast.AST) -> Iterator[tuple[ast.stmt, list[ast.AST]]]:
    """Each statement with the nodes of its own expressions; those of its body belong to others."""
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt):
            continue
        own: list[ast.AST] = []
        waiting = list(ast.iter_child_nodes(statement))
        while waiting:
            node = waiting.pop()
            if isinstance(node, (ast.stmt, ast.excepthandler, ast.match_case)):
                continue
            own.append(node)
            waiting.extend(ast.iter_child_nodes(node))
        yield statement, own


def packed_comprehensions(modules) -> Iterator[str]:
    """Two comprehensions in one statement; more than one `for` and one `if` in a comprehension."""
    for module in modules.values():
        for statement, nodes in statements(module.tree):
            found = [node for node in nodes if isinstance(node, COMPREHENSIONS)]
            place = f"{module.file}:{statement.lineno}"
            if len(found) > 1:
                yield f"{place}: {len(found)} comprehensions in one statement"
            for node in found:
                ifs = len(node.generators[0].ifs)
                if len(node.generators) > 1 or ifs > 1:
                    yield f"{place}: a comprehension with more than one `for` and one `if`"


def is_sequence(node: ast.expr) -> bool:
    text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return text or isinstance(node, SEQUENCES)


def is_truth(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "isinstance")
    return isinstance(node, TRUTHS)


def multiplied_truths(modules) -> Iterator[str]:
    """`"s" * (n > 1)`: a sequence times a truth value, where a conditional expression is meant."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
                continue
            one_way = is_sequence(node.left) and is_truth(node.right)
            other_way = is_truth(node.left) and is_sequence(node.right)
            if one_way or other_way:
                yield f"{module.file}:{node.lineno}: a sequence times a truth value"


def tuple_assignments(modules) -> Iterator[str]:
    """`a, b, c = x, y, z`: three statements in one."""
    for module in modules.values():
        for node in ast.walk(module.tree):
            if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
                continue
            names = [target for target in node.targets if isinstance(target, ast.Tuple)]
            if names and len(node.value.elts) >= 3:
                yield f"{module.file}:{node.lineno}: {len(node.value.elts)} names assigned at once"


def unannotated(modules) -> Iterator[str]:
    """Functions, private ones too, with an argument or a result without a type.

    A cell of a lesson, which the builder has copied, is as the learner reads it.
    """
    for module in modules.values():
        if module.name.endswith("_by_hand"):
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, FUNCTIONS):
                continue
            given = node.args
            arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            arguments += [argument for argument in (given.vararg, given.kwarg) if argument]
            bare = [arg.arg for arg in arguments if arg.annotation is None]
            bare = [name for name in bare if name not in ("self", "cls")]
            if node.returns is None:
                bare.append("the result")
            if bare:
                yield f"{module.file}:{node.lineno}: {node.name} has no type for {', '.join(bare)}"


LAWS = (climbs, circles, torch_without_leave, teachers_pets, ranks_in_models, groups_made_elsewhere)
LAWS += (minislurm_leaning_on_labcode, hidden_state, unsafe_calls, undocumented)
WORDING = (packed_comprehensions, multiplied_truths, tuple_assignments, unannotated)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_house_keeps_the_law(law, house):
    assert len(house) > 10
    assert list(law(house)) == []


@pytest.mark.parametrize("law", WORDING, ids=lambda law: law.__name__)
def test_one_statement_holds_one_thought(law, house):
    assert list(law(house)) == []


@pytest.mark.parametrize("law", WORDING, ids=lambda law: law.__name__)
def test_tools_and_benchmarks_are_worded_like_the_library(law):
    files = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(files)}
    assert list(law(modules_of(sources))) == []


DOC = '"""Text."""\n'
OFFENCES = {
    "a floor above": (
        climbs,
        {"labcode/comm/a.py": "from labcode.models.b import c", "labcode/models/b.py": ""},
    ),
    "a floor above, relative": (
        climbs,
        {"labcode/comm/a.py": "from ..models import b", "labcode/models/b.py": ""},
    ),
    "a floor above, inside a function": (
        climbs,
        {
            "labcode/comm/a.py": "def f():\n    import labcode.train.loop",
            "labcode/train/loop.py": "",
        },
    ),
    "a room without a floor": (climbs, {"labcode/attic/a.py": ""}),
    "a circle": (
        circles,
        {"labcode/comm/a.py": "import labcode.comm.b", "labcode/comm/b.py": "from . import a"},
    ),
    "a circle at run time": (
        circles,
        {
            "course/a.py": "import_module(f'course.l{number}')",
            "course/l01.py": "from course import a",
        },
    ),
    "torch through another room": (
        torch_without_leave,
        {"labcode/perf/a.py": "import labcode.data.b", "labcode/data/b.py": "from torch import nn"},
    ),
    "minislurm with the ground under it": (
        minislurm_leaning_on_labcode,
        {"labcode/minislurm/a.py": "import labcode.runtime.units", "labcode/runtime/units.py": ""},
    ),
    "the course in the library": (
        teachers_pets,
        {"labcode/train/a.py": "from course.figures import plot"},
    ),
    "a model that communicates": (
        ranks_in_models,
        {"labcode/models/a.py": "import torch.distributed as dist"},
    ),
    "a model that communicates unseen": (
        ranks_in_models,
        {"labcode/models/a.py": "import torch\ntorch.distributed.barrier()"},
    ),
    "a group made elsewhere": (
        groups_made_elsewhere,
        {"labcode/parallel/a.py": "dist.new_group([0])"},
    ),
    "a second bootstrap": (
        groups_made_elsewhere,
        {"labcode/train/a.py": "dist.init_process_group('gloo')"},
    ),
    "a global": (hidden_state, {"labcode/comm/a.py": "def f():\n    global x\n    x = 1"}),
    "an environment variable": (hidden_state, {"labcode/train/a.py": "from os import environ"}),
    "an environment variable, by attribute": (
        hidden_state,
        {"labcode/train/a.py": "import os\nos.getenv('RANK')"},
    ),
    "an environment variable, inside a text": (
        hidden_state,
        {"labcode/slurm/a.py": "import os\nos.path.expandvars('$HOME')"},
    ),
    "an unsafe load": (unsafe_calls, {"labcode/train/a.py": "torch.load('x', weights_only=False)"}),
    "a shell": (unsafe_calls, {"labcode/a.py": "subprocess.run('ls', shell=True)"}),
    "no docstring": (undocumented, {"labcode/comm/a.py": DOC + "def f():\n    pass"}),
    "two comprehensions": (
        packed_comprehensions,
        {"labcode/a.py": "x = [a for a in b] + [c for c in d]"},
    ),
    "a comprehension in a comprehension": (
        packed_comprehensions,
        {"labcode/a.py": "x = {a: [c for c in a] for a in b}"},
    ),
    "a comprehension of two loops": (
        packed_comprehensions,
        {"labcode/a.py": "for x in [a for b in c for a in b]:\n    pass"},
    ),
    "a comprehension with two conditions": (
        packed_comprehensions,
        {"labcode/a.py": "f(a for a in b if a if not c)"},
    ),
    "text times a comparison": (multiplied_truths, {"labcode/a.py": "x = 's' * (n > 1)"}),
    "not times a list": (multiplied_truths, {"labcode/a.py": "x = (not n) * [1]"}),
    "three assignments in one": (tuple_assignments, {"labcode/a.py": "a, b, c = 1, [], None"}),
    "an argument without a type": (
        unannotated,
        {"labcode/a.py": "class A:\n    def f(self, x) -> None:\n        pass"},
    ),
    "a result without a type": (
        unannotated,
        {"labcode/a.py": "def f(x: int):\n    def g() -> int:\n        return x"},
    ),
}


@pytest.mark.parametrize("name", OFFENCES)
def test_each_law_catches_its_offence(name):
    law, sources = OFFENCES[name]
    assert len(list(law(modules_of(sources)))) == 1


def test_what_is_allowed_is_not_reported():
    modules = modules_of(
        {
            "labcode/runtime/units.py": DOC,
            "labcode/comm/grid.py": DOC
            + "import torch\nfrom labcode import topology\ndist.new_group([0])",
            "labcode/models/parallelize.py": DOC + "from labcode.comm import grid",
            "labcode/models/gpt_plan.py": DOC + "from labcode.parallel import tensor",
            "labcode/parallel/tensor.py": DOC + "a, b = (x for x in y if x)\nz = [0] * (n + 1)",
            "labcode/runtime/launch.py": DOC + "import os\nrun(env=os.environ)",
            "labcode/train/loop.py": DOC
            + "torch.load('x', weights_only=True)\nfrom labcode.models import parallelize",
        }
    )
    for law in (*LAWS, *WORDING):
        assert list(law(modules)) == []


def test_tools_and_benchmarks_use_of_the_course_its_catalog_ranks_and_figures():
    files = [*(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    modules = modules_of({str(path.relative_to(ROOT)): path.read_text() for path in files})
    users = set()
    for module in modules.values():
        for name in module.imports:
            beyond = not f"{name}.".startswith(("course.catalog.", "course.pool."))
            if name.startswith("course.") and beyond:
                users.add(Path(module.file).name)
    assert users == USE_THE_COURSE


def test_import_labcode_brings_nothing_else():
    """So that it is quick: `benchmarks/import_time.py` measures the time, which no test asserts."""
    code = (
        "import sys; before = set(sys.modules); import labcode; print(*set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["labcode"]


def test_the_ground_and_the_planning_side_import_without_torch(house):
    names = []
    for name, module in house.items():
        if module.room in NO_TORCH and name not in WITH_TORCH:
            names.append(name)
    load = f"[importlib.import_module(name) for name in {names!r}]"
    code = f"import importlib, sys; {load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def missing_tests(text: str) -> list[str]:
    """Tests named in "Held by: tests/unit/test_x.py::test_y", which may break after the colons."""
    missing = []
    for path, name in NAMED_TEST.findall(text):
        file = ROOT / path
        if not file.is_file() or (name and f"def {name}(" not in file.read_text()):
            missing.append(f"{path}::{name}")
    return missing


def test_a_test_that_is_named_exists():
    missing = []
    for folder in ("labcode", "tools", "benchmarks"):
        for source in sorted((ROOT / folder).rglob("*.py")):
            missing += missing_tests(source.read_text(encoding="utf-8"))
    assert missing == []


def test_a_test_that_does_not_exist_is_found():
    here = "tests/unit/test_architecture.py"
    assert missing_tests(f"Held by: {here}::\n    test_of_nothing") == [f"{here}::test_of_nothing"]
    assert missing_tests("Held by: tests/unit/test_nothing.py") == ["tests/unit/test_nothing.py::"]
