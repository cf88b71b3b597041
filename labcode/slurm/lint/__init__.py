"""Faults in a batch script, found before it is submitted: `lint(text, site, job) -> [Problem]`.

shell             a line as bash takes it apart: words, quotes, variables filled in
launches          what the commands start: by srun or not, with which options, which program
parse             a script as sbatch and bash read it: directives, commands, counts
rule              what a rule is; Facts: what site and job say besides
rules_directives  rules about #SBATCH lines
rules_commands    rules about how ranks are started, how they meet, how they end
rules             rules that compare numbers with each other, the site and the job; all RULES
linter            lint and Problem
"""
