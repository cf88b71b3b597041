"""The drawings of a batch job."""

import pytest

from course.figures import plot

ALT = "Four words at least"


def texts(picture):
    return [text.get_text() for text in picture.axes[0].texts]


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_the_chain_has_every_rank_once_and_one_script(launcher):
    picture = plot.launch_chain(nodes=3, ranks_per_node=2, launcher=launcher, alt=ALT)
    words = texts(picture)
    assert [word for word in words if word.startswith("rank")] == [f"rank {i}" for i in range(6)]
    assert words.count("torchrun") == (3 if launcher == "torchrun" else 0)
    assert words.count("your script, once") == 1
    assert {"n1", "n2", "n3"} <= set(words)


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(ValueError, match="9 nodes x 2 ranks cannot be drawn"):
        plot.launch_chain(nodes=9, alt=ALT)


def test_a_second_attempt_names_its_four_steps_in_order():
    numbered = [word for word in texts(plot.second_attempt(alt=ALT)) if word[0].isdigit()]
    assert numbered == ["1 USR1", "2 scancel --signal", "3 exit code 0", "4 scontrol requeue"]
