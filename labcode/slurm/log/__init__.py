"""What a job printed, read for a person: no torch, and of anybody's training script.

lines   a line: its text, and which rank and host wrote it when
kinds   what can go wrong: how the output says so, what it means, what to do
ends    how processes ended, as launchers report it
story   what failed first, and what only followed
tell    the story in sentences

`python -m labcode.doctor job FILE...` prints it, and `slurm.run.outcome` takes its first line.
"""
