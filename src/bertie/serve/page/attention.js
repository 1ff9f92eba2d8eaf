// The attention view: all layers and heads at a glance, one of them in detail, and the words that decided beside it.

import { attributionOf, renderAttribution } from "./attribution.js";
import { $, announce, bar, el, percent, resolveColours, svg } from "./dom.js";
import { findHead, requireText, UserError } from "./server.js";
import { createView } from "./view.js";

const overviews = new WeakMap(); // by output: the text and model of its grid of heads, and its weights

export const attentionView = createView("attention", async ({ state, model, output, call, answered, rest }) => {
  const text = requireText(state.text);
  const layer = Number(state.layer);
  const head = state.head === "" ? null : Math.min(Number(state.head), model.heads - 1);
  const classifier = findHead("classify", state.classifier, model);
  const parts = prepare(output);
  const known = overviews.get(output);
  const isKnown = known && known.text === text && known.model === model;
  const result = await call("attention", { text, layer: Math.min(layer, model.layers - 1), head });
  showDetail(parts, result, state);
  let all = isKnown ? known.all : null;
  output.redraw = () => {
    showDetail(parts, result, null);
    if (all) showOverview(parts, all, result);
  };
  answered(result);
  for (const part of [parts.attribution, parts.overview]) part.classList.add("stale");
  await rest();
  const [heads, attribution] = await Promise.all([
    all ?? call("attention_all", { text }).catch((error) => showTooLong(parts, error)),
    classifier && !classifier.pairs ? attributionOf(call, model, text, classifier.head) : null,
  ]);
  all = heads;
  for (const part of [parts.attribution, parts.overview]) part.classList.remove("stale");
  if (all) {
    overviews.set(output, { text, model, all });
    showOverview(parts, all, result);
  }
  parts.attribution.hidden = !attribution;
  if (attribution) parts.attribution.querySelector(".body").replaceChildren(...renderAttribution(attribution));
});

/** The elements of a column, created once. */
function prepare(output) {
  if (!output.parts) {
    const figure = (side, title, note) => {
      const drawing = el("div", { className: `drawing ${side}`, tabIndex: 0, role: "region", "aria-label": title });
      const list = el("ol", { className: `bars ${side}-list`, "aria-label": `Highest weights, ${title.toLowerCase()}` });
      return el("figure", {}, el("figcaption", {}, `${title} `, el("span", { className: "quiet" }, note)), drawing, list);
    };
    const tokens = el("div", { className: "tokens", role: "group", "aria-label": "Tokens" });
    const overview = el("div", { className: "heads-grid", tabIndex: 0, role: "region", "aria-label": "All layers and heads" });
    const attribution = el("div", { className: "attribution", hidden: true }, el("p", { className: "caption" }, "Which words decided ", el("span", { className: "quiet" }, "leave-one-out attribution of the predicted label")), el("div", { className: "body" }));
    output.replaceChildren(
      el("h3", {}, "Tokens ", el("span", { className: "quiet" }, "select one to see what it attends to")),
      tokens,
      el("div", { className: "pair" }, figure("bidirectional", "Bidirectional", "as the model computes it"), figure("causal", "Causal mask", "tokens to the right are hidden")),
      el("div", { className: "pair" }, el("figure", {}, el("figcaption", {}, "All layers and heads ", el("span", { className: "quiet" }, "rows are layers, columns heads; select one")), overview), attribution)
    );
    output.parts = { output, tokens, overview, attribution };
  }
  return output.parts;
}

const displayToken = (token) => token.text.replace(/^##/, "·").replace(/^[Ġ▁]/, "").replace(/Ċ/g, "⏎") || "␣";

/** Show one layer: the tokens, and the weights as lines or as a heat map. */
function showDetail(parts, result, state) {
  const chosen = state?.token ?? "";
  const asked = chosen === "" ? (parts.selected ?? result.tokens.findIndex((token) => !token.special)) : Number(chosen);
  const redraw = (selected) => {
    parts.selected = selected;
    draw(parts, result, selected);
  };
  const buttons = result.tokens.map((token, i) => {
    const button = el("button", { type: "button", className: token.special ? "special" : "" }, displayToken(token));
    button.addEventListener("click", () => {
      $("attention-form").elements.token.value = String(i);
      redraw(i);
      attentionView.onUpdate();
    });
    return button;
  });
  parts.tokens.replaceChildren(...buttons);
  redraw(Math.max(0, Math.min(asked, result.tokens.length - 1)));
}

function draw(parts, { tokens, weights, causal }, selected) {
  Array.from(parts.tokens.children).forEach((button, i) => button.setAttribute("aria-pressed", String(i === selected)));
  const drawing = $("attention-form").elements.display.value === "lines" ? drawLines : drawHeatMap;
  const select = (i) => parts.tokens.children[i].click();
  const summaries = [];
  for (const [side, matrix] of [["bidirectional", weights], ["causal", causal]]) {
    const box = parts.output.querySelector(`.${side}`);
    const { scrollTop, scrollLeft } = box;
    box.replaceChildren(drawing(tokens, matrix, selected, box.clientWidth - 24, select));
    box.scrollTo(scrollLeft, scrollTop);
    const row = matrix[selected].map((weight, i) => ({ weight, i })).filter(({ weight }) => weight >= 0.0005);
    row.sort((a, b) => b.weight - a.weight);
    const bars = row.slice(0, 5).map(({ weight, i }, rank) => bar(displayToken(tokens[i]), weight, { best: rank === 0 }));
    parts.output.querySelector(`.${side}-list`).replaceChildren(...bars);
    const top = row.slice(0, 3).map(({ weight, i }) => `${displayToken(tokens[i])} ${percent(weight)}`);
    summaries.push(`${side === "causal" ? "Causal" : "Bidirectional"}: ${top.join(", ")}`);
  }
  announce(`${displayToken(tokens[selected])} attends most to. ${summaries.join(". ")}`);
}

// --- all layers and heads ---

/** Of all heads together, fewer tokens can be shown than of one. */
function showTooLong(parts, error) {
  if (!(error instanceof UserError)) throw error;
  parts.overview.replaceChildren(el("p", { className: "quiet" }, error.message));
  return null;
}

const WIDE_HEADS = 8; // more heads get the whole width

/** A grid of small heat maps, one row per layer, as in BertViz's model view. */
function showOverview(parts, all, { layer, head }) {
  const [accent] = resolveColours("--accent");
  parts.overview.closest(".pair").classList.toggle("single", all.heads > WIDE_HEADS);
  const size = Math.max(24, Math.min(72, Math.floor((parts.overview.clientWidth - 60) / all.heads) - 6));
  const rows = all.weights.map((heads, i) =>
    el(
      "div",
      { className: "layer" },
      el("span", { className: "quiet" }, String(i)),
      ...heads.map((matrix, j) => {
        const button = el("button", { type: "button", "aria-label": `Layer ${i}, head ${j}`, title: `layer ${i}, head ${j}`, "aria-pressed": String(i === layer && (head === null || j === head)) }, thumbnail(matrix, size, accent));
        button.addEventListener("click", () => {
          $("attention-layer").value = String(i);
          $("attention-head").value = String(j);
          attentionView.update();
          attentionView.section.scrollIntoView({ block: "start" });
        });
        return button;
      })
    )
  );
  const header = el("div", { className: "layer quiet", "aria-hidden": "true" }, el("span", {}, ""), ...all.weights[0].map((_, j) => el("span", {}, String(j))));
  parts.overview.style.setProperty("--cell", `${size}px`);
  parts.overview.replaceChildren(header, ...rows);
}

function thumbnail(matrix, size, accent) {
  const n = matrix.length;
  const out = el("canvas", { width: 2 * size, height: 2 * size });
  const canvas = out.getContext("2d");
  const cell = (2 * size) / n;
  canvas.fillStyle = accent;
  matrix.forEach((row, i) =>
    row.forEach((weight, j) => {
      if (weight < 0.005) return;
      canvas.globalAlpha = Math.min(1, Math.sqrt(weight));
      canvas.fillRect(j * cell, i * cell, Math.max(1, cell), Math.max(1, cell));
    })
  );
  return out;
}

// --- one layer in detail ---

const MIN_WEIGHT = 0.02; // smaller weights are not drawn as lines

function drawLines(tokens, matrix, selected, available, select) {
  const step = 22;
  const width = Math.max(280, Math.min(460, available));
  const [left, right] = [100, width - 100];
  const height = step * tokens.length + 8;
  const title = `Lines from each token to the tokens it attends to; those of ${displayToken(tokens[selected])} are emphasized`;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title, class: "lines" });
  const y = (i) => step * i + 16;
  const ends = (i, j) => ({ x1: left + 6, y1: y(i) - 4, x2: right - 6, y2: y(j) - 4 });
  matrix.forEach((row, i) =>
    row.forEach((weight, j) => {
      if (weight < MIN_WEIGHT || i === selected) return;
      out.append(svg("line", { ...ends(i, j), "stroke-opacity": Math.min(1, 0.9 * weight).toFixed(3) }));
    })
  );
  matrix[selected].forEach((weight, j) => {
    if (weight < MIN_WEIGHT / 4) return;
    const stroke = { "stroke-opacity": Math.min(1, 0.25 + weight).toFixed(3), "stroke-width": (1 + 8 * weight).toFixed(2) };
    out.append(svg("line", { ...ends(selected, j), class: "strong", ...stroke }));
  });
  tokens.forEach((token, i) => {
    const label = displayToken(token).slice(0, 14);
    const query = svg("text", { x: left, y: y(i), "text-anchor": "end", class: i === selected ? "query selected" : "query" }, label);
    query.addEventListener("click", () => select(i));
    out.append(query, svg("text", { x: right, y: y(i), class: matrix[selected][i] >= 0.1 ? "selected" : "" }, label));
  });
  return out;
}

function drawHeatMap(tokens, matrix, selected, available, select) {
  const n = tokens.length;
  const cell = Math.max(6, Math.min(24, Math.floor((available - 92) / n)));
  const labels = cell >= 10;
  const side = labels ? 84 : 4;
  const size = side + n * cell + 4;
  const scale = window.devicePixelRatio || 1;
  const title = `Heat map with one row per query token and one column per key token; the row of ${displayToken(tokens[selected])} is framed`;
  const out = el("canvas", { width: size * scale, height: size * scale, role: "img", "aria-label": title, className: "heat" });
  out.style.setProperty("inline-size", `${size}px`);
  out.style.setProperty("block-size", `${size}px`);
  const canvas = out.getContext("2d");
  canvas.scale(scale, scale);
  const [ink, accent, background] = resolveColours("--ink", "--accent", "--line");
  canvas.fillStyle = background;
  canvas.globalAlpha = 0.35;
  canvas.fillRect(side, side, n * cell, n * cell);
  canvas.fillStyle = accent;
  matrix.forEach((row, i) =>
    row.forEach((weight, j) => {
      canvas.globalAlpha = Math.min(1, Math.sqrt(weight));
      canvas.fillRect(side + j * cell, side + i * cell, cell - (cell > 8 ? 1 : 0), cell - (cell > 8 ? 1 : 0));
    })
  );
  canvas.globalAlpha = 1;
  canvas.strokeStyle = ink;
  canvas.strokeRect(side - 0.5, side + selected * cell - 0.5, n * cell, cell);
  if (labels) drawLabels(canvas, tokens, side, cell, ink);
  out.addEventListener("click", (event) => {
    const row = Math.floor((event.offsetY - side) / cell);
    if (row >= 0 && row < n) select(row);
  });
  return out;
}

function drawLabels(canvas, tokens, side, cell, ink) {
  canvas.fillStyle = ink;
  canvas.font = `${Math.min(12, cell - 1)}px system-ui, sans-serif`;
  canvas.textBaseline = "middle";
  tokens.forEach((token, i) => {
    const label = displayToken(token).slice(0, 12);
    canvas.textAlign = "right";
    canvas.fillText(label, side - 5, side + i * cell + cell / 2);
    canvas.save();
    canvas.translate(side + i * cell + cell / 2, side - 5);
    canvas.rotate(-Math.PI / 2);
    canvas.textAlign = "left";
    canvas.fillText(label, 0, 0);
    canvas.restore();
  });
}
