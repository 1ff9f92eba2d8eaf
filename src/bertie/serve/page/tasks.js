// The views of token classification, question answering and text classification.

import { attributionOf, renderAttribution } from "./attribution.js";
import { $, announce, bar, codePoints, el, percent, pluralize, slicer, svg, wrapSpans } from "./dom.js";
import { findHead, requireHead, requireText, UserError, withHead } from "./server.js";
import { py } from "./snippets.js";
import { createView } from "./view.js";

const MAX_SHOWN = 20000; // characters of a text that are displayed; the whole text is read

// --- token classification ---

const HUES = 6;

export const tagView = createView("tag", async ({ state, model, output, call, answered }) => {
  requireHead("tag", "token classification", model);
  const text = requireText(state.text);
  const [body, headArgument] = withHead("tag", state.head, model, { texts: [text] });
  const { results } = await call("tag", body, `client.tag([${py(text)}]${headArgument})`);
  const [result] = results;
  const all = findHead("tag", state.head, model).labels.map((label) => label.replace(/^[BIESLU]-/, ""));
  const labels = [...new Set(all)].filter((label) => label !== "O");
  const hue = (label) => `hue-${Math.max(0, labels.indexOf(label)) % HUES}`;
  const shown = slicer(text)(0, MAX_SHOWN);
  const spans = result.spans.filter((span) => span.end <= MAX_SHOWN);
  const marked = wrapSpans(shown, spans, (words, span) =>
    el("mark", { className: hue(span.label), title: `${span.label} ${percent(span.score)}` }, words, el("span", { className: "label" }, span.label))
  );
  if (shown.length < text.length) marked.append(` … (the whole text was read; the first ${MAX_SHOWN.toLocaleString("en")} characters are shown)`);
  const counts = labels.map((label) => [label, result.spans.filter((span) => span.label === label).length]);
  const items = counts.filter(([, n]) => n).map(([label, n]) => el("li", {}, el("span", { className: `swatch ${hue(label)}` }), `${label} `, el("b", {}, String(n))));
  output.replaceChildren(
    el("p", { className: "text marked", tabIndex: 0, role: "region", "aria-label": "The text with its labelled spans" }, marked),
    el("ul", { className: "legend" }, ...(items.length ? items : [el("li", { className: "quiet" }, "No spans.")]))
  );
  answered(result);
  announce(`${pluralize(result.spans.length, "span")}: ${result.spans.slice(0, 8).map((span) => `${span.text}, ${span.label}`).join("; ")}`);
});

// --- question answering ---

const CONTEXT = 1500; // characters shown before and after an answer

export const answerView = createView("answer", async ({ state, model, output, call, answered }) => {
  requireHead("answer", "question answering", model);
  const question = requireText(state.question, "a question");
  const text = requireText(state.context, "a context");
  const body = { questions: { question, documents: text }, top_k: 3 };
  const [{ results }, map] = await Promise.all([
    call("answer", body, `client.answer([(${py(question)}, ${py(text)})], top_k=3)`),
    call("windows", { text: question, pair: text }),
  ]);
  const [result] = results;
  const answers = result.answers.filter((answer) => answer.start !== null);
  const total = codePoints(text).length;
  const best = el("div", { className: "best-answer" });
  const windows = el("div", { className: "map" });
  const excerpt = el("div", { className: "text tall excerpt", tabIndex: 0, role: "region", "aria-label": "The text around the answer" });
  output.replaceChildren(best, windows, excerpt);
  const select = (answer) => {
    windows.replaceChildren(...windowMap(map, total, answer));
    showAnswer(excerpt, text, total, answer);
  };
  best.replaceChildren(...describeAnswers(answers, result, select));
  select(answers[0]);
  answered(result);
  announce(result.answers[0]?.start != null ? `Answer: ${answers[0].text}` : "No answer");
});

function describeAnswers(answers, result, select) {
  const [best] = answers;
  const found = result.answers[0]?.start != null; // the first one is empty if there is no answer
  const none = `“No answer” has a probability of ${percent(result.no_answer_score)}`;
  const verdict = found ? best.text : "No answer";
  const comparison = found ? `Probability ${percent(best.score)}. ${none}.` : `${none}: the text does not seem to contain the answer.`;
  const rows = [el("p", { className: found ? "verdict" : "verdict unsure" }, verdict), el("p", { className: "quiet" }, comparison)];
  if (answers.length < (found ? 2 : 1)) return rows;
  const bars = answers.map((answer, i) => bar(answer.text, answer.score, { best: found && i === 0, onSelect: () => select(answer), title: "Show it in the text" }));
  return [...rows, el("h3", {}, "Candidates ", el("span", { className: "quiet" }, "select one to see it in the text")), el("ol", { className: "bars candidates" }, ...bars)];
}

/** Show the text around an answer, scrolled to it. */
function showAnswer(box, text, total, answer) {
  const slice = slicer(text);
  if (!answer) {
    box.replaceChildren(slice(0, 2 * CONTEXT));
    return;
  }
  const start = Math.max(0, answer.start - CONTEXT);
  const end = Math.min(total, answer.end + CONTEXT);
  const span = { start: answer.start - start, end: answer.end - start };
  const excerpt = wrapSpans(slice(start, end), [span], (words) => el("mark", { className: "hue-0 answer-span" }, words));
  box.replaceChildren(start > 0 ? "… " : "", excerpt, end < total ? " …" : "");
  box.scrollTop = Math.max(0, box.querySelector(".answer-span").offsetTop - box.offsetTop - box.clientHeight / 2);
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

// --- classification ---

export const usesHead = () => $("classify-form").elements.labels.value === "head"; // else zero-shot

export const classifyView = createView("classify", async ({ state, model, output, call, answered, rest }) => {
  const text = requireText(state.text);
  const head = state.labels === "head" ? findHead("classify", state.head, model) : null;
  if (state.labels === "head") requireHead("classify", "text classification", model);
  const [body, python] = head ? headRequest(text, state, head, model) : zeroShotRequest(text, state);
  const { results } = await call("classify", body, python);
  const decided = (head && output.querySelector(".attribution")) || el("div", { className: "attribution" });
  decided.classList.add("stale"); // that of the text before, until its own is there
  const verdict = el("div", { className: "stack" });
  output.redraw = () => verdict.replaceChildren(...describeClassification(results[0], head));
  output.redraw();
  output.replaceChildren(verdict, decided);
  answered(results[0]);
  await rest();
  const attribution = head ? await attributionOf(call, model, body.texts[0], head.head) : null;
  decided.classList.remove("stale");
  decided.replaceChildren();
  if (attribution) decided.append(el("h3", {}, "Which words decided ", el("span", { className: "quiet" }, "leave-one-out attribution")), ...renderAttribution(attribution));
});

function headRequest(text, state, head, model) {
  const second = head.pairs ? requireText(state.pair, "a second text") : null;
  const [body, headArgument] = withHead("classify", head.head, model, { texts: head.pairs ? [[text, second]] : [text] });
  return [body, `client.classify([${head.pairs ? `(${py(text)}, ${py(second)})` : py(text)}]${headArgument})`];
}

function zeroShotRequest(text, state) {
  const labels = state.candidates.split(",").map((label) => label.trim()).filter(Boolean);
  if (!labels.length) throw new UserError("Enter at least one label.");
  const template = state.template.trim();
  const options = { ...(template ? { template } : {}), ...(state.multi ? { multi_label: true } : {}), ...(state.method === "auto" ? {} : { method: state.method }) };
  const python = Object.entries(options).map(([name, value]) => `, ${name}=${value === true ? "True" : py(value)}`).join("");
  return [{ texts: [text], labels, ...options }, `client.zero_shot([${py(text)}], [${labels.map(py).join(", ")}]${python})`];
}

/** The label and all scores, against the threshold as it is now. */
function describeClassification(result, head) {
  const threshold = Number($("classify-threshold").value) / 100;
  const rows = Object.entries(result.scores).sort((a, b) => b[1] - a[1]);
  const confident = result.score >= threshold;
  const verdict = el(
    "p",
    { className: confident ? "verdict" : "verdict unsure" },
    confident ? result.label : "Abstain",
    el("span", { className: "quiet" }, confident ? ` ${percent(result.score)}` : ` the best label, ${result.label}, has only ${percent(result.score)}`)
  );
  const bars = rows.map(([label, score], i) => bar(label, score, { threshold, best: i === 0 && confident }));
  announce(`${verdict.textContent}. ${rows.slice(0, 5).map(([label, score]) => `${label} ${percent(score)}`).join(", ")}`);
  return [verdict, el("ol", { className: "bars", "aria-label": "Labels, most probable first" }, ...bars), el("p", { className: "quiet calibration" }, calibrationNote(head))];
}

function calibrationNote(head) {
  if (!head) return "Zero-shot: the label whose embedding is nearest, or the hypothesis that the text entails. These scores are not calibrated for your labels.";
  if (head.temperature === 1) return "This head is not calibrated: its probabilities may be overconfident.";
  return `Calibrated: logits are divided by a temperature of ${head.temperature.toFixed(2)}, fitted on held-out data.`;
}

export function showThreshold() {
  $("classify-threshold-value").textContent = `${Number(Number($("classify-threshold").value).toFixed(1))}%`;
}

/** The parts of the form that fit the labels and the head; the threshold that was fitted for it, unless one was chosen. */
export function updateClassifyForm({ keepThreshold = false } = {}) {
  const head = usesHead() ? findHead("classify", $("classify-head").value) : null;
  $("classify-by-head").hidden = !usesHead();
  $("classify-zero-shot").hidden = usesHead();
  $("classify-pair-field").hidden = !head?.pairs;
  const fitted = head?.abstain_below ?? null;
  const box = $("classify-threshold");
  box.dataset.default = fitted === null ? "60" : String(100 * fitted);
  if (!keepThreshold) box.value = box.dataset.default;
  $("classify-threshold-note").textContent = fitted
    ? `The threshold fitted for this head${head.precision ? `, for a precision of ${percent(head.precision)}` : ""}.`
    : "No threshold was fitted; choose one.";
  showThreshold();
}
