// Takes the place of Sphinx's search, whose page and input it uses: sections in place of pages, the
// lessons before guide and library, each with an excerpt. tools/book_search.py writes the index.

const MOST_OF_A_KIND = 12;
const EXCERPT = 240; // characters

// Words are found at their beginning, so that "bubble" finds "bubbles".
const countOf = (words, text) => {
  const escaped = words.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  return (text.match(new RegExp(`(?<![\\p{L}\\p{N}])${escaped}`, "gu")) ?? []).length;
};

// How well an entry answers; 0: a word of the query is not in it.
const scoreOf = ([kind, title, href, text, terms], query, words) => {
  const head = title.toLowerCase();
  const body = text.toLowerCase();
  let score = 0;
  for (const word of words) {
    const inHead = countOf(word, head);
    const count = inHead + countOf(word, body);
    if (!count) return 0;
    score += Math.log2(1 + count) + (inHead ? 3 : 0);
  }
  score += 5 * Math.log2(1 + countOf(query, body));
  if (countOf(query, head)) score += 10;
  if (terms.includes(query)) score += 20; // where a lesson explains it
  return head.includes("(optional,") ? score / 2 : score;
};

// The entries with all words of the query: {kind: entries, the best first}.
const findSections = ({ kinds, entries }, query) => {
  const phrase = query.toLowerCase().trim().replace(/\s+/g, " ");
  const words = [...new Set(phrase.split(/[^\p{L}\p{N}_.-]+/u).filter((word) => word))];
  const found = Object.fromEntries(kinds.map((kind) => [kind, []]));
  if (!words.length) return found;
  for (const entry of entries) {
    const score = scoreOf(entry, phrase, words);
    if (score) found[kinds[entry[0]]].push({ entry, score });
  }
  for (const kind of kinds) {
    found[kind].sort((a, b) => b.score - a.score);
    found[kind] = found[kind].map(({ entry }) => entry);
  }
  return found;
};

// The words around the first place of the query, or of its longest word.
const excerptOf = (text, query) => {
  const body = text.toLowerCase();
  const longest = query.split(/\s+/).sort((a, b) => b.length - a.length)[0];
  const at = [query, longest].map((words) => body.indexOf(words.toLowerCase())).find((i) => i >= 0) ?? 0;
  const start = at < EXCERPT / 2 ? 0 : text.indexOf(" ", at - EXCERPT / 2) + 1;
  const end = start + EXCERPT < text.length ? text.lastIndexOf(" ", start + EXCERPT) : text.length;
  return (start ? "… " : "") + text.slice(start, end) + (end < text.length ? " …" : "");
};

Search.query = (query) => {
  document.getElementById("search-progress")?.replaceChildren();
  let count = 0;
  for (const [kind, entries] of Object.entries(findSections(Search._index, query))) {
    count += entries.length;
    if (!entries.length) continue;
    const item = Search.output.appendChild(document.createElement("li"));
    const shown = entries.slice(0, MOST_OF_A_KIND);
    const more = entries.length > shown.length ? `, the best ${shown.length} of ${entries.length}` : "";
    item.appendChild(document.createElement("h3")).textContent = kind + more;
    for (const [, title, href, text] of shown) {
      const result = Search.output.appendChild(document.createElement("li"));
      const link = result.appendChild(document.createElement("a"));
      link.href = href;
      link.textContent = title;
      const excerpt = result.appendChild(document.createElement("p"));
      excerpt.className = "context";
      excerpt.textContent = excerptOf(text, query.trim());
    }
  }
  Search.stopPulse();
  Search.title.innerText = "Search results";
  Search.status.innerText = count === 1 ? "One section found." : `${count || "No"} sections found.`;
};
