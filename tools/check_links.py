"""Do the relative links in *.md and in the notebooks' prose point to files and headings that exist? Offline.

python -m tools.check_links        prints each broken link with its file, exits with 1 if there is one
"""

import re
import sys
from pathlib import Path

import nbformat

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file as well as with -m

from tools.notebook_run import ROOT

LINK = re.compile(
    r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:href|src)=[\"']([^\"']+)[\"']|^\[[^\]]+\]:\s*(\S+)",
    re.MULTILINE,
)
SKIPPED = {"cache", "runs", "build", "node_modules"}


def documents(root: Path) -> list[Path]:
    """All Markdown files and notebooks of the course."""
    found = [path for kind in ("*.md", "*.ipynb") for path in root.rglob(kind)]
    return sorted(
        p
        for p in found
        if not any(part in SKIPPED or part[0] == "." for part in p.relative_to(root).parts)
    )


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
    """The anchors that a document offers: GitHub's for Markdown, JupyterLab's for a notebook, and explicit ids."""
    text = path.read_text() if path.suffix == ".md" else prose(path)
    titles = [
        re.sub(r"[*`]|\[([^\]]*)\]\([^)]*\)", r"\1", title).strip()
        for title in re.findall(r"(?m)^#+ +(.+)$", text)
    ]
    if path.suffix == ".md":
        anchors = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles]
    else:
        anchors = [title.replace(" ", "-") for title in titles]
    return {*anchors, *re.findall(r"(?:id|name)=[\"']([^\"']+)", text)}


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
    problems = [line for path in paths for line in broken(path, root)]
    print(
        "\n".join(
            [
                *problems,
                f"{len(paths)} documents: {f'{len(problems)} broken links' if problems else 'all links hold'}",
            ]
        )
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
