"""The rooms and the floor of each: read by the law that holds them and by their picture.

Held by: tests/unit/test_architecture.py
"""

# A room may import its own floor and lower ones. data/ stands on the ground, beside the floors;
# course/ may see everything.
FLOORS = {
    "ground": 0,
    "runtime": 0,
    "minislurm": 0,
    "perf": 1,
    "slurm": 1,
    "data": 1,
    "comm": 2,
    "parallel": 3,
    "precision": 3,
    "doctor": 3,
    "models": 4,
    "measure": 4,
    "debug": 4,
    "train": 5,
    "run": 6,
    "course": 7,
}
# Modules and folders of labcode that make up the room "ground": what users name in their scripts.
GROUND = {"labcode", "config", "recipes", "schedules", "topology"}
# Programs whose name is not that of the room that they belong to, since users type it.
DOORS = {
    "labcode.__main__": "course",
    "labcode.lab": "course",
    "labcode.train.__main__": "run",
}
NO_TORCH = ("ground", "runtime", "minislurm", "perf", "slurm")
# In these rooms, but made of torch: what measures, and how ranks find each other and agree.
WITH_TORCH = (
    "labcode.perf.saved_bytes",
    "labcode.runtime.agreement",
    "labcode.runtime.bootstrap",
    "labcode.runtime.errors",
    "labcode.runtime.meeting",
)
