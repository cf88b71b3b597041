"""The rooms of labcode and the floor of each: read by the law that holds them and by their picture.

Held by: tests/unit/test_architecture.py
"""

# A room may import its own floor and lower ones. data/ stands on the ground, beside the floors;
# teach/ may see everything.
FLOORS = {
    "ground": 0,
    "minislurm": 0,
    "perf": 1,
    "slurm": 1,
    "data": 1,
    "comm": 2,
    "pool": 3,
    "parallel": 3,
    "precision": 3,
    "doctor": 3,
    "models": 4,
    "train": 5,
    "teach": 6,
}
# Modules and folders of labcode that make up the room "ground".
GROUND = {
    "labcode",
    "__main__",
    "arguments",
    "command",
    "combinations",
    "config",
    "course",
    "fields",
    "file_kinds",
    "files",
    "fork_server",
    "hardware",
    "launch",
    "launch_rank",
    "processes",
    "recipes",
    "schedules",
    "suggest",
    "topology",
    "units",
    "waits",
}
DOORS = {"lab": "teach"}  # a module through which lessons come, and the room it belongs to
NO_TORCH = ("ground", "minislurm", "perf", "slurm")
