"""Sphinx's settings for the web book; tools/book.py (`make book`) writes what it reads."""

from collections.abc import Iterable, Iterator
from typing import TextIO

from docutils import nodes
from latex2mathml import converter
from pygments.formatters import HtmlFormatter
from pygments.token import Name, Operator, Punctuation, Text, Whitespace, _TokenType
from sphinx.application import Sphinx
from sphinx.highlighting import PygmentsBridge
from sphinx.writers.html5 import HTML5Translator

project = "Training at Scale"
author = "the authors of Training at Scale"
extensions = ["myst_nb"]
exclude_patterns = ["extra"]

# ---- reading

nb_execution_mode = "off"  # the solutions are executed already
nb_ipywidgets_js = {}  # would be fetched from the network; no lesson has widgets
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath", "fieldlist"]
myst_heading_anchors = 3
maximum_signature_line_length = 88
add_module_names = False
toc_object_entries = False
python_use_unqualified_type_names = True
suppress_warnings = [
    # A type in a signature, such as `Part`, of which several modules have one; it gets no link.
    "ref.python",
    # A traceback with words that are not Python's; it is coloured as far as it can be.
    "misc.highlighting_failure",
]

# ---- writing

html_theme = "furo"
html_title = project
html_favicon = "static/icon.svg"
html_static_path = ["static"]
html_css_files = ["book.css"]
html_use_index = False  # the search finds what it would list
html_domain_indices = False
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
# html_extra_path, with figures, notebooks and sources, is given by tools/book.py
html_math_renderer = "mathml"
pygments_style = "default"  # its comments and numbers have the contrast that WCAG asks for
pygments_dark_style = "github-dark"


def _inline(translator: HTML5Translator, node: nodes.math) -> None:
    translator.body.append(converter.convert(node.astext()))
    raise nodes.SkipNode


def _block(translator: HTML5Translator, node: nodes.math_block) -> None:
    formula = converter.convert(node.astext(), display="block")
    formula = formula.replace("<mo>&#x23DF;</mo>", '<mo class="brace">&#x23DF;</mo>')
    translator.body.append(f'<div class="math">{formula}</div>\n')
    raise nodes.SkipNode


LONGEST_UNBROKEN = 40  # characters; a table is as wide as its longest word, and scrolls on a phone


class ShortTranslator(HTML5Translator):
    """Writes `code` as it is, where Sphinx would put each of its words into a span."""

    def visit_literal(self, node: nodes.literal) -> None:
        if _is_short_in_table(node):
            node["classes"].append("unbroken")
        super().visit_literal(node)

    def visit_Text(self, node: nodes.Text) -> None:
        protected = self.protect_literal_text
        self.protect_literal_text = 0
        super().visit_Text(node)
        self.protect_literal_text = protected


def _is_short_in_table(node: nodes.literal) -> bool:
    """Whether it is an option or a name in a table, which a browser would break at its hyphens."""
    text = node.astext()
    if len(text) > LONGEST_UNBROKEN or " " in text:
        return False
    above = node.parent
    while above is not None and not isinstance(above, nodes.entry):
        above = above.parent
    return above is not None


# what is read in one colour
PLAIN = (Name, Name.Builtin, Name.Builtin.Pseudo, Name.Namespace, Operator, Whitespace)


class ShortFormatter(HtmlFormatter):
    """Highlighted code without marks on plain names and signs: half the bytes of a lesson."""

    def get_token_style_defs(self, arg: str | None = None) -> list[str]:
        """The style sheet's lines, without what each of them is for."""
        return [line.partition(" /*")[0] for line in super().get_token_style_defs(arg)]

    def format(self, tokensource: Iterable[tuple[_TokenType, str]], outfile: TextIO) -> None:
        """Write the tokens as HTML."""
        super().format(_without_plain(tokensource), outfile)


def _without_plain(
    tokens: Iterable[tuple[_TokenType, str]],
) -> Iterator[tuple[_TokenType, str]]:
    for kind, text in tokens:
        yield (Text if kind in PLAIN or kind in Punctuation else kind), text


def _lean(
    app: Sphinx, pagename: str, templatename: str, context: dict, doctree: nodes.document | None
) -> None:
    """Leave out myst-nb's style sheet, mostly colours of terminals; book.css has the rest."""
    kept = []
    for sheet in context["css_files"]:
        if "mystnb." not in str(getattr(sheet, "filename", sheet)):
            kept.append(sheet)
    context["css_files"] = kept


def setup(app: Sphinx) -> dict[str, bool]:
    """Formulas as MathML, which browsers draw without a script, and pages of few bytes."""
    PygmentsBridge.html_formatter = ShortFormatter
    app.set_translator("html", ShortTranslator)
    app.connect("html-page-context", _lean)
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
