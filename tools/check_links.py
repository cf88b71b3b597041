"""Do the relative links in *.md and in the notebooks' prose point to what exists? Offline.

python -m tools.check_links    prints each broken link with its file, exits with 1 if there is one
"""

import re
import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from tools import fingerprint
from tools.notebook_run import ROOT

LINK = re.compile(
    r"\[[^\]]*\]\(\s*(?:<([^>\n]+)>|([^)\s]+))[^)]*\)|(?:href|src)=[\"']([^\"']+)[\"']|^\[[^\]]+\]:\s*(\S+)",
    re.MULTILINE,
)
SKIPPED = {"cache", "runs", "build", "node_modules"}


def documents(root: Path) -> list[Path]:
    """All Markdown files and notebooks of the course, without notebooks that a learner edited."""
    found = []
    for path in [*root.rglob("*.md"), *root.rglob("*.ipynb")]:
        folders = path.relative_to(root).parts
        is_hidden = any(part.startswith(".") for part in folders)
        if not is_hidden and not SKIPPED.intersection(folders) and not _is_a_learners(path):
            found.append(path)
    return sorted(found)


def _is_a_learners(path: Path) -> bool:
    if path.suffix != ".ipynb":
        return False
    notebook = nbformat.read(path, as_version=4)
    is_student_version = "built" in notebook.metadata.get("lesson", {})
    return is_student_version and fingerprint.is_edited(notebook)


def prose(path: Path) -> str:
    """The Markdown text of a document, without code, in which brackets are not links."""
    if path.suffix == ".ipynb":
        cells = nbformat.read(path, as_version=4).cells
        text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    else:
        text = path.read_text()
    text = re.sub(r"(?ms)^( *)(```|~~~).*?^ *\2", "", text)
    return re.sub(r"`[^`\n]*`", "code", text)


def headings(path: Path) -> set[str]:
    """The anchors of a document: GitHub's or, in a notebook, JupyterLab's, and explicit ids.

    JupyterLab knows `#heading=Title` and `#cell-id=...`.
    """
    is_markdown = path.suffix == ".md"
    text = path.read_text() if is_markdown else prose(path)
    anchors = set(re.findall(r"(?:id|name)=[\"']([^\"']+)", text))
    for heading in re.findall(r"(?m)^#+ +(.+)$", text):
        title = re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip()
        if is_markdown:
            title = re.sub(r"[^\w\- ]", "", title.lower())
        anchors.add(("" if is_markdown else "heading=") + title.replace(" ", "-"))
    if not is_markdown:
        cells = nbformat.read(path, as_version=4).cells
        anchors |= {f"cell-id={cell.id}" for cell in cells}
    return anchors


def broken(path: Path, root: Path) -> list[str]:
    """The links of a document that lead nowhere, each as `file: link (why)`."""
    problems = []
    for match in LINK.finditer(prose(path)):
        link = next(group for group in match.groups() if group)
        if re.match(r"[a-z][a-z0-9+.-]*:|//", link, re.IGNORECASE):
            continue  # another site, or mailto, data, attachment
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        if not file.is_relative_to(root.resolve()):
            why = "outside the repository"
        elif not file.exists():
            why = "no such file"
        elif anchor and file.suffix in (".md", ".ipynb") and anchor not in headings(file):
            why = "no such heading"
        else:
            continue
        problems.append(f"{path.relative_to(root)}: {link} ({why})")
    return problems


def main(root: Path = ROOT) -> int:
    """The command line; returns the exit code."""
    paths = documents(root)
    problems = []
    for path in paths:
        problems += broken(path, root)
    for problem in problems:
        print(problem)
    verdict = f"{len(problems)} broken links" if problems else "all links hold"
    print(f"{len(paths)} documents: {verdict}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
