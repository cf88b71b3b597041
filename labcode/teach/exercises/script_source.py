"""What a check reads in the source of a learner's script.

A run shows what a script does. What it would do with GPUs, which this machine may not have, and
which names its file will lack, only the source can say.
"""

import ast
import builtins
import re
import symtable
from collections.abc import Collection, Iterator

MOVES = ("to", "cuda")
# A helper that the learner wrote or imported: what it moves is not known.
HELPER = re.compile(r"to_device|to_gpu|to_cuda|move|prefetch")
# What else may travel: results, the model.
NO_BATCH = re.compile(r"\b(loss|losses|model|net|ddp|build_model|total|mean\w*)\b")
OF_MODULE = ("__name__", "__file__", "__doc__")
FOR_SEVERAL = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.Lambda, ast.FunctionDef, ast.For)


def missing_names(source: str, header: str) -> list[str]:
    """The names that a function uses and its file does not know, in alphabetical order.

    Args:
        source: Of the function.
        header: What stands above it in the file.
    """
    known = {*dir(builtins), *OF_MODULE}
    for symbol in symtable.symtable(header, "header", "exec").get_symbols():
        known.add(symbol.get_name())
    used = set()
    for table in _tables(symtable.symtable(source, "source", "exec")):
        for symbol in table.get_symbols():
            at_top = table.get_type() == "module"
            is_bound = symbol.is_assigned() or symbol.is_imported()
            if is_bound and (at_top or symbol.is_declared_global()):
                known.add(symbol.get_name())
            elif symbol.is_global() and symbol.is_referenced():
                used.add(symbol.get_name())
    return sorted(used - known)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def what_stays_on_the_cpu(source: str) -> str:
    """What of a batch is never moved to the device, in words; "" where all is, or nothing is known.

    It looks for `.to()` and `.cuda()` in the loop in which backward is called, and for other places
    where people move a batch: a helper, a comprehension, the whole data set before the loop.
    """
    tree = ast.parse(source)
    loop = _training_loop(tree)
    if loop is None or _moved_elsewhere(tree, loop):
        return ""
    moved = []
    for node, is_for_several in _with_surroundings(loop):
        receiver = _moved(node)
        if receiver is None:
            continue
        one = isinstance(receiver, (ast.Name, ast.Subscript, ast.Attribute))
        if is_for_several or not one:
            return ""
        moved.append(ast.unparse(receiver))
    by_ddp = "device_ids" in source  # DDP then moves what its forward is given
    if not moved:
        return "the targets" if by_ddp else "the batches"
    if len(set(moved)) == 1 and not by_ddp:
        return f"what a batch holds besides `{moved[0]}`"
    return ""


def _training_loop(tree: ast.AST) -> ast.For | None:
    """The innermost `for` in which backward is called."""
    found = None
    for node in ast.walk(tree):  # outer loops come first
        if isinstance(node, ast.For) and any(map(_is_backward, ast.walk(node))):
            found = node
    return found


def _is_backward(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "backward"


def _moved(node: ast.AST) -> ast.AST | None:
    """The part of a batch that a call moves; None where it moves none."""
    if not isinstance(node, ast.Call):
        return None
    receiver: ast.AST | None = None
    if isinstance(node.func, ast.Attribute) and node.func.attr in MOVES:
        receiver = node.func.value
    elif HELPER.search(ast.unparse(node.func)):
        receiver = node
    elif node.args and any(keyword.arg == "device" for keyword in node.keywords):
        # torch.as_tensor(x, device=device), and not torch.zeros(1, device=device)
        first = node.args[0]
        receiver = first if isinstance(first, (ast.Name, ast.Subscript)) else None
    if receiver is None or NO_BATCH.search(ast.unparse(receiver)):
        return None
    return receiver


def _moved_elsewhere(tree: ast.AST, loop: ast.For) -> bool:
    """Whether a batch may be moved outside of the loop: in a function, or all data at once."""
    in_loop = set(ast.walk(loop))
    around = {node for node in ast.walk(tree) if loop in ast.walk(node)}
    for node, is_for_several in _with_surroundings(tree, around):
        receiver = _moved(node)
        if receiver is None or node in in_loop:
            continue
        if is_for_several or re.search(r"data|tensors|samples", ast.unparse(receiver)):
            return True
    return False


def _with_surroundings(
    root: ast.AST, ignore: Collection[ast.AST] = ()
) -> Iterator[tuple[ast.AST, bool]]:
    """Each node below `root`, and whether it stands in something that runs for several tensors.

    Args:
        root: Where to begin.
        ignore: What does not count as such a thing.
    """
    waiting: list[tuple[ast.AST, bool]] = [(root, False)]
    while waiting:
        parent, is_for_several = waiting.pop()
        for node in ast.iter_child_nodes(parent):
            here = is_for_several
            if isinstance(node, FOR_SEVERAL) and node not in ignore:
                here = True
            yield node, here
            waiting.append((node, here))
