"""The short trainings of lesson 19, with a fault on one rank."""

import math

from course.labs import l19_runs as lab


def test_a_fault_of_one_rank_reaches_all_gradients_and_the_probe_names_it(ranks2, tmp_path):
    options = "--parallel.tp 2 --debug.probe --train.steps 1 --train.eval_batches 1"
    fault = lab.Fault(1, "blocks.1.mlp.up", "forward", math.inf)
    found = ranks2.run(lab.train, options, str(tmp_path / "run"), fault)
    assert all(each.num_bad_gradients > 0 and math.isnan(each.val_loss) for each in found)
    assert "own product of blocks.1.mlp.up (rank 1," in found[0].said
    right = ranks2.run(lab.train, options, str(tmp_path / "run"))
    assert len(right[0].losses) == 1 and 3 < right[0].val_loss < 5
    assert right[1].num_bad_gradients == 0
