"""What a kernel runs before the first cell, if JupyterLab was started by `make lab`.

`%%px` cells come with the ranks that the first cell of a lesson starts. Without them, as after a
restart of the kernel, IPython would say that there is no such magic.
"""


def register() -> None:
    """Register a `%%px` that says what to do; a pool of ranks puts its own in the place of it."""
    from IPython.core.error import UsageError
    from IPython.core.getipython import get_ipython

    def px(line: str, cell: str | None = None) -> None:
        raise UsageError(
            "this kernel has no ranks: run the first cell of the lesson, which starts them, and "
            "the cells of this section, then this one again"
        )

    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(px, "line_cell", "px")


register()
del register  # this file runs among the names of the learner
