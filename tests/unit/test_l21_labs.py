"""The capstone: its briefs, its search, its job, and that all of them say the same number."""

import dataclasses

import pytest

from course.exercises import l21
from course.labs import l20_plan
from course.labs import l21_capstone as lab
from course.labs.l20_plan import Layout
from labcode.perf.cluster import load_cluster
from labcode.runtime.units import GIB
from labcode.slurm.run.submit import submit
from labcode.slurm.script.predict import predicted
from labcode.slurm.script.render import render
from labcode.topology import GridShape

CHOSEN = Layout(64, 4, 4, 1, 1, "none")
NO_ZERO = CHOSEN._replace(zero=0)


@pytest.mark.parametrize("layout", [CHOSEN, Layout(32, 8, 4, 0, 1, "full")])
def test_the_scripts_header_has_the_numbers_of_the_lesson(layout):
    job = lab.job(layout, lab.H100)
    ours = lab.predicted(layout, lab.H100)
    theirs = predicted(job, lab.site())
    assert theirs.step_s == pytest.approx(ours.step_s)
    assert theirs.memory_bytes == pytest.approx(ours.memory_bytes)
    text = render(job, lab.site())
    assert f"{ours.memory_bytes / GIB:.1f} of 79.1 GiB" in text


def test_a_layout_that_does_not_fit_is_refused_by_submit():
    assert lab.broken_rules(NO_ZERO, lab.H100) == ["memory"]
    with pytest.raises(ValueError, match=r"predicted 94\.5 GiB on a GPU of 79\.1"):
        submit(lab.job(NO_ZERO, lab.H100), lab.site(), here=True)


def test_candidates_are_the_layouts_that_break_no_rule_but_memory():
    found = lab.candidates(lab.H100)
    assert found == sorted(found)
    for candidate in found:
        assert set(lab.broken_rules(candidate.layout, lab.H100)) <= {"memory"}
    assert lab.fitting(lab.H100)[0].layout == CHOSEN
    six = dataclasses.replace(lab.H100.cluster, gpus_per_node=6)
    on_six = lab.candidates(dataclasses.replace(lab.H100, cluster=six))
    assert {candidate.layout.tp for candidate in on_six} == {1, 2}


def test_several_layouts_can_be_defended_and_that_of_the_other_brief_cannot():
    fitting = lab.fitting(lab.TASK)
    least = fitting[0].step_s
    fast = [found.layout for found in fitting if found.step_s <= 1.05 * least]
    assert len(fast) == 8 and CHOSEN not in fast
    everything = lab.candidates(lab.TASK)
    for layout in fast:
        mine = lab.predicted(layout, lab.TASK)
        losing = []
        for kind, rival in lab.rivals(layout, everything).items():
            other = lab.predicted(rival.layout, lab.TASK)
            amount, _, _ = lab.verdict(mine, other, lab.TASK.room_bytes)
            if amount > 0:
                losing.append(kind)
        assert len(losing) >= 2


def test_model_flops_and_mfu_are_those_of_the_planner():
    about = lab.predicted(CHOSEN, lab.H100)
    work = l20_plan.flops(lab.GPT_70B, lab.H100.global_batch)
    assert work == pytest.approx(about.model_flops, rel=1e-3)
    days, mfu = lab.days_and_mfu(lab.H100, about.step_s)
    assert mfu == pytest.approx(about.mfu, rel=1e-3)
    assert days < lab.H100.most_days


def test_the_file_of_ten_lines_is_the_cluster_of_the_description(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = lab.own_cluster()
    assert found.gpu is load_cluster("perlmutter").gpu
    assert found.between.beta_bytes_per_s == pytest.approx(2 * 100e9 / 8 / 4)
    slower = lab.with_network(found, 0.25)
    assert slower.between.beta_bytes_per_s == found.between.beta_bytes_per_s / 4
    assert slower.inside == found.inside


def test_the_rubric_judges_each_point_alone():
    judged = l21.rubric(
        CHOSEN, {"step_s": 1, "memory_gib": 1, "days": 1, "rivals": [(CHOSEN, 0, "s", "tp")] * 2}
    )
    assert set(judged) == set(l21.POINTS)
    assert [name for name, why in judged.items() if not why] == ["legal", "fits"]


def test_the_miniature_has_the_axes_of_the_plan():
    assert lab.miniature(CHOSEN) == GridShape(dp=2, pp=2, tp=2)
    assert lab.miniature(Layout(dp=16)) == GridShape(dp=2)
    assert lab.largest_gap([1.0, 2.0], [1.0, 2.02]) == pytest.approx(0.0099, rel=1e-2)


def test_another_convention_of_bytes_chooses_another_layout():
    """What the lesson says of the four lists."""
    found = {}
    for convention in lab.CONVENTIONS:
        brief = dataclasses.replace(lab.H100, convention=convention)
        found[convention] = [entry.layout for entry in lab.fitting(brief)]
    assert found["4+4+8"][0] == CHOSEN
    assert found["2+2+12"][0] == Layout(512, 1, 2, 3, 1, "none")
    assert found["2+2+12"].index(CHOSEN) == 3
    assert found["2+4+12"][0] == Layout(256, 1, 4, 3, 2, "none")
    assert found["FSDP2"][:4] == found["2+4+12"][:4]  # the same bytes travel
    bytes_of = dict.fromkeys(lab.CONVENTIONS, 0.0)
    for name, kept in lab.CONVENTIONS.items():
        for what in ("weight_bytes", "gradient_bytes", "optimizer_bytes"):
            bytes_of[name] += kept[what]
    assert bytes_of == {"4+4+8": 16, "2+2+12": 16, "2+4+12": 18, "FSDP2": 16}


def test_fsdp2_keeps_in_a_pipeline_what_it_has_gathered_and_the_sums_of_gradients():
    fsdp2 = dataclasses.replace(lab.H100, convention="FSDP2")
    megatron = dataclasses.replace(lab.H100, convention="2+4+12")
    assert lab.predicted(CHOSEN, fsdp2).memory_bytes == (
        lab.predicted(CHOSEN, megatron).memory_bytes
    )
    sharded = Layout(512, 1, 2, 3, 1, "none")
    less = lab.predicted(sharded, megatron).memory_bytes
    less -= lab.predicted(sharded, fsdp2).memory_bytes
    parameters = l20_plan.parameters(lab.GPT_70B)
    assert less == pytest.approx(2 * parameters / 1024, rel=0.01)


def test_the_travel_is_what_dp_takes_without_overlap():
    at_home = Layout(dp=16, zero=1, micro_batch=4)
    brief = lab.Brief(lab.GPT_1B, lab.own_cluster(), 16, 256, 26e9, 7)
    left_s = lab.predicted(at_home, brief).parts["dp"]
    assert 0 < left_s < lab.travel_s(at_home, brief)
