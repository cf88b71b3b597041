"""Rules about batch scripts: each fires on its wrong example and not on its right one.

None fires on a script that we generate.
"""

import pytest
from lint_examples import EXAMPLES, FACTS

from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.model import BatchJob, minutes
from labcode.slurm.lint.rule import Facts
from labcode.slurm.lint.rules import RULES

GOOD = """#!/bin/bash
#SBATCH --job-name=gpt_tiny
#SBATCH -N 2 --ntasks-per-node=2  # four ranks
#SBATCH --gpus-per-node=a100:2
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append --requeue
#SBATCH --signal=B:USR1@60

set -euo pipefail
trap 'scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)  # not srun python
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
command=(
    python -m labcode.train gpt_tiny
    --parallel.tp 2 --checkpoint.resume --checkpoint.every 100
)
srun --kill-on-bad-exit=1 \\
    "${command[@]}" &
wait $! || scontrol requeue "$SLURM_JOB_ID"
cat <<'END'
torchrun --standalone is only mentioned here
END
"""


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.number)
def test_each_rule_fires_on_its_wrong_example_and_not_on_the_right_one(rule):
    texts = EXAMPLES[rule.number]
    facts = FACTS.get(rule.number, Facts())
    wrong, right = (list(rule.find(BatchJob(text), facts)) for text in texts)
    assert wrong and not right
    line, found = wrong[0]
    assert 1 <= line <= texts[0].count("\n") + 1 and found


def test_rules_have_numbers_of_their_own_and_reasons_of_one_line():
    assert len({rule.number for rule in RULES}) == len(RULES) >= 20
    assert all(rule.why and "\n" not in rule.why + rule.message for rule in RULES)


def test_nothing_is_said_about_a_good_script():
    assert lint(GOOD) == []


def test_a_script_is_read_as_sbatch_and_bash_read_it():
    script = BatchJob(GOOD)
    assert (
        script.first.number("nodes"),
        script.ranks_per_node,
        script.world_size,
        script.first.gpus_per_node,
    ) == (2, 2, 4, 2)
    assert script.minutes == 10 and script.multi_node
    assert [command.line for command in script.sruns] == [18]
    assert script.sruns[0].text == 'srun --kill-on-bad-exit=1 "${command[@]}" &'
    assert script.found("labcode.train")[0].text.endswith(
        "--parallel.tp 2 --checkpoint.resume --checkpoint.every 100 )"
    )
    assert not script.torchruns and script.first.option("requeue").line == 7


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("90", 90),
        ("90:30", 90.5),
        ("1:30:00", 90),
        ("1-12", 2160),
        ("1-12:30", 2190),
        ("1-0:0:30", 1440.5),
        ("2h", None),
    ],
)
def test_time_limits_are_read_in_all_forms_of_slurm(text, expected):
    assert minutes(text) == expected


@pytest.mark.parametrize(
    ("directives", "gpus"),
    [
        ("--gres=gpu:2", 2),
        ("--gres=gpu:h100:8,nvme:1", 8),
        ("-G 8 -N 2", 4),
        ("--tres-per-task=cpu=8,gres/gpu:a100:2 -n 2", 4),
        ("--gpus-per-task=1 --ntasks-per-node=4", 4),
        ("--gres=nvme:1", None),
    ],
)
def test_gpus_are_counted_in_whichever_way_they_are_asked_for(directives, gpus):
    assert BatchJob(f"#!/bin/bash\n#SBATCH {directives}\n").first.gpus_per_node == gpus


@pytest.mark.parametrize(
    ("directives", "found"),
    [
        ("--time=2-00:00:00", "2880, the site's limit is 1440 minutes"),
        ("--gres=gpu:a100:8", "8, the site's limit is 4 GPUs on a node"),
        ("--nodes=16", "16, the site's limit is 8 nodes"),
        ("--nodes=8 --time=1-0 --gres=gpu:4", None),
    ],
)
def test_a_job_is_compared_with_each_limit_of_the_site(directives, found):
    site = Facts(max_minutes=1440, max_nodes=8, gpus_per_node=4)
    rule = next(rule for rule in RULES if rule.number == "S47")
    job = BatchJob(f"#!/bin/bash\n#SBATCH {directives}\n")
    assert [text for _, text in rule.find(job, site)] == ([found] if found else [])


def test_problems_come_in_the_order_of_lines_and_say_what_was_found():
    text = "#!/bin/bash\n#SBATCH --nodes=2\n# SBATCH --mem=4G\nsrun python train.py\necho end\n"
    problems = lint(text + "#SBATCH --time=10\n")
    assert [(p.line, p.rule, p.severity) for p in problems] == [
        (1, "S08", "warning"),
        (3, "S01", "warning"),
        (4, "S20", "warning"),
        (4, "S21", "warning"),
        (6, "S02", "error"),
    ]
    assert "# SBATCH --mem=4G" in problems[1].message
    assert str(problems[3]).startswith("line 4: warning S21: ") and "why: " in str(problems[3])


def test_text_that_is_no_script_is_a_problem_and_no_crash():
    for text in ("", "\n", "#SBATCH", "#!/bin/bash\n#SBATCH --output='open\n", "x=('\n"):
        assert lint(text)
    for text in ("cat <<EOF\nno end\n", "srun bash -c '\n", 'x="${y\n', "a=$(b\n", "srun -n\n"):
        assert lint(f"#!/bin/bash\n{text}") == []
