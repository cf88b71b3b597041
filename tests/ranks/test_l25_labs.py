"""The labs of lesson 25: packed rows, a step under DDP, an MLP with adapters, and flat units."""

import pytest
import torch

from course.labs import l25_by_hand as by_hand
from course.labs import l25_tuning as lab
from course.pool.answers import RankError

NUMBER = 64 * 64 + 2 * 2 * 64  # of a weight and its adapter of rank 2


def test_pairs_are_two_lines_and_the_second_one_is_in_capitals():
    assert len(lab.pairs()) > 4000
    prompt, answer = lab.pairs()[0]
    assert prompt.endswith("\n") and answer == answer.upper()
    tokens, own = lab.token_pairs()[0]
    assert (len(tokens), len(own)) == (len(prompt), len(answer) + 1)
    assert own[-1] == 0


@pytest.mark.parametrize("kind", ["learned", "rotary"])
def test_a_document_of_a_packed_row_is_what_it_is_alone(kind):
    chosen = lab.token_pairs()[:3]
    alone = lab.documents_alone(lab.small(kind), chosen)
    tokens, _, positions, mask = by_hand.pack(chosen)

    def off(mask, positions):
        model = by_hand.with_mask(lab.small(kind), mask)
        return lab.off_alone(model(tokens[None], positions), alone)

    assert max(off(mask, positions)) < 1e-12
    without = off(torch.ones_like(mask).tril(), positions)
    assert without[0] < 1e-12 and min(without[1:]) > 1e-3
    through = off(mask, torch.arange(len(tokens)))
    if kind == "rotary":
        assert max(through) < 1e-12
    else:
        assert through[0] < 1e-12 and min(through[1:]) > 1e-3


def test_rank_3_has_a_micro_batch_in_which_nothing_counts():
    counts = []
    for rank in range(4):
        batches = lab.micro_batches(rank, by_hand.targets_of)
        counts.append([int((targets != lab.NOT_COUNTED).sum()) for _, targets in batches])
    assert counts[3][1] == 0 < counts[3][0] < min(min(own) for own in counts[:3])


def test_a_step_under_ddp_is_that_of_one_process(ranks4):
    loss, gradient = lab.on_one_process(by_hand.targets_of)
    for value, found in ranks4.run(lab.under_ddp, by_hand.backward_of_step, by_hand.targets_of):
        assert abs(value - loss) < 1e-12
        assert lab.relative_error(found, gradient) < 1e-12


def test_partial_gradients_of_adapters_need_their_sum(ranks4):
    truth = lab.mlp_alone()
    for finish, right in ((True, set(truth)), (False, {"up B", "down A"})):
        of_ranks = ranks4.run(lab.mlp_on_ranks, by_hand.TunedMLP, finish)
        found = set()
        for name, expected in truth.items():
            whole = lab.whole_gradient([each[name] for each in of_ranks], expected)
            if lab.relative_error(whole, expected) < 1e-9:
                found.add(name)
        assert found == right


def test_a_flat_parameter_refuses_mixtures_and_keeps_a_gradient_of_everything(ranks4):
    with pytest.raises(RankError, match="uniform `requires_grad`"):
        ranks4.run(lab.flattened, False)
    with pytest.raises(RankError, match="uniform dtype"):
        ranks4.run(lab.flattened, True, torch.bfloat16)
    assert ranks4.run(lab.flat_gradient_numbers, 64, 2) == [NUMBER // 4] * 4


def test_bytes_that_are_kept():
    frozen = sum(param.numel() for param in lab.model_to_keep("all weights").parameters())
    adapters = 4 * 4 * (4096)  # four layers, r = 4, in and out of four weights
    assert lab.bytes_kept("all weights") == 16 * frozen
    assert lab.bytes_kept("LoRA") == 2 * frozen + 16 * adapters
    products = 4 * 12 * 256**2
    four_bits = lab.bytes_kept("QLoRA") - 2 * (frozen - products) - 16 * adapters
    assert four_bits == pytest.approx(0.516 * products, rel=1e-3)
