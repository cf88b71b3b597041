// Takes the place of Sphinx's search, whose page and input it uses: sections in place of pages, the
// glossary and the lessons before guide and library, each with an excerpt. tools/book_search.py
// writes the index.

const MOST = { Glossary: 3, Lessons: 12, Guide: 6, Library: 6 };
const EXCERPT = 240; // characters

// What an entry is to a query, the best first. Within one of them the text decides (density).
const IS_IT = 4; // its heading, its term or its name is the query
const IS_ABOUT_IT = 3; // one of its headings has the query in it, or it explains it
const BELONGS_TO_IT = 2; // the title of its page has the query in it
const MENTIONS_IT = 1; // its text has the query or all its words in it

// "all-reduce", "all reduce", "all_reduce" and "allreduce" are one.
const squeezed = (text) => text.toLowerCase().replace(/[\s_-]+/g, "");
const patternOf = (text) => {
  const words = text.split(/[\s_-]+/).filter((word) => word);
  return words.map((word) => word.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&")).join("[\\s_-]?");
};

// What is looked for: one phrase in all its forms. Words are found at their beginning, so that
// "bubble" finds "bubbles"; `whole` and `exact` allow for a plural and no more.
const phraseOf = (forms) => {
  const any = `(?:${forms.map(patternOf).join("|")})`;
  return {
    begins: new RegExp(`(?<![\\p{L}\\p{N}])${any}`, "gu"),
    whole: new RegExp(`(?<![\\p{L}\\p{N}])${any}(?:e?s)?(?![\\p{L}\\p{N}])`, "u"),
    exact: new RegExp(`^${any}(?:e?s)?$`, "u"),
  };
};
const countOf = (phrase, text) => (text.match(phrase.begins) ?? []).length;

// "12 Pipeline parallel › 2. Micro-batches: GPipe (core, 19 min)" -> [its page, its own words]
const namesOf = (title) => {
  const [page, heading] = title.toLowerCase().split(" › ");
  const name = (heading ?? page).replace(/^\d+b?\.? /, "").replace(/ \((?:core|optional), \d+ min\)$/, "");
  return [page, name];
};

const rankOf = (kind, [, title, , , terms, parts], phrase) => {
  const [page, name] = namesOf(title);
  const lastOf = (text) => text.toLowerCase().split(".").pop();
  const names = kind === "Library" ? [name, ...terms].map(lastOf) : [name];
  const explained = kind === "Library" ? [] : terms;
  if (kind === "Glossary") names.push(...terms);
  const isIt = (text) => phrase.exact.test(text);
  const isAboutIt = (text) => phrase.whole.test(text.toLowerCase());
  if (names.some(isIt)) return IS_IT;
  if ([name, ...parts].some(isAboutIt) || explained.some(isIt)) return IS_ABOUT_IT;
  return isAboutIt(page) ? BELONGS_TO_IT : MENTIONS_IT;
};

// Okapi BM25: what few entries have counts more, the tenth mention less than the second, and a
// mention in a long text less than in a short one. A heading or an explanation counts as much as
// some mentions.
const SATURATION = 4; // k1
const LENGTH = 0.3; // b
const MENTIONS = { heading: 6, explained: 6, parts: 4, page: 2, text: 1 };
const densityOf = ({ counts, length }, rarities) => {
  const room = SATURATION * (1 - LENGTH + LENGTH * length);
  return counts.reduce((sum, count, i) => sum + (rarities[i] * count * (SATURATION + 1)) / (count + room), 0);
};

// A course explains a thing where it comes up and then counts on it, so of lessons that say as much
// of it the earlier one is better. Optional sections come later in the same way.
const LATER = 0.04; // for each lesson that has it and comes before
const OPTIONAL = 0.5;

// A query that is a form of a term of the glossary, or its plural, is looked for in all its forms.
const formsOf = ({ kinds, entries }, query) => {
  const isAsked = (form) => ["", "s", "es"].some((end) => squeezed(form) + end === squeezed(query));
  const glossary = entries.filter(([kind]) => kinds[kind] === "Glossary");
  const term = glossary.find(([, name, , , forms]) => [name, ...forms].some(isAsked));
  return term ? [query, ...term[4]] : [query];
};

// An entry of the library leads to what it defines under that name, if it does.
const withPlace = (kind, entry, phrase) => {
  const name = kind === "Library" && entry[4].find((text) => phrase.exact.test(text.toLowerCase().split(".").pop()));
  if (!name) return entry;
  const [number, module, href, ...rest] = entry;
  return [number, `${module}.${name}`, `${href.split("#")[0]}#${module}.${name}`, ...rest];
};

// The entries that have the query in one of its forms, or all its words: {kind: the best first}.
const findSections = (index, query) => {
  const { kinds, entries } = index;
  const found = Object.fromEntries(kinds.map((kind) => [kind, []]));
  const wanted = query.toLowerCase().trim().replace(/\s+/g, " ");
  const words = [...new Set(wanted.split(/[^\p{L}\p{N}_.-]+/u).filter((word) => patternOf(word)))];
  if (!words.length) return found;
  const phrase = phraseOf(formsOf(index, wanted));
  const sought = words.length > 1 ? [phrase, ...words.map((word) => phraseOf([word]))] : [phrase];
  const candidates = [];
  let characters = 0;
  for (const entry of entries) {
    const [page, heading] = namesOf(entry[1]);
    const fields = { heading, explained: entry[4].join(" "), parts: entry[5].join(" "), page, text: entry[3] };
    const weighed = Object.entries(fields).map(([field, text]) => [text.toLowerCase(), MENTIONS[field]]);
    const counts = sought.map((one) => weighed.reduce((sum, [text, weight]) => sum + weight * countOf(one, text), 0));
    characters += entry[3].length;
    if (!counts[0] && (counts.length === 1 || !counts.slice(1).every((count) => count))) continue;
    candidates.push({ entry, counts, length: entry[3].length });
  }
  const rarities = sought.map((_, i) => {
    const having = candidates.filter(({ counts }) => counts[i]).length;
    return Math.log(1 + (entries.length - having + 0.5) / (having + 0.5));
  });
  const pages = new Set(); // lessons that have it, so far
  for (const candidate of candidates) {
    const { entry } = candidate;
    const kind = kinds[entry[0]];
    const rank = rankOf(kind, entry, phrase);
    if (kind === "Glossary" && rank < IS_ABOUT_IT) continue; // it has a section of a lesson for that
    candidate.length *= entries.length / characters; // 1 is the mean
    let density = densityOf(candidate, rarities);
    if (kind === "Lessons") {
      pages.add(namesOf(entry[1])[0]);
      density /= 1 + LATER * (pages.size - 1);
    }
    if (entry[1].includes("(optional,")) density *= OPTIONAL;
    found[kind].push({ entry: withPlace(kind, entry, phrase), rank, density });
  }
  for (const kind of kinds) {
    found[kind].sort((a, b) => b.rank - a.rank || b.density - a.density);
    found[kind] = found[kind].map(({ entry }) => entry);
  }
  return found;
};

// The words around the first place of the query in one of its forms, or of its longest word.
const excerptOf = (index, text, query) => {
  const wanted = query.toLowerCase().trim();
  const longest = wanted.split(/\s+/).sort((a, b) => b.length - a.length)[0];
  const places = [formsOf(index, wanted), [longest]].map((forms) => text.toLowerCase().search(phraseOf(forms).begins));
  const at = places.find((place) => place >= 0) ?? 0;
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
    const shown = entries.slice(0, MOST[kind]);
    const more = entries.length > shown.length ? `, the best ${shown.length} of ${entries.length}` : "";
    item.appendChild(document.createElement("h3")).textContent = kind + more;
    for (const [, title, href, text] of shown) {
      const result = Search.output.appendChild(document.createElement("li"));
      const link = result.appendChild(document.createElement("a"));
      link.href = href;
      link.textContent = title;
      const excerpt = result.appendChild(document.createElement("p"));
      excerpt.className = "context";
      excerpt.textContent = excerptOf(Search._index, text, query);
    }
  }
  Search.stopPulse();
  Search.title.innerText = "Search results";
  Search.status.innerText = count === 1 ? "One section found." : `${count || "No"} sections found.`;
};
