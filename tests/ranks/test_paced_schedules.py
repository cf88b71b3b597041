"""The emulated stages of lesson 12, on ranks: order, pace, memory and gradients are right."""

import pytest

from course.labs import l12_paced_pipeline
from labcode.perf.pipeline import StageTimes, simulate
from labcode.schedules import NAMES, schedule, waits_for


@pytest.mark.parametrize("name", NAMES)
def test_a_paced_run_keeps_the_order_the_pace_the_memory_and_the_gradients(ranks4, name):
    v = 2 if name == "interleaved" else 1
    actions, stage_s = schedule(name, 4 * v, 4, 4), StageTimes(2e-3, 2e-3, 2e-3)
    played = ranks4.run(l12_paced_pipeline.run_schedule, actions, 4 * v, 4, stage_s, repeats=3)
    simulated, measured = simulate(actions, stage_s), l12_paced_pipeline.timeline(played)
    assert l12_paced_pipeline.difference(played, 4 * v, 4) < 1e-12
    for rank, order in actions.items():
        rows = [row for row in measured.rows if row.rank == rank]
        assert [row.action for row in rows] == order
        assert all(row.stop_s - row.start_s >= stage_s.of(row.action.kind) - 1e-6 for row in rows)
        assert played[rank].peak == simulated.peak_microbatches(rank)
    stops = {row.action: row.stop_s for row in measured.rows}
    for row in measured.rows:  # waiting for an input is no work: it lies before the start
        for need in waits_for(row.action, 4 * v):
            assert row.start_s >= stops[need if need in stops else need._replace(kind="B")]
    assert measured.total_s >= simulated.total_s - 1e-6
    assert sum(one.sent[0] for one in played) == 2 * (4 * v - 1) * 4
    assert (
        sum(one.sent[1] for one in played)
        == 2 * (4 * v - 1) * 4 * l12_paced_pipeline.BATCH * l12_paced_pipeline.WIDTH * 8
    )


def test_an_experiment_counts_in_whole_ranks_worth_of_layers(ranks4, capsys):
    found = l12_paced_pipeline.play(ranks4, "interleaved", 4, StageTimes(2e-3, 2e-3, 2e-3), 2)
    assert found.is_right
    assert "those of one process: True" in capsys.readouterr().out
    assert found.kept == [4, 4, 3.5, 2.5]
    assert found.messages == 7 * 2 * 4
    assert found.simulated.busy_s() == pytest.approx(4 * 6e-3)
