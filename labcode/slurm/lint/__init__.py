"""Faults in a batch script, found before it is submitted: `lint(text, site, job) -> [Problem]`.

options           the options of sbatch and srun, and how a line of them is read
shell             a line as bash takes it apart: words, quotes, variables filled in
launches          what the commands start: by srun or not, with which options, which program
parse             a script as sbatch and bash read it: directives and commands
model             what SLURM makes of it: components, steps, GPUs of a task, the way of a signal
rule              what a rule is; Facts: what site and job say besides
rules_directives  rules about #SBATCH lines and the variables that they set
rules_sizes       rules about nodes, tasks, GPUs and cores, of the job, its steps and the site
rules_starts      rules about how ranks are started, how they meet, whose exit code is the job's
rules_signals     rules about where a signal arrives and what a requeue hits
rules             all RULES
linter            lint and Problem
"""
