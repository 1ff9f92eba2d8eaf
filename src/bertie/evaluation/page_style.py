"""The template, stylesheet and script of report pages: light, dark and print, without external resources."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'sha256-{hash}'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<div class="page">
<nav aria-label="Contents"><ol>{contents}</ol></nav>
<main><header><h1>{title}</h1>{header}</header>{body}</main>
</div>
<script>{script}</script>
</body>
</html>
"""

STYLE = """
:root {
  color-scheme: light dark; --page: #fff; --card: #f5f7f9; --ink: #15191d; --faint: #5b6670; --rule: #dfe3e8;
  --a: #1d5fa8; --b: #b4500a; --good: #14743f; --bad: #a8321a;
  --warn: #fff3dc; --warn-ink: #5f3a00; --warn-rule: #e0a030;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #111417; --card: #1a1f24; --ink: #e7eaed; --faint: #9aa5b0; --rule: #2d343b;
    --a: #7db7f5; --b: #f3a35f; --good: #62cf94; --bad: #ff9c85;
    --warn: #30250e; --warn-ink: #ffdb9c; --warn-rule: #8a651e;
  }
}

@media print {
  :root {
    --page: #fff; --card: #f5f7f9; --ink: #000; --faint: #444; --rule: #bbb; --a: #1d5fa8; --b: #b4500a;
    --good: #14743f; --bad: #a8321a; --warn: #fff; --warn-ink: #000; --warn-rule: #888;
  }
  nav, .filter { display: none; }
  section, figure, tr { break-inside: avoid; }
  details::details-content { content-visibility: visible; block-size: auto; }
  body { font-size: 11pt; } div.scroll, div.tall { overflow: visible; max-height: none; }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 1rem; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
.page { max-width: 76rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
main { min-width: 0; max-width: 58rem; }
nav ol { list-style: none; margin: 0; padding: 0; font-size: .875rem; }
nav a { display: block; color: var(--faint); text-decoration: none; padding: .2rem .6rem; border-radius: .3rem; }
nav a:hover, nav a:focus-visible { color: var(--ink); background: var(--card); }
@media screen and (min-width: 68rem) {
  .page { display: grid; grid-template-columns: 13rem minmax(0, 1fr); gap: 2.5rem; }
  nav { position: sticky; top: 1.5rem; align-self: start; max-height: calc(100vh - 3rem); overflow-y: auto; }
}
@media (max-width: 67.99rem) { nav { display: none; } }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .75rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.75rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.lead { color: var(--faint); }
.notice { background: var(--warn); color: var(--warn-ink); border-left: .3rem solid var(--warn-rule);
  padding: .7rem 1rem; border-radius: .3rem; max-width: none; font-weight: 500; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(12rem, 1fr)); gap: .75rem; margin: 1.25rem 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: .5rem; padding: .8rem 1rem;
  min-width: 0; }
.tile dt { color: var(--faint); font-size: .85rem; }
.tile dd { margin: 0; font-size: 1.75rem; font-weight: 650; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile dd.note { font-size: .85rem; font-weight: 400; color: var(--faint); line-height: 1.4; margin-top: .2rem; }
.tile.good dd:not(.note) { color: var(--good); } .tile.bad dd:not(.note) { color: var(--bad); }
.scroll { overflow-x: auto; margin: .75rem 0; }
.tall { max-height: 34rem; overflow: auto; border-bottom: 1px solid var(--rule); }
.tall thead th { position: sticky; top: 0; background: var(--page); }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption, figcaption { text-align: left; color: var(--faint); font-size: .85rem; padding: .3rem 0; }
th, td { text-align: left; padding: .35rem 1rem .35rem 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
td { overflow-wrap: break-word; min-width: 3.5rem; } th { font-weight: 600; white-space: nowrap; }
th.number, td.number { text-align: right; white-space: nowrap; }
th button { font: inherit; color: inherit; background: none; border: 0; padding: 0; cursor: pointer; }
th button::after { content: " ↕"; color: var(--faint); font-weight: 400; }
th[aria-sort=ascending] button::after { content: " ↑"; } th[aria-sort=descending] button::after { content: " ↓"; }
th button:focus-visible, summary:focus-visible, a:focus-visible { outline: 2px solid var(--a); outline-offset: 2px; }
.filter input { font: inherit; font-size: .9rem; padding: .3rem .6rem; width: 18rem; max-width: 100%;
  color: var(--ink); background: var(--page); border: 1px solid var(--faint); border-radius: .3rem; }
.filter output { color: var(--faint); font-size: .85rem; margin-left: .75rem; }
.marked { white-space: pre-wrap; }
mark { color: inherit; border-radius: .2rem; padding: 0 .05rem; }
mark.for { background: color-mix(in srgb, var(--b) calc(var(--w) * 60%), transparent); }
mark.against { background: color-mix(in srgb, var(--a) calc(var(--w) * 60%), transparent); }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--faint); font-size: .9rem; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; }
svg .end { text-anchor: end; } svg .mid { text-anchor: middle; } svg .name { fill: var(--faint); }
svg .small { font-size: 10px; } svg .strong { font-weight: 650; }
svg .grid { stroke: var(--rule); }
svg polyline { fill: none; stroke-width: 1.8; } svg line.a, svg line.b, svg line.c { stroke-width: 2; }
svg .a { stroke: var(--a); } svg .b { stroke: var(--b); } svg .c { stroke: var(--good); } svg .d { stroke: var(--bad); }
svg .faint { stroke: var(--faint); stroke-dasharray: 4 4; } svg .band { stroke: none; opacity: .18; }
svg circle.a, svg .band.a { fill: var(--a); } svg circle.b, svg .band.b { fill: var(--b); }
svg circle.c { fill: var(--good); } svg circle.d { fill: var(--bad); }
svg .cell { fill: var(--a); stroke: var(--rule); } svg .wrong { fill: var(--b); }
svg .heat { fill: var(--a); } svg .heat.wrong { fill: var(--b); } svg .frame { fill: var(--card); stroke: var(--rule); }
svg.zoom { cursor: zoom-in; } svg.zoom.near { cursor: zoom-out; }
"""

SCRIPT = """
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const value = (row, i) => {
    const text = row.cells[i].textContent.trim(), number = parseFloat(text.replaceAll(",", ""));
    return /^[-+\\d.]/.test(text) && !isNaN(number) ? number : text.toLowerCase();
  };
  table.querySelectorAll("th button").forEach((button) => button.addEventListener("click", () => {
    const head = button.parentNode, i = head.cellIndex, up = head.getAttribute("aria-sort") == "descending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const rows = [...body.rows].map((row) => [value(row, i), row]);
    const compare = (a, b) => typeof a != typeof b ? (typeof a == "number" ? -1 : 1) : a < b ? -1 : a > b ? 1 : 0;
    rows.sort(([a], [b]) => compare(a, b) * (up ? 1 : -1));
    body.append(...rows.map(([, row]) => row));
  }));
}
for (const input of document.querySelectorAll(".filter input")) {
  const output = input.nextElementSibling, table = input.closest(".filtered").querySelector("table");
  const rows = [...table.tBodies[0].rows];
  const filter = () => {
    const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    output.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  input.addEventListener("input", filter);
  filter();
}
for (const map of document.querySelectorAll("svg.zoom")) {
  const whole = map.getAttribute("viewBox"), [left, top, width, height] = whole.split(" ").map(Number);
  map.addEventListener("click", (event) => {
    const near = map.classList.toggle("near"), box = map.getBoundingClientRect();
    if (!near) { map.setAttribute("viewBox", whole); return; }
    const inside = (at, size) => Math.min(Math.max(at - size / 8, 0), size * 3 / 4);
    const x = inside((event.clientX - box.left) / box.width * width, width);
    const y = inside((event.clientY - box.top) / box.height * height, height);
    map.setAttribute("viewBox", `${left + x} ${top + y} ${width / 4} ${height / 4}`);
  });
}
"""
