"""The categories of the trial, in the order of its table. Each is a module with `cases(rng)`."""

NAMES = (
    "cli",
    "grids",
    "env",
    "text",
    "weather",
    "token_cache",
    "output_folder",
    "full_disk",
    "resume",
    "damaged_checkpoints",
    "kills",
    "signals",
    "torchrun",
    "pool",
    "numerics",
)
