// The views of the tasks: fill-mask, token classification, question answering, similarity, search, classification.

import { $, announce, bar, codePoints, el, percent, pluralize, slicer, svg, twoDecimals, wrapSpans } from "./dom.js";
import {
  createView,
  fetchJson,
  py,
  requireHead,
  requireText,
  selectedHead,
  sendRequest,
  server,
  showCounts,
  UserError,
  withHead,
} from "./server.js";

const MAX_SHOWN = 20000; // characters of a text that are displayed; the whole text is read

// --- fill-mask ---

const MAX_MASKS = 20; // that are displayed

export const fillView = createView("fill", async (view, signal) => {
  requireHead("fill", "masked-language modelling");
  const text = requireText($("fill-text").value);
  const token = server.model.mask_token;
  if (!text.includes(token)) throw new UserError(`The text needs at least one ${token} token.`);
  const topK = Number($("fill-top").value);
  const started = performance.now();
  const python = `client.fill([${py(text)}], top_k=${topK})`;
  const { results } = await sendRequest("fill", "fill", { texts: [text], top_k: topK }, python, signal);
  const [result] = results;
  const slice = slicer(text);
  const blocks = result.masks.slice(0, MAX_MASKS).map((mask, i) => {
    const before = `${mask.start > 30 ? "… " : ""}${slice(Math.max(0, mask.start - 30), mask.start)}`;
    const after = `${slice(mask.end, mask.end + 30)}${slice(mask.end + 30, mask.end + 31) ? " …" : ""}`;
    const context = el("p", { className: "where quiet" }, before, el("b", {}, "▢"), after);
    const bars = mask.candidates.map(({ text, token, score }, rank) => bar(text.trim() || token, score, { best: rank === 0 }));
    const title = el("h3", {}, result.masks.length > 1 ? `Mask ${i + 1}` : "Mask");
    return el("div", {}, title, context, el("ol", { className: "bars", "aria-label": `Predictions for mask ${i + 1}` }, ...bars));
  });
  const hidden = result.masks.length - MAX_MASKS;
  if (hidden > 0) blocks.push(el("p", { className: "quiet" }, `… and ${hidden} more masks`));
  $("fill-masks").replaceChildren(...blocks);
  showCounts(view, result, started);
  const best = result.masks.slice(0, 5).map(({ candidates: [first] }) => `${first.text.trim()} ${percent(first.score)}`);
  announce(`Predictions: ${best.join(", ")}`);
});

// --- token classification ---

const HUES = 6;

export const tagView = createView("tag", async (view, signal) => {
  requireHead("tag", "token classification");
  const text = requireText($("tag-text").value);
  const started = performance.now();
  const [body, headArgument] = withHead("tag", { texts: [text] });
  const { results } = await sendRequest("tag", "tag", body, `client.tag([${py(text)}]${headArgument})`, signal);
  const [result] = results;
  const labels = [...new Set(selectedHead("tag").labels.map((label) => label.replace(/^[BIESLU]-/, "")))].filter((label) => label !== "O");
  const hue = (label) => `hue-${Math.max(0, labels.indexOf(label)) % HUES}`;
  const shown = slicer(text)(0, MAX_SHOWN);
  const spans = result.spans.filter((span) => span.end <= MAX_SHOWN);
  const marked = wrapSpans(shown, spans, (words, span) =>
    el("mark", { className: hue(span.label), title: `${span.label} ${percent(span.score)}` }, words, el("span", { className: "label" }, span.label))
  );
  if (shown.length < text.length) marked.append(` … (the whole text was read; the first ${MAX_SHOWN.toLocaleString("en")} characters are shown)`);
  $("tag-marked").replaceChildren(marked);
  const counts = labels.map((label) => [label, result.spans.filter((span) => span.label === label).length]);
  const items = counts.filter(([, n]) => n).map(([label, n]) => el("li", {}, el("span", { className: `swatch ${hue(label)}` }), `${label} `, el("b", {}, String(n))));
  $("tag-legend").replaceChildren(...(items.length ? items : [el("li", { className: "quiet" }, "No spans.")]));
  showCounts(view, result, started);
  announce(`${pluralize(result.spans.length, "span")}: ${result.spans.slice(0, 8).map((span) => `${span.text}, ${span.label}`).join("; ")}`);
});

// --- question answering ---

const CONTEXT = 1500; // characters shown before and after an answer

export const answerView = createView("answer", async (view, signal) => {
  requireHead("answer", "question answering");
  const question = requireText($("answer-question").value);
  const text = requireText($("answer-context").value);
  const started = performance.now();
  const body = { questions: { question, documents: text }, top_k: 3 };
  const python = `client.answer([(${py(question)}, ${py(text)})], top_k=3)`;
  const pair = { text: question, pair: text };
  const [{ results }, map] = await Promise.all([
    sendRequest("answer", "answer", body, python, signal),
    fetchJson("windows", server.about.models.length > 1 ? { ...pair, model: server.model.name } : pair, signal),
  ]);
  const [result] = results;
  const answers = result.answers.filter((answer) => answer.start !== null);
  const total = codePoints(text).length;
  $("answer-best").replaceChildren(...describeAnswers(answers, result));
  $("answer-map").hidden = false;
  $("answer-map").replaceChildren(...windowMap(map, total, answers[0]));
  showAnswer(text, total, answers[0]);
  showCounts(view, result, started);
  announce(answers.length ? `Answer: ${answers[0].text}` : "No answer");
});

function describeAnswers([best, ...others], result) {
  if (!best) return [el("p", { className: "verdict" }, "No answer")];
  const comparison =
    best.logit >= result.no_answer_logit
      ? `Probability ${percent(best.score)}; of “no answer” ${percent(result.no_answer_score)}.`
      : `“No answer” is more probable (${percent(result.no_answer_score)}): the text may not contain the answer.`;
  const rows = [el("p", { className: "verdict" }, best.text), el("p", { className: "quiet" }, comparison)];
  const items = others.map(({ text, score }) => el("li", {}, `${text} `, el("span", { className: "quiet" }, percent(score))));
  if (items.length) rows.push(el("h3", {}, "Other answers"), el("ul", { className: "others" }, ...items));
  return rows;
}

/** Show the text around an answer, scrolled to it. */
function showAnswer(text, total, best) {
  const slice = slicer(text);
  const box = $("answer-text");
  if (!best) {
    box.replaceChildren(slice(0, 2 * CONTEXT));
    return;
  }
  const start = Math.max(0, best.start - CONTEXT);
  const end = Math.min(total, best.end + CONTEXT);
  const span = { start: best.start - start, end: best.end - start };
  const excerpt = wrapSpans(slice(start, end), [span], (words) => el("mark", { className: "hue-0", id: "answer-span" }, words));
  box.replaceChildren(start > 0 ? "… " : "", excerpt, end < total ? " …" : "");
  box.scrollTop = Math.max(0, $("answer-span").offsetTop - box.offsetTop - box.clientHeight / 2);
}

/** Windows as strips over the length of the text; the part whose answers a window provides is opaque. */
function windowMap(map, total, best) {
  const [width, strip, gap] = [600, 12, 5];
  const lanes = Math.min(map.windows.length, 3); // neighbours overlap, so they alternate
  const height = lanes * (strip + gap) + 6;
  const x = (position) => (width * position) / Math.max(1, total);
  const where = best ? `; the answer is ${Math.round((100 * best.start) / Math.max(1, total))}% into it` : "";
  const title = `${pluralize(map.windows.length, "window")} over a text of ${pluralize(total, "character")}${where}`;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  map.windows.forEach(({ start, end, owns }, i) => {
    const y = (i % lanes) * (strip + gap) + 3;
    out.append(svg("rect", { x: x(start), y, width: Math.max(1, x(end - start)), height: strip, rx: 2, class: "reads" }));
    out.append(svg("rect", { x: x(owns[0]), y, width: Math.max(1, x(owns[1] - owns[0])), height: strip, rx: 2, class: "owns" }));
  });
  if (best) out.append(svg("rect", { x: Math.max(0, x(best.start) - 1.5), y: 0, width: 3 + x(best.end - best.start), height, class: "answer" }));
  const owner = best ? map.windows.findIndex(({ owns }) => owns[0] <= best.start && best.start < owns[1]) + 1 : 0;
  const legend =
    map.windows.length > 1
      ? ` Pale: context. Opaque: the part whose answers the window provides.${owner ? ` The answer comes from window ${owner}.` : ""}`
      : "";
  return [el("h3", {}, "Windows"), out, el("p", { className: "quiet" }, `${title}.`, legend)];
}

// --- similarity ---

export const similarityView = createView("similarity", async (view, signal) => {
  const texts = $("similarity-texts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (texts.length < 2 || texts.length > 24) throw new UserError(`Enter 2 to 24 sentences, one per line; there are ${texts.length}.`);
  const started = performance.now();
  const poolings = ["cls", "mean"];
  const responses = [];
  for (const pooling of poolings) responses.push(await sendRequest("similarity", "compare", { texts, pooling }, null, signal));
  const summaries = poolings.map((pooling, i) => {
    const { similarity } = responses[i];
    $(`similarity-${pooling}`).replaceChildren(heatTable(similarity, texts));
    const pairs = pairsOf(similarity).sort((a, b) => b.score - a.score);
    const range = `pairs from ${twoDecimals(pairs.at(-1).score)} to ${twoDecimals(pairs[0].score)}`;
    $(`similarity-${pooling}-title`).querySelector("span").textContent = range;
    return `${i ? "mean" : "CLS"} pooling: ${pairs[0].i + 1} and ${pairs[0].j + 1} (${twoDecimals(pairs[0].score)})`;
  });
  $("similarity-summary").textContent = `Most similar with ${summaries.join("; with ")}.`;
  announce($("similarity-summary").textContent);
  const sum = (key) => responses[1].results.reduce((total, counts) => total + counts[key], 0);
  showCounts(view, { tokens_total: sum("tokens_total"), tokens_read: sum("tokens_read"), windows: sum("windows") }, started);
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

// --- semantic search ---

export const searchView = createView("search", async (view, signal) => {
  const query = $("search-query").value.trim();
  if (!query) throw new UserError("Enter a query.");
  const mode = $("search-mode").value;
  const rerank = $("search-rerank").checked;
  const started = performance.now();
  const body = { queries: [query], k: 5, mode, ...(rerank ? { rerank } : {}) };
  const python = `client.search(${py(query)}, k=5, mode=${py(mode)}${rerank ? ", rerank=True" : ""})`;
  const { results, passages } = await sendRequest("search", "search", body, python, signal);
  const [result] = results;
  $("search-summary").textContent = result.hits.length
    ? `The best ${result.hits.length} of ${pluralize(passages, "passage")}`
    : `No results in ${pluralize(passages, "passage")}.`;
  $("search-hits").replaceChildren(...result.hits.map(renderHit));
  showCounts(view, result, started);
  announce($("search-summary").textContent);
});

function renderHit(hit) {
  const spans = hit.highlights.map(([start, end]) => ({ start, end }));
  const scores = Object.entries(hit.scores).map(([stage, score]) => `${stage} ${score.toFixed(3)}`);
  return el(
    "li",
    {},
    el("h3", {}, [hit.document, ...hit.headings].join(" › ")),
    el("p", { className: "text" }, wrapSpans(hit.text, spans, (words) => el("mark", { className: "hue-0" }, words))),
    el("p", { className: "quiet" }, scores.join(" · "))
  );
}

// --- classification ---

export const usesHead = () => document.querySelector("input[name=labels]:checked").value === "head"; // else zero-shot

const classification = { result: null, head: null };

export const classifyView = createView("classify", async (view, signal) => {
  const text = requireText($("classify-text").value);
  const started = performance.now();
  const head = usesHead() ? selectedHead("classify") : null;
  const [body, python] = usesHead() ? headRequest(text) : zeroShotRequest(text);
  const { results } = await sendRequest("classify", "classify", body, python, signal);
  [classification.result, classification.head] = [results[0], head];
  showClassification();
  showCounts(view, classification.result, started);
});

function headRequest(text) {
  requireHead("classify", "text classification");
  const { pairs } = selectedHead("classify");
  const second = pairs ? requireText($("classify-pair").value) : null;
  const [body, headArgument] = withHead("classify", { texts: pairs ? [[text, second]] : [text] });
  return [body, `client.classify([${pairs ? `(${py(text)}, ${py(second)})` : py(text)}]${headArgument})`];
}

function zeroShotRequest(text) {
  const labels = $("classify-labels").value.split(",").map((label) => label.trim()).filter(Boolean);
  if (!labels.length) throw new UserError("Enter at least one label.");
  const template = $("classify-template").value.trim();
  const multiLabel = $("classify-multi").checked;
  const method = $("classify-method").value;
  const options = { ...(template ? { template } : {}), ...(multiLabel ? { multi_label: true } : {}), ...(method === "auto" ? {} : { method }) };
  const python = Object.entries(options).map(([name, value]) => `, ${name}=${value === true ? "True" : py(value)}`).join("");
  return [{ texts: [text], labels, ...options }, `client.zero_shot([${py(text)}], [${labels.map(py).join(", ")}]${python})`];
}

/** Show the last result against the current threshold. */
export function showClassification() {
  const { result, head } = classification;
  if (!result) return;
  const threshold = Number($("classify-threshold").value) / 100;
  const rows = Object.entries(result.scores).sort((a, b) => b[1] - a[1]);
  const confident = result.score >= threshold;
  const verdict = $("classify-verdict");
  verdict.replaceChildren(
    confident ? result.label : "Abstain",
    el("span", { className: "quiet" }, confident ? ` ${percent(result.score)}` : ` the best label, ${result.label}, has only ${percent(result.score)}`)
  );
  verdict.classList.toggle("unsure", !confident);
  $("classify-bars").replaceChildren(...rows.map(([label, score], i) => bar(label, score, { threshold, best: i === 0 && confident })));
  $("classify-note").textContent = calibrationNote(head);
  announce(`${verdict.textContent}. ${rows.slice(0, 5).map(([label, score]) => `${label} ${percent(score)}`).join(", ")}`);
}

function calibrationNote(head) {
  if (!head) return "Zero-shot: the label whose embedding is nearest, or the hypothesis that the text entails. These scores are not calibrated for your labels.";
  if (head.temperature === 1) return "This head is not calibrated: its probabilities may be overconfident.";
  return `Calibrated: logits are divided by a temperature of ${head.temperature.toFixed(2)}, fitted on held-out data.`;
}

export function showThreshold() {
  $("classify-threshold-value").textContent = `${Number(Number($("classify-threshold").value).toFixed(1))}%`;
}

/** Set the threshold that was fitted for the head, if there is one. */
export function resetThreshold() {
  const head = usesHead() ? selectedHead("classify") : null;
  const fitted = head?.abstain_below;
  if (fitted !== null && fitted !== undefined) $("classify-threshold").value = String(100 * fitted);
  $("classify-threshold-note").textContent = fitted
    ? `The threshold fitted for this head${head.precision ? `, for a precision of ${percent(head.precision)}` : ""}.`
    : "No threshold was fitted; choose one.";
  showThreshold();
}
