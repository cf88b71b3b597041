"""`%%px` cells: how a notebook sends them to the ranks of its pool, and how a rank runs one."""

import ast
import itertools
import weakref
from typing import Any

_numbers = itertools.count(1)


def run(source: str, name: str, names: dict[str, Any]) -> None:
    """Run a cell, and print what its last line gives, as a notebook shows it.

    Args:
        source: Text of the code.
        name: Name by which tracebacks know it.
        names: What cells before it have defined; this one adds to it.
    """
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), names)
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), names)
        if value is not None:
            print(repr(value))


def register(shell: Any, pool: Any) -> None:
    """From now on `%%px` cells and `%px` lines of a notebook run on this pool.

    Args:
        shell: The notebook's IPython shell.
        pool: The `Ranks`; it may go meanwhile.
    """
    found = weakref.ref(pool)

    def px(line: str, cell: str | None = None) -> None:
        pool = found()
        if pool is None:
            raise RuntimeError("the pool of ranks is gone: make a new one with Ranks(n)")
        source = shell.transform_cell(line if cell is None else cell)
        pool.run_cell(source, f"<%%px cell {next(_numbers)}>")

    shell.register_magic_function(px, "line_cell", "px")
