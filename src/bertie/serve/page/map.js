// The map of texts: a scatter plot of embeddings in two dimensions, with clusters, hover and lasso.

import { announce, el, lines, pluralize, svg } from "./dom.js";
import { UserError } from "./server.js";
import { addCounts, createView } from "./view.js";

const MAX_TEXTS = 500;
const LABEL = 15; // pixels, the font size of a cluster's name
const HUES = 12;

export const mapView = createView("map", async ({ state, output, call, answered }) => {
  const all = lines(state.texts);
  if (all.length < 2) throw new UserError(`Enter at least 2 texts, one per line; there ${all.length ? "is 1" : "are none"}.`);
  const texts = all.slice(0, MAX_TEXTS);
  const clusters = state.clusters === "" ? null : Math.min(Number(state.clusters), texts.length);
  const result = await call("map", { texts, ...(clusters === null ? {} : { clusters }) });
  const detail = el("p", { className: "hovered text" }, "Hover over a point to read its text; draw a lasso around several to list them.");
  const list = el("div", { className: "members" });
  const show = (indices, title) => list.replaceChildren(...listTexts(texts, result, indices, title));
  const plot = drawPlot(texts, result, Math.max(300, output.clientWidth), detail, (indices) => {
    show(indices, indices ? `${pluralize(indices.length, "selected text")}` : null);
    announce(indices ? `${pluralize(indices.length, "text")} selected` : "No selection");
  });
  show(null, null);
  const left = all.length - texts.length;
  const note = left > 0 ? `The first ${MAX_TEXTS} of ${pluralize(all.length, "text")} are shown. ` : "";
  output.replaceChildren(
    el("div", { className: "plot-box" }, plot, detail),
    el("p", { className: "quiet" }, `${note}t-SNE of the embeddings: only nearness means something, not the axes. Clusters are found by k-means on the map.`),
    list
  );
  answered(addCounts(result.results));
  announce(`${pluralize(result.labels.length, "cluster")}: ${result.labels.join("; ")}`);
});

function drawPlot(texts, { points, clusters, labels }, width, detail, onSelect) {
  const height = Math.round(width < 600 ? width : 0.6 * width);
  const margin = width < 600 ? 24 : 44;
  const title = `Map of ${pluralize(texts.length, "text")} in ${pluralize(labels.length, "cluster")}: ${labels.join("; ")}. The list below has the texts.`;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, "data-width": width, role: "img", "aria-label": title, class: "plot" });
  const place = ([x, y]) => [margin + x * (width - 2 * margin), height - margin - y * (height - 2 * margin)];
  const places = points.map(place);
  const radius = Math.max(3.5, Math.min(8, 90 / Math.sqrt(texts.length)));
  const dots = places.map(([cx, cy], i) => svg("circle", { cx, cy, r: radius, class: `dot-${clusters[i] % HUES}` }, svg("title", {}, texts[i])));
  const names = labels.map((label, cluster) => {
    const own = places.filter((_, i) => clusters[i] === cluster);
    const x = own.reduce((sum, [value]) => sum + value, 0) / own.length;
    const y = Math.min(...own.map(([, value]) => value)) - radius - 7;
    const half = 0.29 * LABEL * label.length + 6; // about half the width of the name
    return svg("text", { x: Math.max(half, Math.min(width - half, x)), y: Math.max(LABEL, y), "text-anchor": "middle", class: "cluster" }, label);
  });
  const lasso = svg("path", { class: "lasso" });
  out.append(...dots, ...names, lasso);
  addHover(out, places, texts, clusters, labels, dots, detail);
  addLasso(out, places, dots, lasso, onSelect);
  return out;
}

/** The position of a pointer in the coordinates of the drawing. */
function position(out, event) {
  const box = out.getBoundingClientRect();
  const scale = Number(out.dataset.width) / box.width;
  return [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
}

function addHover(out, places, texts, clusters, labels, dots, detail) {
  let near = -1;
  out.addEventListener("pointermove", (event) => {
    const [x, y] = position(out, event);
    const distances = places.map(([px, py]) => Math.hypot(px - x, py - y));
    const nearest = distances.indexOf(Math.min(...distances));
    if (nearest === near) return;
    dots[near]?.classList.remove("near");
    near = distances[nearest] < 40 ? nearest : -1;
    if (near < 0) return;
    dots[near].classList.add("near");
    detail.replaceChildren(el("span", { className: `swatch dot-${clusters[near] % HUES}` }), texts[near], el("span", { className: "quiet" }, ` ${labels[clusters[near]]}`));
  });
}

/** Select the points inside a line that is drawn with the pointer; a click without drawing ends the selection. */
function addLasso(out, places, dots, lasso, onSelect) {
  let line = null;
  out.addEventListener("pointerdown", (event) => {
    line = [position(out, event)];
    out.setPointerCapture(event.pointerId);
  });
  out.addEventListener("pointermove", (event) => {
    if (!line) return;
    line.push(position(out, event));
    lasso.setAttribute("d", `M${line.map((point) => point.map((value) => value.toFixed(1)).join(" ")).join("L")}Z`);
  });
  const finish = () => {
    if (!line) return;
    const drawn = line.length > 3 ? line : null;
    line = null;
    lasso.removeAttribute("d");
    const inside = drawn ? places.flatMap((point, i) => (isInside(point, drawn) ? [i] : [])) : [];
    const selected = new Set(inside);
    dots.forEach((dot, i) => dot.classList.toggle("faded", selected.size > 0 && !selected.has(i)));
    onSelect(selected.size ? inside : null);
  };
  out.addEventListener("pointerup", finish);
  out.addEventListener("pointercancel", finish);
}

/** Whether a point lies inside a polygon: a ray from it crosses the border an odd number of times. */
export function isInside([x, y], polygon) {
  let inside = false;
  polygon.forEach(([x1, y1], i) => {
    const [x2, y2] = polygon[(i + 1) % polygon.length];
    if (y1 > y !== y2 > y && x < ((x2 - x1) * (y - y1)) / (y2 - y1) + x1) inside = !inside;
  });
  return inside;
}

/** The selected texts; without a selection, all of them by cluster. */
function listTexts(texts, { clusters, labels }, indices, title) {
  const items = (some) => el("ul", {}, ...some.map((i) => el("li", {}, texts[i])));
  if (indices) return [el("h3", {}, title), items(indices)];
  return labels.map((label, cluster) => {
    const own = clusters.flatMap((value, i) => (value === cluster ? [i] : []));
    const summary = el("summary", {}, el("span", { className: `swatch dot-${cluster % HUES}` }), label, el("span", { className: "quiet" }, ` ${pluralize(own.length, "text")}`));
    return el("details", {}, summary, items(own));
  });
}
