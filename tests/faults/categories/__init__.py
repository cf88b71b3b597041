"""The categories of the trial, in the order of its table. Each is a module with `cases(rng)`."""

NAMES = (
    "output_folder",
    "full_disk",
    "resume",
    "damaged_checkpoints",
    "kills",
    "numerics",
)
