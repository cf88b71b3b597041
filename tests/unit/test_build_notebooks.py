"""The lesson pipeline on tiny lessons: what students see, what is stored, what counts as stale.

And how failures read, and what happens to a notebook that a student has worked in.
"""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

# tools/ is not installed
from tools import build_notebooks, check_links, course, fingerprint  # noqa: E402
from tools.lesson_source import STUB, LessonError, notebooks_of, solution_lines  # noqa: E402
from tools.notebook_run import (  # noqa: E402
    error_matches,
    open_exercise_problems,
    run,
    text_of,
    tidy,
)

LESSON = '''\
# %% [markdown]
# # 99 · Try
# Some prose.

# %%
import os, sys, types
from course.answer import Exercise
from course.check import check
exercises = {"99.1": Exercise(check=lambda answer: [None for _ in range(answer(1))] and None)}
sys.modules["course.exercises.l99"] = types.SimpleNamespace(EXERCISES=exercises)
print(os.getcwd())
print(sys.prefix, file=sys.stderr)

# %% tags=["predict"]
guess = 0.71  # one over the square root of two
low, high = 1, 2

# %% tags=["exercise"]
def double(x):
    """Twice x."""
    y = x
    ### BEGIN SOLUTION
    return 2 * y
    # the secret remark
    ### END SOLUTION

# %% tags=["check"]
check("99.1", double)

# %% tags=["raises-exception"] raises="ZeroDivisionError: division"
1 / 0

# %% tags=["solution-only"]
print("only for those who know")
'''


def both(text):
    return notebooks_of(text, "99_try.py")


def code(text):
    """The solution and the student version of a single code cell."""
    return [notebook.cells[0].source for notebook in both("# %%\n" + text)]


@pytest.fixture
def course_of_one(tmp_path):
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "99_try.py").write_text(LESSON)
    return tmp_path


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A course whose one lesson is built: executed once; the tests below work on copies."""
    root = tmp_path_factory.mktemp("built")
    (root / "solutions").mkdir()
    (root / "solutions" / "99_try.py").write_text(LESSON)
    assert build_notebooks.main([], root) == 0
    return root


@pytest.fixture
def copy(built, tmp_path):
    return shutil.copytree(built, tmp_path / "copy")


def content(root):
    return {
        path.parent.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in root.rglob("*.ipynb")
    }


# ---- solutions that later cells use

WITH_A_MODULE = '''# %% [markdown]
# # 98 · Try

# %%
import math
import os
from functools import cache, partial as part

# %% tags=["exercise", "by-hand"]
from operator import mul


@cache
def area(r):
    """Of a circle."""
    ### BEGIN SOLUTION
    return part(mul, math.pi)(r * r)
    ### END SOLUTION

# %%
print(area)
'''


def test_a_tagged_solution_becomes_a_module_with_the_imports_that_it_needs(tmp_path, capsys):
    source = tmp_path / "solutions" / "98_try.py"
    module = tmp_path / "course/labs/l98_by_hand.py"
    source.parent.mkdir()
    module.parent.mkdir(parents=True)
    source.write_text(WITH_A_MODULE)
    assert build_notebooks.main([], tmp_path) == 0
    imports, _, code = module.read_text().partition("\n\n\n")
    assert imports.splitlines()[2:] == [
        "from functools import cache",
        "from functools import partial as part",
        "from operator import mul",
        "import math",
    ]
    namespace = {}
    exec(module.read_text(), namespace)
    assert namespace["area"](2) == 4 * math.pi
    assert "SOLUTION" not in code
    assert build_notebooks.main(["--check"], tmp_path) == 0
    module.write_text("x = 1")
    capsys.readouterr()
    assert build_notebooks.main(["--check"], tmp_path) == 1
    assert "l98_by_hand.py is not what its source gives" in capsys.readouterr().out


# ---- what the student sees


def test_a_solution_in_a_function_becomes_a_stub():
    solution, student = code(
        "def f(x):\n    y = 1\n    ### BEGIN SOLUTION\n    return x + y\n    ### END SOLUTION\n"
    )
    assert solution == "def f(x):\n    y = 1\n    return x + y"
    assert student == f"def f(x):\n    y = 1\n    {STUB}"


def test_two_solutions_in_a_class():
    _, student = code(
        "class A:\n    ### BEGIN SOLUTION\n    size = 3\n    ### END SOLUTION\n\n    def f(self):\n"
        "        ### BEGIN SOLUTION\n        for i in x:\n            print(i)\n        # why\n"
        "        ### END SOLUTION\n"
    )
    assert student == f"class A:\n    size = ...  # your answer\n\n    def f(self):\n        {STUB}"


def test_a_solution_at_the_top_level_unsets_its_names():
    block = "total = sum(i for i in x)\na, (b, *c) = 1, (2, 3)\nmodel.weight = 4\nx[0] = 5\n"
    block += "def g():\n    inner = 1\n"
    _, student = code(f"x = [1]\n### BEGIN SOLUTION\n{block}### END SOLUTION\nprint(1)\n")
    names = [line.split(" = ")[0] for line in student.splitlines()[1:-1]]
    assert names == ["total", "a", "b", "c", "g"]
    assert code("### BEGIN SOLUTION\nprint(1)\n### END SOLUTION\n")[1] == "...  # your answer"


def test_broken_code_stands_in_the_place_of_the_solution_above_it():
    solution, student = code(
        "def f(x):\n    ### BEGIN BROKEN\n    # raise NotImplementedError\n    ### END BROKEN\n"
        "    ### BEGIN SOLUTION\n    y = x\n    ### END SOLUTION\n"
        "    ### BEGIN BROKEN\n    # if x:\n    #     y = 2  # two\n    ### END BROKEN\n"
        "    return y\n"
    )
    assert solution == "def f(x):\n    y = x\n    return y"
    broken = "    if x:\n        y = 2  # two"
    assert student == f"def f(x):\n    raise NotImplementedError\n{broken}\n    return y"


def test_magics_do_not_disturb():
    solution, student = code(
        "%%px --block\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION\n%time y = 2\n"
    )
    assert solution == "%%px --block\nx = 1\n%time y = 2"
    assert student == "%%px --block\nx = ...  # your answer\n%time y = 2"


def test_student_notebook():
    solution, student = both(LESSON)
    assert len(solution.cells) == 7 and len(student.cells) == 6
    text = "\n".join(cell.source for cell in student.cells)
    for secret in ("0.71", "square root", "2 * y", "secret remark", "only for those", "SOLUTION"):
        assert secret not in text
    unset = [f"{name} = ...  # your prediction" for name in ("guess", "low", "high")]
    assert "\n".join(unset) in text
    assert solution_lines(LESSON)[:2] == [
        "guess = 0.71  # one over the square root of two",
        "low, high = 1, 2",
    ]
    assert solution_lines(LESSON)[2:] == ["return 2 * y", "# the secret remark"]
    assert "SOLUTION" not in "\n".join(cell.source for cell in solution.cells)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "# %%\n### BEGIN SOLUTION\nx = 1\n",
            "cell 1: '### BEGIN SOLUTION' without '### END SOLUTION'",
        ),
        (
            "# %%\n### BEGIN BROKEN\n# x = 1\n### END SOLUTION\n",
            "cell 1, line 3: found '### END SOLUTION' where '### END BROKEN' was due",
        ),
        (
            "# %%\n### BEGIN BROKEN\nx = 1\n### END BROKEN\n",
            "cell 1, line 2: broken code is a comment: '# x = 1'",
        ),
        ("# %%\nx = 1\n### END SOLUTION\n", "cell 1, line 2: found '### END SOLUTION'"),
        (
            "# %%\n### BEGIN SOLUTION\n### BEGIN SOLUTION\nx = 1\n### END SOLUTION",
            "cell 1, line 2: found '### BEGIN",
        ),
        ("# %%\n## begin solution\nx = 1\n", "line 1: write the marker alone on its line"),
        (
            "# %%\nx = 1  ### BEGIN SOLUTION\n### END SOLUTION\n",
            "line 1: write the marker alone on its line",
        ),
        ("# %%\n### BEGIN SOLUTION\n# nothing\n### END SOLUTION\n", "line 2: an empty solution"),
        (
            "# %% [markdown]\n# ### BEGIN SOLUTION\n# text\n# ### END SOLUTION\n",
            "a solution in a markdown cell",
        ),
        (
            "# %%\nx = 1\n\n# %%\n### BEGIN SOLUTION\nx = = 1\n### END SOLUTION\n",
            "cell 2, line 2: invalid syntax",
        ),
    ],
)
def test_bad_markers_are_one_clear_line(text, message):
    with pytest.raises(LessonError) as caught:
        both(text)
    assert (
        message in str(caught.value)
        and "\n" not in str(caught.value)
        and "99_try.py" in str(caught.value)
    )


def test_cell_ids_come_from_the_content():
    first, again = both(LESSON)[0], both(LESSON)[0]
    assert [cell.id for cell in first.cells] == [cell.id for cell in again.cells]
    moved = both("# %%\nnew = 1\n\n" + LESSON)[0]
    assert [cell.id for cell in moved.cells[1:]] == [cell.id for cell in first.cells]
    twins = both("# %%\nx\n\n# %%\nx\n")[0].cells
    assert twins[0].id != twins[1].id
    nbformat.validate(moved)


def test_a_section_has_its_number_as_its_id():
    cells = both("# %% [markdown]\n# ## 3. Title (core, 5 min)\n#\n# ## 4. More (core, 1 min)\n")[
        0
    ].cells
    assert [cell.id for cell in cells] == ["section-3"]


# ---- building


def test_build_executes_and_stores(built):
    solution = nbformat.read(built / "solutions" / "99_try.ipynb", as_version=4)
    student = nbformat.read(built / "notebooks" / "99_try.ipynb", as_version=4)
    ran = [cell for cell in solution.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == [1, 2, 3, 4, 5, 6]
    assert ran[3].outputs[0].data["text/plain"] == "[v] 99.1 right"
    assert "✓ right</span> <b>99.1</b>" in ran[3].outputs[0].data["text/html"]
    assert ran[4].outputs[0].ename == "ZeroDivisionError"
    stdout, stderr = (output.text for output in ran[0].outputs)
    # neither this machine's folders nor the scratch folder's name
    assert (stdout, stderr) == ("<scratch>\n", ".venv\n")
    assert all(
        not cell.get("outputs") and cell.get("execution_count") is None for cell in student.cells
    )
    assert solution.metadata.kernelspec.name == "python3"
    # all that a kernel says, so that a notebook is not modified when it is opened; but no version
    assert set(solution.metadata.language_info) == {
        "codemirror_mode",
        "file_extension",
        "mimetype",
        "name",
        "nbconvert_exporter",
        "pygments_lexer",
    }
    text = json.dumps(solution)
    assert str(ROOT) not in text and sys.prefix not in text and str(Path.home()) + "/" not in text


def test_a_rebuild_writes_nothing(copy, capsys):
    before = content(copy)
    assert build_notebooks.main([], copy) == 0
    assert "kept outputs, nothing changed" in capsys.readouterr().out
    assert content(copy) == before and len(before) == 2
    assert build_notebooks.main(["--check"], copy) == 0
    assert "1 lessons: all up to date" in capsys.readouterr().out


def test_changed_prose_keeps_the_outputs(copy, capsys):
    source = copy / "solutions" / "99_try.py"
    source.write_text(LESSON.replace("Some prose.", "Better prose."))
    assert build_notebooks.main(["--check"], copy) == 1
    assert "cell 1 differs from its source in source" in capsys.readouterr().out
    assert build_notebooks.main(["99"], copy) == 0
    assert "kept outputs, written" in capsys.readouterr().out
    assert build_notebooks.main(["--check"], copy) == 0


def test_changed_code_is_executed_and_a_failure_writes_nothing(copy, capsys):
    before = content(copy)
    source = copy / "solutions" / "99_try.py"
    source.write_text(LESSON.replace("low, high = 1, 2", "low, high = 1"))
    assert build_notebooks.main([], copy) == 1
    out = capsys.readouterr().out
    assert (
        "FAILED, nothing written" in out
        and "99_try.py, cell 3: TypeError: cannot unpack" in out
        and "| low, high = 1" in out
    )
    assert "\x1b" not in out
    assert content(copy) == before


def test_an_expected_exception_must_come(copy, capsys):
    (copy / "solutions" / "99_try.py").write_text(LESSON.replace("1 / 0", "1 / 1"))
    assert build_notebooks.main([], copy) == 1
    assert "cell 6 is tagged raises-exception but raised nothing" in capsys.readouterr().out


def test_another_error_than_the_one_named_is_a_failure(copy, capsys):
    """`raises-exception` alone accepts any error, as of a model that is indexed wrongly."""
    before = content(copy)
    (copy / "solutions" / "99_try.py").write_text(LESSON.replace("1 / 0", "[][1]"))
    assert build_notebooks.main([], copy) == 1
    out = capsys.readouterr().out
    assert "cell 6 should raise 'ZeroDivisionError: division'" in out
    assert "but raised 'IndexError: list index out of range'" in out
    assert content(copy) == before


@pytest.mark.parametrize(
    ("expected", "raised", "matches"),
    [
        ("ValueError: bad", "ValueError: bad size", True),
        ("ValueError: bad", "ValueError: a bad size", False),
        ("ValueError", "TypeError: bad", False),
        (
            "RankError: rank ... RuntimeError: ... timed out",
            "RankError: rank 3: RuntimeError: [x]\n timed out",
            True,
        ),
        (
            "RankError: rank ... RuntimeError: ... timed out",
            "RankError: rank 3: RuntimeError: [x]",
            False,
        ),
    ],
)
def test_three_dots_stand_for_any_words_of_an_error(expected, raised, matches):
    assert error_matches(expected, raised) == matches


@pytest.mark.parametrize("head", ['tags=["raises-exception"]', 'raises="ValueError"'])
def test_a_broken_cell_says_what_it_raises(head):
    with pytest.raises(LessonError, match=r"99_try.py, cell 1: the tag .raises-exception. and"):
        both(f"# %% {head}\n1 / 0\n")


def test_a_cell_that_hangs_is_named(course_of_one, capsys):
    broken = '# %% tags=["raises-exception"] raises="ZeroDivisionError"\n1 / 0\n\n'
    (course_of_one / "solutions" / "99_try.py").write_text(broken + "# %%\nwhile True:\n    pass\n")
    assert build_notebooks.main(["--timeout", "1"], course_of_one) == 1
    out = capsys.readouterr().out
    assert "99_try.py, cell 2: no end after 1 s" in out and "| while True:" in out


def tampered(copy, folder, change):
    path = copy / folder / "99_try.ipynb"
    notebook = nbformat.read(path, as_version=4)
    change(notebook)
    nbformat.write(notebook, path)


TAMPERING = {
    "an edited solution": (
        "solutions",
        lambda nb: nb.cells[1].update(source="x"),
        "cell 2 differs from its source in source",
    ),
    "a lost tag": (
        "solutions",
        lambda nb: nb.cells[2].update(metadata={}),
        "cell 3 differs from its source in metadata",
    ),
    "a lost cell": ("solutions", lambda nb: nb.cells.pop(), "has 7 cells, its source gives 8"),
    "another error expected": (
        "solutions",
        lambda nb: nb.cells[5].metadata.update(raises="TypeError"),
        "cell 6 differs from its source in metadata",
    ),
    "another error raised": (
        "solutions",
        lambda nb: nb.cells[5].outputs[0].update(ename="TypeError"),
        "cell 6 should raise 'ZeroDivisionError: division', but raised 'TypeError: division by",
    ),
    "a cell not run": (
        "solutions",
        lambda nb: nb.cells[1].update(execution_count=None),
        "cell 2 was not executed",
    ),
    "an error kept": (
        "solutions",
        lambda nb: nb.cells[1].update(outputs=nb.cells[5].outputs),
        "cell 2 holds an error, ZeroDivisionError",
    ),
    "another hash": ("solutions", lambda nb: nb.metadata.lesson.update(sha256="0"), "metadata"),
    "another hash for students": (
        "notebooks",
        lambda nb: nb.metadata.lesson.update(sha256="0"),
        "metadata",
    ),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_check_finds(copy, capsys, name):
    folder, change, message = TAMPERING[name]
    tampered(copy, folder, change)
    assert build_notebooks.main(["--check"], copy) == 1
    out = capsys.readouterr().out
    assert f"{folder}/99_try.ipynb: " in out and message in out and "run `make notebooks`" in out


# ---- a student's own notebook


def solve(notebook):
    notebook.cells[3].source = "def double(x):\n    return 2 * x"


def rename(notebook):
    notebook.metadata["kernelspec"] = {"name": "my-env", "display_name": "mine"}


USED = {
    "an answer": solve,
    "a cell added": lambda nb: nb.cells.append(nbformat.v4.new_code_cell("my = 1")),
    "a cell run": lambda nb: nb.cells[1].update(execution_count=3),
    "a hash lost": lambda nb: (solve(nb), nb.metadata.pop("lesson")),
}


@pytest.mark.parametrize("name", USED)
def test_a_students_notebook_is_left_alone(copy, capsys, name):
    """Also when its source has changed since."""
    tampered(copy, "notebooks", USED[name])
    path = copy / "notebooks" / "99_try.ipynb"
    before = path.read_bytes()
    assert build_notebooks.main(["--check"], copy) == 0
    assert "notebooks/99_try.ipynb: edited or run since it was built" in capsys.readouterr().out
    assert build_notebooks.main(["--check", "--strict"], copy) == 1
    assert "1 edited" in capsys.readouterr().out

    source = copy / "solutions" / "99_try.py"
    source.write_text(LESSON.replace("Some prose.", "Better prose."))
    assert build_notebooks.main([], copy) == 0
    assert "left the edited student notebook alone" in capsys.readouterr().out
    assert path.read_bytes() == before
    assert build_notebooks.main(["--check"], copy) == 0


@pytest.mark.release
def test_a_students_notebook_is_kept_beside_the_one_that_is_forced(copy, capsys):
    tampered(copy, "notebooks", solve)
    path = copy / "notebooks" / "99_try.ipynb"
    before = path.read_bytes()
    source = copy / "solutions" / "99_try.py"
    source.write_text(LESSON.replace("Some prose.", "Better prose."))
    for number in (1, 2):
        assert build_notebooks.main(["--force"], copy) == 0
        aside = path.with_name(f"99_try.yours-{number}.ipynb")
        assert aside.name in capsys.readouterr().out
        assert aside.read_bytes() == before
        assert nbformat.read(path, as_version=4).cells[0].source.endswith("Better prose.")
        assert build_notebooks.main(["--check", "--strict"], copy) == 0
        path.write_bytes(before)


def test_a_stale_notebook_that_nobody_touched_is_built_anew(copy, capsys):
    source = copy / "solutions" / "99_try.py"
    source.write_text(LESSON.replace("Some prose.", "Better prose."))
    assert build_notebooks.main(["--check"], copy) == 1
    out = capsys.readouterr().out
    assert "notebooks/99_try.ipynb: stale, cell 1 differs" in out and "edited" not in out
    assert build_notebooks.main([], copy) == 0
    student = nbformat.read(copy / "notebooks" / "99_try.ipynb", as_version=4)
    assert student.cells[0].source.endswith("Better prose.")


def test_what_jupyterlab_writes_into_a_saved_notebook_is_no_edit(copy, capsys):
    tampered(copy, "notebooks", rename)
    tampered(copy, "solutions", rename)
    assert build_notebooks.main(["--check", "--strict"], copy) == 0


def test_the_builder_runs_the_student_version_once_per_change_of_its_code(
    copy, capsys, monkeypatch
):
    source = copy / "solutions" / "99_try.py"
    student = copy / "notebooks" / "99_try.ipynb"
    _, fresh = build_notebooks.notebooks(source)
    assert build_notebooks.code_last_run(nbformat.read(student, as_version=4)) == (
        fingerprint.of_code(fresh)
    )
    ran = []
    monkeypatch.setattr(build_notebooks, "run_student", lambda *_: ran.append(1))
    source.write_text(LESSON.replace("return 2 * y", "return y + y"))  # students do not see it
    assert build_notebooks.main([], copy) == 0
    assert ran == []
    source.write_text(LESSON.replace("print(sys.prefix", "print(sys.path"))
    assert build_notebooks.main([], copy) == 0
    assert ran == [1]


def test_a_student_version_that_fails_writes_nothing(copy, capsys):
    before = content(copy)
    wrong = LESSON + "\n# %%\nprint(double(2))\n"  # uses the learner's function
    (copy / "solutions" / "99_try.py").write_text(wrong)
    assert build_notebooks.main([], copy) == 1
    out = capsys.readouterr().out
    assert "student version, cell 7: NotImplementedError" in out
    assert content(copy) == before


def test_check_finds_missing_notebooks_and_orphans(copy, capsys):
    (copy / "notebooks" / "99_try.ipynb").rename(copy / "notebooks" / "98_old.ipynb")
    assert build_notebooks.main(["--check"], copy) == 1
    out = capsys.readouterr().out
    assert "99_try.ipynb is missing in notebooks/" in out and "98_old.ipynb has no source" in out


def test_an_unknown_lesson_is_one_line(copy, capsys):
    assert build_notebooks.main(["42"], copy) == 1
    assert capsys.readouterr().out == "no lesson begins with '42': the sources are 99_try\n"


def test_tidy_joins_streams_and_drops_widgets():
    cell = nbformat.v4.new_code_cell("x")
    stream = nbformat.v4.new_output
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "a"}, "text/plain": "0%"}
    cell.outputs = [
        stream("stream", name="stdout", text=" 10%\r 50%\r100%\n"),
        stream("display_data", data=widget),
        stream(
            "stream",
            name="stdout",
            text=f"<object at 0x7f12345678> in {ROOT}/labcode\n/tmp/ipykernel_12/34.py:1\n",
        ),
    ]
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})
    (output,) = tidy(notebook).cells[0].outputs
    assert output.text == "100%\n<object at 0x...> in ./labcode\n<cell>:1\n"
    assert "widgets" not in notebook.metadata


def test_what_is_shown_stays_between_what_is_printed_before_and_after():
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [
        output("stream", name="stdout", text="be"),
        output("stream", name="stdout", text="fore\n"),
        output("display_data", data={"text/plain": "[v] 1.1 right"}),
        output("stream", name="stdout", text="after\n"),
    ]
    tidy(nbformat.v4.new_notebook(cells=[cell]))
    assert text_of(cell.outputs) == "before\n[v] 1.1 right\nafter"


def test_what_a_cleared_status_leaves_is_not_stored():
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell("x")
    cell.outputs = [
        output("display_data", data={"text/html": "", "text/plain": ""}),
        output("display_data", data={"text/html": "<b>3</b>", "text/plain": "3"}),
    ]
    tidy(nbformat.v4.new_notebook(cells=[cell]))
    assert text_of(cell.outputs) == "3"


def test_course_prints_a_table(copy, capsys):
    assert course.main(copy) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["lesson", "seconds", "result"]
    assert (
        out.splitlines()[1].split()[::2] == ["99_try", "ok"]
        and "1 of 1 lessons ran to the end" in out
    )
    tampered(copy, "solutions", lambda nb: nb.cells[1].update(source="undefined"))
    assert course.main(copy) == 1
    out = capsys.readouterr().out
    assert "FAILED" in out and "99_try.ipynb, cell 2: NameError" in out and "0 of 1 lessons" in out
    assert course.main(copy / "notebooks") == 1  # nothing there
    capsys.readouterr()
    assert course.main(copy, ["42"]) == 1
    assert capsys.readouterr().out == "no lesson begins with '42': there are 99_try\n"


def test_course_explains_itself():
    """`--help` once was taken for the name of a lesson."""
    command = [sys.executable, "-m", "tools.course", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: python -m tools.course [-h] [lesson ...]")


def test_student_notebook_runs_to_the_end(copy):
    notebook = run(nbformat.read(copy / "notebooks" / "99_try.ipynb", as_version=4))
    shown = notebook.cells[4].outputs[0].data
    assert shown["text/plain"] == "[ ] 99.1 not done yet"
    assert open_exercise_problems(notebook) == []
    shown["text/plain"] = "[v] 99.1 right"
    assert open_exercise_problems(notebook) == [
        "cell 5, with its exercise open, printed '[v] 99.1 right'"
    ]
    assert notebook.cells[5].execution_count == 5


def test_links(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.md").write_text("# The Map, drawn\n[up](../a.md) [self](#the-map-drawn)")
    text = "[b](sub/b.md#the-map-drawn) [web](https://example.org/x) `[code](nowhere)`"
    text += " [gone](c.md) [bad](sub/b.md#x)"
    (tmp_path / "a.md").write_text(
        f'{text}\n\n```\n[in code](nowhere)\n```\n<img src="lost.png"> [out](../../etc)\n'
    )
    links = "[map](#heading=The-Map) [a](a.md) [no](#the-map) [here](#cell-id=m) [none](#cell-id=x)"
    cells = [nbformat.v4.new_markdown_cell(f"# The Map\n{links}", id="m")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "n.ipynb")
    assert check_links.main(tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a.md: c.md (no such file)",
        "a.md: sub/b.md#x (no such heading)",
        "a.md: lost.png (no such file)",
        "a.md: ../../etc (outside the repository)",
        "n.ipynb: #the-map (no such heading)",
        "n.ipynb: #cell-id=x (no such heading)",
        "3 documents: 6 broken links",
    ]
