"""Which tests of the release tier a commit runs, and that nothing else is left out."""

import subprocess
import sys
from pathlib import Path

import changed
import parts

ROOT = Path(__file__).resolve().parents[2]


def collected(*arguments: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "--collect-only", "tests/unit/test_slides.py"]
    command += [*arguments, "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_a_commit_leaves_out_release_tests_of_other_parts_alone():
    every = collected("-m", "")
    always = collected()
    assert 0 < len(always) < len(every)
    part = parts.of_this_commit()
    kept = []
    for name in every:
        if name in always or part is None or parts.of_test(name) == part:
            kept.append(name)
    assert collected("-m", "", "--part", "commit") == kept


def test_each_test_has_one_part_and_the_parts_are_alike():
    sizes = [0] * parts.PARTS
    for number in range(1000):
        sizes[parts.of_test(f"tests/exercises/test_answers.py::test_a_right_answer[{number}]")] += 1
    assert min(sizes) > 0.7 * 1000 / parts.PARTS


def test_what_tests_tell_a_story_of_is_there():
    for tests, subjects in changed.SUBJECTS.items():
        for pattern in (tests, *subjects):
            assert list(ROOT.glob(pattern)), f"no file is {pattern}: correct SUBJECTS"
