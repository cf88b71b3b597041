"""The web book: it builds without a warning, and a browser shows every page of it, offline."""

import functools
import gzip
import http.server
import json
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tools import course_map  # noqa: E402  (tools/ is not installed)

LESSONS = course_map.lessons()
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for path in map(shutil.which, BROWSERS) if path), None)
FIRST_PAINT_BYTES = 100_000  # a page with its styles and scripts, compressed as web servers send it
WAIT_MS = 300_000
TEXT_WITHOUT_CODE = """() => {
    const copy = document.querySelector('article').cloneNode(true);
    for (const code of copy.querySelectorAll('code, pre, math, dt, dd strong')) code.remove();
    return copy.textContent;
}"""
FORMULAS_WITHOUT_SIZE = """() => {
    const drawn = [...document.querySelectorAll('math')].filter(math => !math.closest('details'));
    return drawn.filter(math => math.getBoundingClientRect().width < 2).length;
}"""

pytestmark = pytest.mark.release
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser is installed")


class Page(HTMLParser):
    """What a page links to, what it fetches, its anchors and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.fetched, self.without_alt = set(), [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        about = dict(attrs)
        self.anchors |= {about[name] for name in ("id", "name") if about.get(name)}
        if tag == "a" and "href" in about:
            self.links.append(about["href"])
        if tag in ("script", "img", "iframe", "source") and "src" in about:
            self.fetched.append(about["src"])
        if tag == "link" and about.get("rel") in ("stylesheet", "icon", "preload", "modulepreload"):
            self.fetched.append(about["href"])
        if tag == "img" and not (about.get("alt") or "").strip():
            self.without_alt.append(about.get("src"))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of the book; its build fails at a warning."""
    out = tmp_path_factory.mktemp("book") / "out"
    command = [sys.executable, "-m", "tools.book", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.fixture(scope="module")
def pages(built):
    """{path of a page: what it holds}."""
    return {path: Page(path) for path in sorted(built.rglob("*.html"))}


@pytest.fixture(scope="module")
def address(built):
    """A server of the book on this machine."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            return

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(built))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu"]
        started = playwright.chromium.launch(executable_path=BROWSER, args=flags)
        yield started
        started.close()


def failure(request):
    """What went wrong with it; one that the next page has cut short went well."""
    return [] if "ERR_ABORTED" in (request.failure or "") else [f"{request.url}: {request.failure}"]


def from_elsewhere(url):
    return [] if url.startswith(("http://127.0.0.1:", "file:", "data:")) else [f"asked for {url}"]


@pytest.fixture
def tab(browser):
    """(an empty page, what went wrong on it so far)."""
    page = browser.new_page(viewport={"width": 390, "height": 844})  # a phone
    page.set_default_timeout(WAIT_MS)
    problems = []
    page.on("console", lambda said: problems.append(f"{page.url}: {said.text}"))
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on("requestfailed", lambda request: problems.extend(failure(request)))
    page.on("request", lambda request: problems.extend(from_elsewhere(request.url)))
    yield page, problems
    page.close()


def test_no_link_is_dead(built, pages):
    dead = []
    for path, page in pages.items():
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or link.startswith("data:"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                dead.append(f"{path.relative_to(built)}: {link}")
            elif parts.fragment and unquote(parts.fragment) not in pages[target].anchors | {"top"}:
                dead.append(f"{path.relative_to(built)}: {link} (no such place)")
    assert dead == []


def test_each_section_that_the_search_finds_exists(built, pages):
    script = (built / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(script.rpartition("Search.setIndex(")[2].removesuffix(");\n"))
    dead = []
    library = index["kinds"].index("Library")
    for kind, title, href, _, names, _ in index["entries"]:
        name, _, anchor = href.partition("#")
        page = pages.get(built / name)
        wanted = [anchor] if anchor else []
        if kind == library:
            wanted += [f"{title}.{defined}" for defined in names]
        if page is None or not set(wanted) <= page.anchors:
            dead.append(f"{title}: {href}")
    assert len(index["entries"]) > 500 and dead == []


def test_nothing_is_fetched_from_elsewhere_and_each_picture_has_a_text(built, pages):
    foreign = []
    for page in pages.values():
        foreign += [name for name in page.fetched if re.match(r"(?:https?:)?//", name)]
        assert page.without_alt == []
    for sheet in built.rglob("*.css"):
        foreign += re.findall(
            r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\"]+", sheet.read_text()
        )
    assert foreign == []


def test_each_lesson_is_there_whole_and_light(built, pages):
    in_table = re.search(r"(?s)<table.*?</table>", (built / "index.html").read_text())
    for lesson in LESSONS:
        path = built / f"{lesson.stem}.html"
        text = path.read_text()
        assert in_table and f'href="{lesson.stem}.html"' in in_table[0]
        assert "For the instructor" not in text
        solution = nbformat.read(ROOT / lesson.solution, as_version=4)
        outputs = [out for cell in solution.cells for out in cell.get("outputs", [])]
        drawings = [out for out in outputs if "image/png" in out.get("data", {})]
        assert text.count('src="figures/') == len(drawings) and "data:image/png" not in text
        assert f'href="{lesson.notebook}" download' in text
        assert (built / lesson.notebook).is_file()
        exercises = [
            cell
            for cell in solution.cells
            if cell.cell_type == "code" and "exercise" in cell.metadata.get("tags", [])
        ]
        assert (">Solution of exercise" in text) == bool(exercises)
        assert "glossary.html#term-" in text
        assert f">{lesson.number} {lesson.title}<" in (built / "cheat_sheet.html").read_text()
        drawn = len(gzip.compress(path.read_bytes()))
        for name in pages[path].fetched:
            if not name.startswith(("figures/", "_images/")):
                drawn += len(gzip.compress((built / urlsplit(name).path).read_bytes()))
        assert drawn < FIRST_PAINT_BYTES, lesson.stem


@needs_browser
def test_a_browser_shows_every_page(built, pages, address, tab):
    """No error, no formula that is not drawn, and nothing wider than a phone."""
    page, problems = tab
    for path, content in pages.items():
        name = path.relative_to(built).as_posix()
        if name.startswith("source/"):  # the text of a file, without scripts
            continue
        page.goto(f"{address}/{name}")
        text = page.evaluate(TEXT_WITHOUT_CODE)
        marks = re.search(
            r".{0,30}(?:\$\$|\\frac|\\text\{|\{term\}|\{py:|</?details>|(?<!\w)\*\*\w)", text
        )
        if marks:
            problems.append(f"{name}: {marks[0]} should not be seen")
        if page.evaluate(FORMULAS_WITHOUT_SIZE):
            problems.append(f"{name}: a formula is not drawn")
        if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
            problems.append(f"{name}: wider than a phone")
        assert content.anchors
    assert not problems, "\n".join(problems)


@needs_browser
@pytest.mark.parametrize("how", ["from a server", "from a disk"])
def test_the_search_finds_reduce_scatter(built, address, tab, how):
    page, problems = tab
    start = address if how == "from a server" else built.as_uri()
    page.goto(f"{start}/search.html?q=reduce-scatter")
    page.wait_for_selector("#search-results li a")
    page.wait_for_function(
        "!document.querySelector('#search-progress')?.textContent.includes('..')"
    )
    found = page.eval_on_selector_all("#search-results li a", "links => links.map(a => a.href)")
    hits = {re.sub(r"[?#].*", "", link).rpartition("/")[2] for link in found}
    assert {f"{LESSONS[1].stem}.html", "glossary.html"} <= hits
    assert not problems, "\n".join(problems)


@needs_browser
def test_the_theme_turns_dark_and_a_solution_unfolds(address, tab):
    page, problems = tab
    page.goto(f"{address}/{LESSONS[1].stem}.html")
    ground = "getComputedStyle(document.body).backgroundColor"
    page.evaluate("document.body.dataset.theme = 'light'")
    light = page.evaluate(ground)
    page.evaluate("document.body.dataset.theme = 'dark'")
    assert page.evaluate(ground) != light
    folded = page.locator("details.hide").first
    code = folded.locator("pre").first
    assert not code.is_visible()
    folded.locator("summary").click()
    assert code.is_visible()
    assert not problems, "\n".join(problems)
