// Helpers to build the page: elements, numbers, and text with highlighted spans.

export const $ = (id) => document.getElementById(id);

/** Create an element with properties, attributes (aria-…, role, data-…) and children. */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element && !name.includes("-")) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const percent = (x) => (x >= 0.9995 && x < 1 ? ">99.9%" : `${(100 * x).toFixed(1)}%`);
export const twoDecimals = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2); // no −0.00
export const pluralize = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
export const codePoints = (text) => Array.from(text); // the server counts code points, JavaScript UTF-16 code units
export const lines = (text) => text.split("\n").map((line) => line.trim()).filter(Boolean);

/** A function that slices text by code points; fast where these equal UTF-16 code units. */
export function slicer(text) {
  if (!/[\ud800-\udfff]/.test(text)) return (start, end) => text.slice(start, end);
  const points = codePoints(text);
  return (start, end) => points.slice(start, end).join("");
}

/** A labelled bar for a score, with an optional marker for a threshold; with `onSelect` its label is a button. */
export function bar(label, score, { threshold = null, best = false, onSelect = null, title = "" } = {}) {
  const fill = el("span", { className: "fill" });
  fill.style.setProperty("inline-size", `${(100 * Math.max(0, Math.min(1, score))).toFixed(2)}%`);
  const track = el("span", { className: "track", "aria-hidden": "true" }, fill);
  if (threshold !== null) {
    const line = el("span", { className: "mark" });
    line.style.setProperty("inset-inline-start", `${(100 * threshold).toFixed(2)}%`);
    track.append(line);
  }
  const name = onSelect ? el("button", { type: "button", className: "name", title }, label) : el("span", { className: "name" }, label);
  if (onSelect) name.addEventListener("click", onSelect);
  return el("li", { className: best ? "best" : "" }, name, track, el("span", { className: "score" }, percent(score)));
}

/** Text with spans wrapped in elements; `spans` are sorted and do not overlap. */
export function wrapSpans(text, spans, wrap) {
  const slice = slicer(text);
  const out = document.createDocumentFragment();
  let position = 0;
  for (const span of spans) {
    out.append(slice(position, span.start), wrap(slice(span.start, span.end), span));
    position = span.end;
  }
  out.append(slice(position, undefined));
  return out;
}

/** Announce a message to screen readers. */
export const announce = (message) => {
  $("announcement").textContent = message;
};

export function setOptions(select, rows, selected) {
  select.replaceChildren(...rows.map(([value, label]) => el("option", { value, defaultSelected: value === selected, selected: value === selected }, label)));
}

/** Colours as a canvas needs them: it does not support light-dark(), so they are resolved on an element. */
export function resolveColours(...names) {
  const root = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(el("span", { className: "probe" }));
  const colours = names.map((name) => {
    probe.style.setProperty("color", root.getPropertyValue(name).trim());
    return getComputedStyle(probe).color;
  });
  probe.remove();
  return colours;
}
