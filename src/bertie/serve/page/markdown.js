// Passages in Markdown as elements: headings, lists, code and emphasis; with highlighted spans. No HTML is interpreted.

import { el, slicer } from "./dom.js";

// Highlights are marked by characters of the private use area, which survive the parsing of lines.
const [START, END] = ["\ue000", "\ue001"];
const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|!?\[[^\]\n]*\]\([^)\s]*\)|\ue000|\ue001)/;

/** A passage as elements; `highlights` are pairs of start and end, in code points. */
export function renderMarkdown(text, highlights) {
  const slice = slicer(text.replaceAll(/[\ue000\ue001]/g, " "));
  let marked = "";
  let position = 0;
  for (const [start, end] of highlights) {
    marked += `${slice(position, start)}${START}${slice(start, end)}${END}`;
    position = end;
  }
  marked += slice(position, undefined);
  const out = document.createDocumentFragment();
  for (const block of splitBlocks(marked)) out.append(renderBlock(block));
  return out;
}

const FENCE = /^\s*[\ue000]?```/;

/** Lists of lines: paragraphs, lists, tables; code between fences is one block, whatever it contains. */
function splitBlocks(text) {
  const blocks = [[]];
  let fenced = false;
  for (const row of text.split("\n")) {
    if (FENCE.test(row)) {
      if (!fenced) blocks.push([]);
      blocks.at(-1).push(row);
      fenced = !fenced;
      if (!fenced) blocks.push([]);
    } else if (fenced || row.trim()) blocks.at(-1).push(row);
    else blocks.push([]);
  }
  return blocks.filter((block) => block.some((row) => row.trim()));
}

function renderBlock(rows) {
  if (FENCE.test(rows[0]) || rows.every((row) => /^( {4}|\t)/.test(row))) {
    const code = rows.filter((row) => !FENCE.test(row)).join("\n");
    return el("pre", {}, el("code", {}, ...inline(code, false)));
  }
  if (rows.every((row) => /^\s*\|/.test(row))) {
    const cells = rows.filter((row) => !/^[\s|:-]+$/.test(row)).map((row) => row.trim().replace(/^\||\|$/g, "").split("|"));
    return el("table", {}, el("tbody", {}, ...cells.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, ...inline(cell.trim())))))));
  }
  const heading = /^[\ue000]?(#{1,6})\s+(.*)$/.exec(rows[0]);
  if (heading) {
    const title = el("p", { className: "heading" }, ...inline(heading[2]));
    return rows.length > 1 ? fragment(title, renderBlock(rows.slice(1))) : title;
  }
  const item = /^\s*(?:[-*+]|\d+[.)])\s+/;
  if (item.test(rows[0])) {
    const items = [];
    for (const row of rows) {
      if (item.test(row)) items.push(row.replace(item, ""));
      else items[items.length - 1] += ` ${row.trim()}`;
    }
    return el("ul", {}, ...items.map((content) => el("li", {}, ...inline(content))));
  }
  return el("p", {}, ...inline(rows.map((row) => row.trim().replace(/^>\s?/, "")).join(" ")));
}

function fragment(...children) {
  const out = document.createDocumentFragment();
  out.append(...children);
  return out;
}

/** Text with code, strong text, the texts of links, and highlights. */
function inline(text, formatted = true) {
  const out = [];
  let highlighted = false;
  const add = (node) => out.push(highlighted ? el("mark", { className: "hue-0" }, node) : node);
  for (const part of text.split(formatted ? INLINE : /(\ue000|\ue001)/)) {
    if (part === START) highlighted = true;
    else if (part === END) highlighted = false;
    else if (formatted && /^`[^]+`$/.test(part)) add(el("code", {}, ...inline(part.slice(1, -1), false)));
    else if (formatted && /^\*\*[^]+\*\*$/.test(part)) add(el("strong", {}, ...inline(part.slice(2, -2), false)));
    else if (formatted && /^!?\[[^]*\]\([^]*\)$/.test(part)) out.push(...inline(part.replace(/^!?\[([^]*)\]\([^]*\)$/, "$1")));
    else if (part) add(part);
  }
  return out;
}
