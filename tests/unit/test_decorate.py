"""What the builder adds to a lesson: links, boxes, a first line for a wrong kernel."""

import pytest

from tools import decorate
from tools.decorate import Headline, headline, navigation, with_links, with_sections
from tools.lesson_source import notebooks_of

COURSE = [
    Headline("00_start", "Start", 30),
    Headline("01_ranks", "Ranks", None),
    Headline("04_ddp", "DDP", 60),
]


def test_headline():
    text = (
        "# %% [markdown]\n# # 04 · Data parallel, by hand\n# %% [markdown]\n# **Time**: 75 minutes."
    )
    assert headline("04_ddp", text) == Headline("04_ddp", "Data parallel, by hand", 75)
    assert headline("04_data_parallel", "# %%\nx = 1\n") == Headline(
        "04_data_parallel", "data parallel", None
    )


def test_navigation_leads_to_neighbours_map_and_solution():
    links = navigation("01_ranks", COURSE, is_solution=False)
    assert [link.strip() for link in links.split("&nbsp;|&nbsp;")] == [
        "[← 00 Start](00_start.ipynb)",
        "[Map of the course](../COURSE.md)",
        "[Glossary](../book/glossary.md)",
        "[Solution of this lesson](../solutions/01_ranks.ipynb)",
        "[04 DDP →](04_ddp.ipynb)",
    ]
    solved = navigation("04_ddp", COURSE, is_solution=True)
    assert "[This lesson, to solve](../notebooks/04_ddp.ipynb)" in solved and "→" not in solved
    assert "←" not in navigation("00_start", COURSE, is_solution=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "see arXiv:1909.08053, section 3",
            "see [arXiv:1909.08053](https://arxiv.org/abs/1909.08053)",
        ),
        ("doi 10.1145/3341301.3359646.", "[doi:10.1145/3341301.3359646](https://doi.org/"),
        (
            "## Sources\n- docs.pytorch.org/x.html.",
            "- [docs.pytorch.org/x.html](https://docs.pytorch.org/x.html).",
        ),
        ("## Sources\n- https://a.org/b: c", "- [a.org/b](https://a.org/b): c"),
    ],
)
def test_sources_can_be_clicked(text, expected):
    assert expected in with_links(text)
    assert with_links(with_links(text)) == with_links(text)


@pytest.mark.parametrize(
    "text",
    [
        "`arXiv:1909.08053`",
        "[paper](https://arxiv.org/abs/1909.08053)",
        "docs.pytorch.org in the prose",
        "## Sources\n`docs.pytorch.org` and <https://a.org> and README.md and torch.distributed",
        "## Sources\n- someone@example.org\n## Recap\nexample.org",
    ],
)
def test_what_is_no_source_stays(text):
    assert with_links(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "as in lesson\n04, section 2.",
            "as in [lesson\n04, section 2](04_ddp.ipynb#cell-id=section-2).",
        ),
        ("01 (section 3)", "01 ([section 3](01_ranks.ipynb#cell-id=section-3))"),
        (
            "04 (sections 1 and 3)",
            "04 (sections [1](04_ddp.ipynb#cell-id=section-1)"
            " and [3](04_ddp.ipynb#cell-id=section-3))",
        ),
        ("lesson 99, section 2", "lesson 99, section 2"),
        ("`lesson 04, section 2`", "`lesson 04, section 2`"),
        ("arXiv 2006.15704, section 3", "arXiv 2006.15704, section 3"),
        ("PyTorch 2.04, section 3", "PyTorch 2.04, section 3"),
    ],
)
def test_sections_of_other_lessons_can_be_clicked(text, expected):
    assert with_sections(text, COURSE) == expected


SOURCE = """\
# %% [markdown]
# # 01 · Ranks
# Some prose.
#
# Then more. **Predict.** How many?
#
# - or a list

# %% tags=["predict"]
guess = 4

# %% [markdown]
# **Predict.** Nobody asks here.

# %%
%%px
x = 1
"""


def test_a_lesson_with_all_of_it():
    solution, student = notebooks_of(SOURCE, "01_ranks.py", COURSE)
    top = student.cells[0].source
    assert top.startswith("[← 00 Start](00_start.ipynb)")
    assert "\n\n# 01 · Ranks\nSome prose.\n\n" in top
    box = decorate.BOX.format("Then more. **Predict.** How many?\n\n- or a list")
    assert top.endswith(box) and solution.cells[0].source.endswith(box)
    predict = student.cells[1].source.splitlines()
    assert predict == [decorate.GUARD, decorate.PREDICT, "guess = ...  # your prediction"]
    assert solution.cells[1].source.splitlines() == [decorate.GUARD, "guess = 4"]
    assert "<div" not in student.cells[2].source
    assert student.cells[3].source.startswith("%%px")
    assert "[04 DDP →](04_ddp.ipynb)" in student.cells[-1].source
    assert len(student.cells) == 5  # its last cell was code
    assert student.metadata.lesson.title == "Ranks" and student.metadata.lesson.minutes is None
    bare, _ = notebooks_of(SOURCE, "01_ranks.py")
    assert bare.cells[0].source.startswith("# 01")


def test_the_box_has_borders_and_no_ground_so_that_every_theme_can_be_read():
    assert "border" in decorate.BOX
    assert "background" not in decorate.BOX and "class=" not in decorate.BOX


def test_the_guard_is_one_readable_line_and_leaves_magics_first():
    assert len(decorate.GUARD) <= 90 and len(decorate.PREDICT) <= 90
    assert decorate.guarded("%%px\nx = 1") == "%%px\nx = 1"
    assert decorate.guarded("x = 1") == f"{decorate.GUARD}\nx = 1"
