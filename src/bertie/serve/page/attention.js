// The attention view: tokens, and the attention weights of one layer as lines or as a heat map.

import { $, announce, bar, el, percent, svg } from "./dom.js";
import { createView, requireText, sendRequest, showCounts } from "./server.js";

const state = { result: null, selected: 5 }; // the first “bank” of the example

export const attentionView = createView("attention", async (view, signal) => {
  const text = requireText($("attention-text").value);
  const layer = Number($("attention-layer").value);
  const head = $("attention-head").value === "" ? null : Number($("attention-head").value);
  const started = performance.now();
  const result = await sendRequest("attention", "attention", { text, layer, head }, null, signal);
  state.result = result;
  state.selected = Math.min(state.selected, result.tokens.length - 1);
  showTokens();
  drawAttention();
  showCounts(view, result, started);
});

const displayToken = (token) => token.text.replace(/^##/, "·").replace(/^[Ġ▁]/, "").replace(/Ċ/g, "⏎") || "␣";

function showTokens() {
  const buttons = state.result.tokens.map((token, i) =>
    el("button", { type: "button", className: token.special ? "special" : "", "data-token": i }, displayToken(token))
  );
  $("attention-tokens").replaceChildren(...buttons);
}

export function selectToken(i) {
  state.selected = i;
  drawAttention();
}

/** Draw the weights of the last result, if there is one. */
export function drawAttention() {
  if (!state.result) return;
  const { tokens, weights, causal } = state.result;
  const { selected } = state;
  for (const button of $("attention-tokens").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.token) === selected));
  }
  const draw = document.querySelector("input[name=drawing]:checked").value === "lines" ? drawLines : drawHeatMap;
  const summaries = [];
  for (const [side, matrix] of [["bidirectional", weights], ["causal", causal]]) {
    const box = $(`attention-${side}`);
    const { scrollTop, scrollLeft } = box;
    box.replaceChildren(draw(tokens, matrix, selected, box.clientWidth - 24));
    box.scrollTo(scrollLeft, scrollTop);
    const row = matrix[selected].map((weight, i) => ({ weight, i })).filter(({ weight }) => weight >= 0.0005);
    row.sort((a, b) => b.weight - a.weight);
    const bars = row.slice(0, 5).map(({ weight, i }, rank) => bar(displayToken(tokens[i]), weight, { best: rank === 0 }));
    $(`attention-${side}-list`).replaceChildren(...bars);
    const top = row.slice(0, 3).map(({ weight, i }) => `${displayToken(tokens[i])} ${percent(weight)}`);
    summaries.push(`${side === "causal" ? "Causal" : "Bidirectional"}: ${top.join(", ")}`);
  }
  announce(`${displayToken(tokens[selected])} attends most to. ${summaries.join(". ")}`);
}

const MIN_WEIGHT = 0.02; // smaller weights are not drawn as lines

function drawLines(tokens, matrix, selected, available) {
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
    out.append(
      svg("text", { x: left, y: y(i), "text-anchor": "end", class: i === selected ? "selected" : "", "data-token": i }, label),
      svg("text", { x: right, y: y(i), class: matrix[selected][i] >= 0.1 ? "selected" : "" }, label)
    );
  });
  return out;
}

/** Colours as a canvas needs them: it does not support light-dark(), so they are resolved on an element. */
function resolveColours(...names) {
  const root = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(el("span", { className: "probe" }));
  const colours = names.map((name) => {
    probe.style.setProperty("color", root.getPropertyValue(name).trim());
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return colours;
}

function drawHeatMap(tokens, matrix, selected, available) {
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
    if (row >= 0 && row < n) selectToken(row);
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
