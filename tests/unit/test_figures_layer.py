"""The drawings of a layer and of attention over ranks: what they show is what is computed."""

from collections import Counter

import pytest

from course.figures import plot
from course.figures.layer import BLOCKS
from course.figures.ring_attention import contributions, source_at
from labcode.config import GPTConfig
from labcode.perf.memory import layer_activations
from labcode.topology import GridShape

ALT = "Four words at least"


@pytest.mark.parametrize("tp", [1, 4])
def test_the_bars_are_what_a_layer_keeps(tp):
    """The bars are those of `perf.memory`, without the statistics, which are too small to draw."""
    config = GPTConfig(context_length=256, num_heads=8, hidden_size=128)
    kept = layer_activations(
        config, GridShape(tp=tp), batch=1, sequence_parallel=False, value_bytes=1
    )
    expected = sum(kept.values()) - kept["norm statistics"] - kept["log-sum-exp"]
    picture = plot.kept(tp=tp, alt=ALT)
    drawn = sum(p.get_height() for p in picture.axes[0].patches if p.get_gid() == "kept")
    assert drawn == pytest.approx(expected / (256 * 128))


def test_a_layer_is_its_two_blocks():
    assert BLOCKS["layer"] == BLOCKS["attention"] + BLOCKS["mlp"]
    with pytest.raises(ValueError, match="embedding"):
        plot.kept("embedding", alt=ALT)


def test_around_a_layer_own_tokens_are_where_the_norm_is():
    picture = plot.around_a_layer(alt=ALT)
    for axes, kind in zip(picture.axes, ("whole", "own")):
        gids = Counter(str(patch.get_gid()).split(" ", maxsplit=1)[0] for patch in axes.patches)
        assert gids[kind] >= 16
        assert gids["travel"] == {"whole": 1, "own": 2}[kind]
    assert len(picture.png()) < 90_000


@pytest.mark.parametrize("p", [2, 4])
def test_every_sum_comes_home_with_the_terms_of_all_ranks_that_see_its_keys(p):
    steps = contributions(p)
    assert len(steps) == p + 1
    for source, terms in enumerate(steps[-1]):
        assert sorted(terms) == list(range(source, p))
    for rank in range(p):
        # one more hop from where the last step leaves it
        assert source_at((rank - 1) % p, p - 1, p) == rank
        assert steps[-1][rank] == steps[-2][(rank - 1) % p]


@pytest.mark.parametrize("draw", [plot.ring_attention, plot.ring_gradients, plot.ulysses])
def test_drawings_of_attention_over_ranks(draw):
    assert len(draw(4, alt=ALT).png()) < 90_000
    with pytest.raises(ValueError, match="p=6"):
        draw(6, alt=ALT)


def test_the_ring_shows_every_part_on_every_rank_once():
    picture = plot.ring_attention(3, alt=ALT)
    seen = Counter(patch.get_gid() for axes in picture.axes for patch in axes.patches)
    assert seen == {f"Q{i}": 3 for i in range(3)} | {f"K{i} V{i}": 3 for i in range(3)}
