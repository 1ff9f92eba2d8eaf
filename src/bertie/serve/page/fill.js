// The views of the masked language model: fill-mask, and predictions for every token.

import { $, announce, bar, el, percent, slicer } from "./dom.js";
import { requireHead, requireText, server, UserError } from "./server.js";
import { py } from "./snippets.js";
import { createView } from "./view.js";

const MAX_MASKS = 20; // that are displayed
const history = []; // texts before predictions were put into them

export const fillView = createView("fill", async ({ state, model, output, call, answered }) => {
  requireHead("fill", "masked-language modelling", model);
  const text = requireText(state.text);
  const token = model.mask_token;
  $("fill-undo").hidden = !history.length;
  if (!text.includes(token)) throw new UserError(`The text needs at least one ${token} token.`);
  const topK = Number(state.top);
  const { results } = await call("fill", { texts: [text], top_k: topK }, `client.fill([${py(text)}], top_k=${topK})`);
  const [result] = results;
  const blocks = result.masks.slice(0, MAX_MASKS).map((mask, i) => renderMask(text, mask, i, result.masks.length));
  const hidden = result.masks.length - MAX_MASKS;
  if (hidden > 0) blocks.push(el("p", { className: "quiet" }, `… and ${hidden} more masks`));
  output.replaceChildren(el("div", { className: "stack masks" }, ...blocks));
  answered(result);
  const best = result.masks.slice(0, 5).map(({ candidates: [first] }) => `${first.text.trim()} ${percent(first.score)}`);
  announce(`Predictions: ${best.join(", ")}`);
});

function renderMask(text, mask, i, count) {
  const slice = slicer(text);
  const before = `${mask.start > 30 ? "… " : ""}${slice(Math.max(0, mask.start - 30), mask.start)}`;
  const after = `${slice(mask.end, mask.end + 30)}${slice(mask.end + 30, mask.end + 31) ? " …" : ""}`;
  const context = el("p", { className: "where quiet" }, before, el("b", {}, "▢"), after);
  const bars = mask.candidates.map(({ text: word, token, score }, rank) => {
    const label = word.trim() || token;
    const onSelect = () => putPrediction(text, mask, label.replace(/^##/, ""));
    return bar(label, score, { best: rank === 0, onSelect, title: `Put “${label}” into the text` });
  });
  const title = el("h3", {}, count > 1 ? `Mask ${i + 1}` : "Mask");
  return el("div", {}, title, context, el("ol", { className: "bars", "aria-label": `Predictions for mask ${i + 1}` }, ...bars));
}

/** Replace a mask by a prediction. */
function putPrediction(text, mask, word) {
  const slice = slicer(text);
  history.push(text);
  $("fill-undo").hidden = false;
  const before = slice(0, mask.start);
  $("fill-text").value = `${before}${before.trim() ? word : word.replace(/^./u, (letter) => letter.toUpperCase())}${slice(mask.end, undefined)}`;
  announce(`Put “${word}” into the text`);
  fillView.update();
}

export function undoPrediction() {
  $("fill-text").value = history.pop() ?? $("fill-text").value;
  fillView.update();
}

export function insertMask() {
  const box = $("fill-text");
  box.setRangeText(server.model?.mask_token ?? "", box.selectionStart, box.selectionEnd, "end");
  box.focus();
  fillView.updateLater();
}

// --- token predictions ---

const SURPRISING = 0.01; // probabilities below are emphasized

export const tokensView = createView("tokens", async ({ state, model, output, call, answered }) => {
  requireHead("fill", "masked-language modelling", model);
  const text = requireText(state.text);
  const result = await call("predict_tokens", { text, top_k: 5 });
  const { tokens } = result;
  if (!tokens.length) throw new UserError("Enter a text.");
  const probabilities = tokens.map(({ log_likelihood: logProbability }) => Math.exp(logProbability));
  const buttons = tokens.map((token, i) => {
    const level = Math.round(10 * Math.sqrt(probabilities[i]));
    const surprising = probabilities[i] < SURPRISING ? " surprising" : "";
    return el("button", { type: "button", className: `level-${level}${surprising}`, title: `${percent(probabilities[i])}, rank ${token.rank.toLocaleString("en")}` }, token.text);
  });
  const details = el("div", { className: "details" });
  const select = (i) => {
    buttons.forEach((button, j) => button.setAttribute("aria-pressed", String(i === j)));
    details.replaceChildren(...describeToken(tokens[i], probabilities[i]));
    announce(details.textContent);
  };
  buttons.forEach((button, i) => button.addEventListener("click", () => select(i)));
  const perplexity = Math.exp(-result.log_likelihood / tokens.length);
  const first = tokens.filter(({ rank }) => rank === 1).length;
  const summary = `Pseudo-log-likelihood ${result.log_likelihood.toFixed(2)}, pseudo-perplexity ${perplexity.toFixed(1)}; ${first} of ${tokens.length} tokens are the model's first choice.`;
  output.replaceChildren(
    el("h3", {}, "Tokens ", el("span", { className: "quiet" }, "select one to see what is predicted in its place")),
    el("div", { className: "tokens predicted", role: "group", "aria-label": "Tokens with their probabilities" }, ...buttons),
    el("p", { className: "quiet scale", "aria-hidden": "true" }, "improbable ", ...[0, 2, 4, 6, 8, 10].map((level) => el("span", { className: `level-${level}` })), " probable"),
    details,
    el("p", { className: "summary" }, summary)
  );
  const least = probabilities.indexOf(Math.min(...probabilities));
  select(least);
  answered(result);
});

function describeToken(token, probability) {
  const bars = token.candidates.map(({ text, token: piece, score }) => bar(text.trim() || piece, score, { best: (text.trim() || piece).replace(/^##/, "").toLowerCase() === token.text.toLowerCase() }));
  return [
    el("h3", {}, `In place of “${token.text}” `, el("span", { className: "quiet" }, `itself ${percent(probability)}, rank ${token.rank.toLocaleString("en")}`)),
    el("ol", { className: "bars", "aria-label": `Predictions in place of ${token.text}` }, ...bars),
  ];
}
