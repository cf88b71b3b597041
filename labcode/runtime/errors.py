"""The text of an error, on one line, for whom the traceback tells nothing."""

import os
import sys

import torch

from labcode.runtime.agreement import SharedError

# how the CPU's allocator says it, in a RuntimeError
NO_MEMORY = ("can't allocate memory", "not enough memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the machine or of the GPU did not suffice.

    Args:
        error: What ended the run on this rank.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in NO_MEMORY)


def text_of(error: BaseException) -> str:
    """The text of an error on one line; one of the operating system without its number.

    Args:
        error: What ended the run, or a part of it.
    """
    if isinstance(error, BrokenPipeError):
        _drop_output()
        return "the program that reads this one's output has ended"
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror.lower()
        return f"{error.filename}: {reason}" if error.filename else reason
    text = " ".join(str(error).split())  # torch's errors have several lines
    # one that was agreed on says it already, in the words of the rank that met it
    if is_out_of_memory(error) and not isinstance(error, SharedError):
        return f"not enough memory: {text}" if text else "not enough memory"
    return text


def _drop_output() -> None:
    """Let what is still to be printed go nowhere: the end of the process would try it again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
