// Leave-one-out attribution: the words of a text, coloured by how much they decided.

import { el, percent } from "./dom.js";
import { headsFor } from "./server.js";

const MAX_PIECES = 64; // longer texts are split into so many groups of words
const MAX_CHARACTERS = 2000; // of longer texts no attribution is shown

/** Request the attribution of a text, or of a pair of texts; null if it is too long. */
export function attributionOf(call, model, text, head) {
  const characters = typeof text === "string" ? text.length : text[0].length + text[1].length;
  if (characters > MAX_CHARACTERS) return null;
  const body = { text, max_pieces: MAX_PIECES, ...(headsFor("classify", model).length > 1 ? { head } : {}) };
  return call("attribute", body);
}

/** The words with their weights as colours, and a sentence about the one that decided most. */
export function renderAttribution({ label, score, pieces }) {
  const largest = Math.max(0.1, ...pieces.map(({ weight }) => Math.abs(weight)));
  const words = pieces.flatMap(({ text, weight, sequence }, i) => {
    const level = Math.round((5 * Math.abs(weight)) / largest);
    const [, before, word, after] = /^(\s*)([^]*?)(\s*)$/.exec(text);
    const mark = el("span", { className: `word ${weight >= 0 ? "for" : "against"}-${level}`, title: `${weight >= 0 ? "+" : "−"}${percent(Math.abs(weight))}` }, word);
    const separator = sequence && !pieces[i - 1]?.sequence ? [el("br")] : [];
    return [...separator, before, mark, after];
  });
  const best = pieces.reduce((a, b) => (b.weight > a.weight ? b : a));
  const summary =
    best.weight > 0.005
      ? `“${best.text.trim()}” decided most: without it, the probability of ${label} falls from ${percent(score)} to ${percent(Math.max(0, score - best.weight))}.`
      : `No single word decided: the probability of ${label} stays near ${percent(score)} without any one of them.`;
  const legend = el("p", { className: "quiet" }, el("span", { className: "word for-4" }, "for"), " and ", el("span", { className: "word against-4" }, "against"), ` ${label}. `, summary);
  return [el("p", { className: "text attributed" }, ...words), legend];
}
