// The views of embeddings and rankings: similarity, reranking, semantic search.

import { $, announce, bar, el, lines, pluralize, twoDecimals } from "./dom.js";
import { renderMarkdown } from "./markdown.js";
import { requireHead, requireText, server, UserError } from "./server.js";
import { py } from "./snippets.js";
import { addCounts, createView } from "./view.js";

// --- similarity ---

export const similarityView = createView("similarity", async ({ state, output, call, answered }) => {
  const texts = lines(state.texts);
  if (texts.length < 2 || texts.length > 24) throw new UserError(`Enter 2 to 24 sentences, one per line; there are ${texts.length}.`);
  const poolings = ["cls", "mean"];
  const responses = await Promise.all(poolings.map((pooling) => call("compare", { texts, pooling })));
  const summaries = [];
  const figures = poolings.map((pooling, i) => {
    const { similarity } = responses[i];
    const pairs = pairsOf(similarity).sort((a, b) => b.score - a.score);
    const range = `pairs from ${twoDecimals(pairs.at(-1).score)} to ${twoDecimals(pairs[0].score)}`;
    const title = i ? "Mean" : "CLS";
    summaries.push(`${i ? "mean" : "CLS"} pooling: ${pairs[0].i + 1} and ${pairs[0].j + 1} (${twoDecimals(pairs[0].score)})`);
    const box = el("div", { className: `scroll ${pooling}`, tabIndex: 0, role: "region", "aria-label": `Similarities with ${title} pooling` }, heatTable(similarity, texts));
    return el("figure", {}, el("figcaption", {}, `${title} `, el("span", { className: "quiet" }, range)), box);
  });
  const summary = `Most similar with ${summaries.join("; with ")}.`;
  output.replaceChildren(el("div", { className: "pair" }, ...figures), el("p", { className: "summary" }, summary));
  announce(summary);
  answered(addCounts(responses[1].results));
});

function pairsOf(matrix) {
  return matrix.flatMap((row, i) => row.slice(0, i).map((score, j) => ({ i: j, j: i, score })));
}

/** A heat map as a table, which screen readers can read and users can copy. */
function heatTable(matrix, texts) {
  const head = el("tr", {}, el("td", {}), ...texts.map((text, i) => el("th", { scope: "col", title: text }, String(i + 1))));
  const rows = matrix.map((row, i) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", title: texts[i] }, `${i + 1} `, el("span", {}, texts[i])),
      ...row.map((score) => el("td", { className: `heat-${Math.round(10 * Math.max(0, Math.min(1, score)))}` }, twoDecimals(score)))
    )
  );
  return el("table", { className: "heat-table" }, el("thead", {}, head), el("tbody", {}, ...rows));
}

// --- reranking ---

export const rerankView = createView("rerank", async ({ state, model, output, call, answered }) => {
  requireHead("rerank", "reranking", model);
  const query = requireText(state.query, "a query");
  const texts = lines(state.documents);
  if (!texts.length) throw new UserError("Enter documents, one per line.");
  const python = `client.rerank(${py(query)}, [${texts.map(py).join(", ")}])`;
  const ranks = await call("rerank", { query, texts }, python);
  const items = ranks.map(({ index, score }, rank) => {
    const moved = index - rank;
    const movement = moved > 0 ? `up from ${index + 1}` : moved < 0 ? `down from ${index + 1}` : "unchanged";
    const item = bar(texts[index], score, { best: rank === 0 });
    item.querySelector(".name").title = texts[index];
    item.append(el("span", { className: `movement quiet${moved > 0 ? " up" : ""}` }, movement));
    return item;
  });
  output.replaceChildren(el("ol", { className: "bars ranking", "aria-label": "Documents, most relevant first" }, ...items));
  answered(null);
  announce(`Most relevant: ${texts[ranks[0].index]}`);
});

// --- semantic search ---

const HITS = 5;

export const searchView = createView("search", async ({ state, output, call, answered }) => {
  const query = requireText(state.query.trim(), "a query");
  const { mode } = state;
  const rerank = state.rerank === "1";
  const body = { queries: [query], k: HITS, mode, ...(rerank ? { rerank } : {}) };
  const python = `client.search(${py(query)}, k=${HITS}, mode=${py(mode)}${rerank ? ", rerank=True" : ""})`;
  const { results, passages } = await call("search", body, python);
  const [result] = results;
  const where = `${pluralize(passages, "passage")} of ${server.about.index.name}`;
  const summary = result.hits.length ? `The best ${result.hits.length} of ${where}` : `No results in ${where}.`;
  output.replaceChildren(el("p", { className: "summary" }, summary), el("ol", { className: "hits" }, ...result.hits.map(renderHit)));
  answered(result);
  announce(summary);
});

function renderHit(hit) {
  const scores = Object.entries(hit.scores).map(([stage, score]) => `${stage} ${score.toFixed(3)}`);
  return el(
    "li",
    {},
    el("h3", {}, [hit.document, ...hit.headings].join(" › ")),
    el("div", { className: "text snippet" }, renderMarkdown(hit.text, hit.highlights)),
    el("p", { className: "quiet" }, scores.join(" · "))
  );
}

/** Show the name of the index and queries to try, or how to build one. */
export function showIndex() {
  const { index } = server.about;
  $("search-none").hidden = index !== null;
  $("search-form").hidden = index === null;
  $("search-index").textContent = index ? ` ${index.name} (${pluralize(index.passages, "passage")})` : "";
  return (index?.queries ?? []).map((query) => ({ name: query, fields: { query } }));
}
