"""All rules about batch scripts; the table of them: `python -m labcode.slurm lint --rules`."""

from labcode.slurm.lint import rules_directives, rules_signals, rules_sizes, rules_starts
from labcode.slurm.lint.rule import Rule

_ALL = (*rules_directives.RULES, *rules_sizes.RULES, *rules_starts.RULES, *rules_signals.RULES)
RULES: tuple[Rule, ...] = tuple(sorted(_ALL, key=lambda rule: rule.number))
