"""The pages of the book about labcode, from signatures and docstrings; nothing is imported.

A page for each folder, a section for each of its modules. What begins with an underscore is left
out, and so are the checks of the exercises, whose hints say too much here. Docstrings are written
in Google's style and in plain text with indented equations, which reStructuredText, and with it
autodoc, reads as errors by the hundred; so they become Markdown here, and the objects those of
Sphinx's Python domain, which brings search, index and references.
"""

import ast
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tools import book_text

LEFT_OUT = ("course/exercises/",)
SECTIONS = {"Args": "param", "Attributes": "param", "Raises": "raises", "Returns": "returns"}
SECTIONS["Yields"] = "yields"
LABELS = re.compile(r"(?m)^(Source|Held by|Communicates|Shapes):\s")
Def = ast.FunctionDef | ast.AsyncFunctionDef


class Module(NamedTuple):
    """A source file.

    Args:
        name: "labcode.comm.grid"; that of a folder for its `__init__.py`.
        package: The folder, "labcode.comm".
        file: Path from the root of the course.
        tree: Syntax tree of the module.
    """

    name: str
    package: str
    file: str
    tree: ast.Module


def modules(root: Path) -> list[Module]:
    """All modules that the book describes, by name."""
    found = []
    for path in sorted((root / "labcode").rglob("*.py")):
        file = path.relative_to(root).as_posix()
        is_private = path.stem.startswith("_") and path.stem not in ("__init__", "__main__")
        if file.startswith(LEFT_OUT) or is_private:
            continue
        package = ".".join(path.relative_to(root).parent.parts)
        name = package if path.stem == "__init__" else f"{package}.{path.stem}"
        found.append(Module(name, package, file, ast.parse(path.read_text(encoding="utf-8"))))
    return sorted(found)


def names(known: list[Module]) -> set[str]:
    """The full names of all modules and of all objects on the pages."""
    found = set()
    for module in known:
        found.add(module.name)
        for node in public(module.tree):
            found.add(f"{module.name}.{node.name}")
            if isinstance(node, ast.ClassDef):
                for method in public(node):
                    found.add(f"{module.name}.{node.name}.{method.name}")
    return found


def pages(known: list[Module]) -> dict[str, str]:
    """{name of the file below api/: its Markdown}."""
    by_package: dict[str, list[Module]] = {}
    for module in known:
        by_package.setdefault(module.package, []).append(module)
    found = {}
    for package, members in by_package.items():
        found[f"{package}.md"] = _page(package, members)
    found["index.md"] = _index(by_package)
    return found


def _index(by_package: dict[str, list[Module]]) -> str:
    lines = ["# The library", "", "From the docstrings of `labcode`, a page for each folder."]
    lines += ["", "| folder | what it holds |", "|---|---|"]
    for package, members in by_package.items():
        doc = ""
        for module in members:
            if module.name == package:
                doc = ast.get_docstring(module.tree) or ""
        first = " ".join(doc.split("\n\n")[0].split())
        if not first:
            rest = [module.name.rpartition(".")[2] for module in members if module.name != package]
            first = ", ".join(f"`{name}`" for name in rest)
        lines.append(f"| [`{package}`]({package}.md) | {book_text.escaped(first)} |")
    lines += ["", "```{toctree}", ":hidden:", ""]
    lines += list(by_package)
    lines += ["```", ""]
    return "\n".join(lines)


def _page(package: str, members: list[Module]) -> str:
    lines = [f"# {package}", ""]
    for module in members:
        lines += ["" if module.name == package else f"## {module.name}", ""]
        lines += [f"```{{py:module}} {module.name}", "```", ""]
        lines += [f'<p class="source"><a href="../source/{source_page(module.file)}">', ""]
        lines[-2] += f"{module.file}</a></p>"
        lines += [*described(ast.get_docstring(module.tree) or "", level=2), ""]
        for node in public(module.tree):
            lines += [*_object(node, module), ""]
    return "\n".join(lines)


def public(parent: ast.Module | ast.ClassDef) -> Iterator[Def | ast.ClassDef]:
    """Classes and functions for users, each once."""
    seen = set()
    for node in parent.body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        is_variant = "overload" in decorators or any(d.endswith(".setter") for d in decorators)
        if node.name.startswith("_") or node.name in seen or is_variant:
            continue
        seen.add(node.name)
        yield node


def _object(node: Def | ast.ClassDef, module: Module) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return _class(node, module)
    return _fenced("function", f"{node.name}{_signature(node)}", [], _doc(node), ":" * 4)


def _class(node: ast.ClassDef, module: Module) -> list[str]:
    body = [*_doc(node), ""]
    for method in public(node):
        if isinstance(method, ast.ClassDef):
            continue
        options = []
        kind = "method"
        decorators = {ast.unparse(decorator) for decorator in method.decorator_list}
        for decorator in ("classmethod", "staticmethod"):
            if decorator in decorators:
                options.append(f":{decorator}:")
        head = f"{method.name}{_signature(method, bound='staticmethod' not in decorators)}"
        if decorators & {"property", "cached_property", "functools.cached_property"}:
            kind = "property"
            head = method.name
            if method.returns is not None:
                options.append(f":type: {ast.unparse(method.returns)}")
        body += [*_fenced(kind, head, options, _doc(method), ":" * 4), ""]
    return _fenced("class", f"{node.name}{_fields(node)}", [], body, ":" * 5)


def _fenced(kind: str, head: str, options: list[str], body: list[str], fence: str) -> list[str]:
    return [f"{fence}{{py:{kind}}} {head}", *options, "", *body, fence]


def _signature(node: Def, *, bound: bool = False) -> str:
    arguments = ast.parse(ast.unparse(node.args).join(("def f(", "): pass"))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    if bound:
        first = arguments.args.posonlyargs or arguments.args.args
        first.pop(0)
    result = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    return f"({ast.unparse(arguments.args)}){result}"


def _fields(node: ast.ClassDef) -> str:
    """What is given to make one: the arguments of __init__, or the fields of a record."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            return _signature(method, bound=True).removesuffix(" -> None")
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    bases = {ast.unparse(base) for base in node.bases}
    if "dataclass" not in decorators and "NamedTuple" not in bases:
        return ""
    fields = []
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            default = f" = {ast.unparse(field.value)}" if field.value is not None else ""
            if len(default) > 40 or "\n" in default:
                default = " = ..."
            fields.append(f"{field.target.id}: {ast.unparse(field.annotation)}{default}")
    return f"({', '.join(fields)})"


def _doc(node: Def | ast.ClassDef) -> list[str]:
    return described(ast.get_docstring(node) or "")


def described(docstring: str, level: int = 0) -> list[str]:
    """A docstring in Google's style as lines of Markdown with field lists.

    Args:
        docstring: Docstring without its indentation.
        level: Not 0: the docstring of a module, whose "Args:" is prose.
    """
    lines: list[str] = []
    prose: list[str] = []
    rest = docstring.splitlines()
    while rest:
        line = rest.pop(0)
        section = line.removesuffix(":")
        if level or not line.endswith(":") or section not in SECTIONS:
            prose.append(line)
            continue
        body = []
        while rest and (not rest[0].strip() or rest[0].startswith("    ")):
            body.append(rest.pop(0)[4:])
        lines += [*_markdown(prose), ""]
        prose = []
        lines += [*_fieldlist(SECTIONS[section], body), ""]
    return [*lines, *_markdown(prose)]


def _fieldlist(kind: str, body: list[str]) -> list[str]:
    """A section of entries, each a field."""
    if kind in ("returns", "yields"):
        return [f":{kind}: {book_text.escaped(' '.join(' '.join(body).split()))}"]
    entries: list[str] = []
    for line in body:
        if line and not line.startswith(" "):
            entries.append(line)
        elif entries and line.strip():
            entries[-1] += f" {line.strip()}"
    lines = []
    for entry in entries:
        name, colon, text = entry.partition(":")
        if not colon:
            name, text = ("", entry)
        named = f"{kind} {name.strip()}".strip()
        lines.append(f":{named}: {book_text.escaped(text.strip()) or 'see above'}")
    return lines


def _markdown(prose: list[str]) -> list[str]:
    """Plain paragraphs as Markdown; what is indented is shown as it is."""
    text = LABELS.sub(r"\n\1: ", "\n".join(prose))
    lines: list[str] = []
    paragraph: list[str] = []
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_list = bool(paragraph) and re.match(r"([-*]|\d+\.) ", paragraph[0]) is not None
        if line.startswith("  ") and not is_list:
            lines += _paragraph(paragraph)
            paragraph = []
            block.append(line)
        elif not line.strip() and block:
            block.append("")
        else:
            lines += _block(block)
            block = []
            if line.strip():
                paragraph.append(line)
            else:
                lines += _paragraph(paragraph)
                paragraph = []
    return [*lines, *_block(block)]


def _paragraph(lines: list[str]) -> list[str]:
    if not lines:
        return []
    text = "\n".join(lines)
    is_list = re.match(r"[-*] ", text) is not None
    if is_list:
        text = "-" + re.sub(r"(?m)^\* ", "- ", text)[1:]
    shown = book_text.escaped(text)
    shown = re.sub(r"^(Source|Held by|Communicates|Shapes):", r"**\1:**", shown)
    return ["", *shown.splitlines(), ""]


def _block(lines: list[str]) -> list[str]:
    while lines and not lines[-1]:
        lines.pop()
    if not lines:
        return []
    margin = min(len(line) - len(line.lstrip()) for line in lines if line)
    return ["", "```text", *[line[margin:] for line in lines], "```", ""]


def source_page(file: str) -> str:
    """The name of the page that shows a source file."""
    return f"{file.removesuffix('.py').replace('/', '.')}.html"


def source_text(file: str, text: str) -> str:
    """A source file as a page of its own, with an anchor for each line."""
    rows = []
    for number, line in enumerate(html.escape(text).splitlines(), 1):
        rows.append(f'<span id="L{number}">{line}</span>')
    code = "\n".join(rows)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        f'content="light dark"><title>{file}</title></head>\n<body><p>{file}: '
        f'<a href="../api/index.html">the library</a></p>\n<pre>{code}</pre></body></html>\n'
    )
