// Text files, opened with a button or dropped on a text field.

import { announce, el } from "./dom.js";

const MAX_BYTES = 5 * 1024 * 1024;
const TEXT_COLUMNS = ["text", "sentence", "document", "passage", "content", "title"];

/** Add a button to open files to a text field, and let it take dropped ones. */
export function acceptFiles(box, onLoad) {
  const input = el("input", { type: "file", hidden: true, accept: ".txt,.md,.csv,.tsv,.json,.jsonl,text/*" });
  const button = el("button", { type: "button", className: "plain small" }, "Open file");
  const note = el("span", { className: "quiet" }, "or drop one on the field");
  box.after(el("div", { className: "row files" }, button, note, input));
  const load = async (file) => {
    try {
      box.value = await readText(file, box.dataset.drop === "lines");
      note.textContent = file.name;
      announce(`Loaded ${file.name}`);
      onLoad();
    } catch (error) {
      note.textContent = error.message;
      announce(error.message);
    }
  };
  button.addEventListener("click", () => input.click());
  input.addEventListener("change", () => input.files[0] && load(input.files[0]));
  for (const type of ["dragenter", "dragover"]) {
    box.addEventListener(type, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      box.classList.add("drop");
    });
  }
  for (const type of ["dragleave", "drop"]) box.addEventListener(type, () => box.classList.remove("drop"));
  box.addEventListener("drop", (event) => {
    const file = event.dataTransfer?.files[0];
    if (!file) return;
    event.preventDefault();
    load(file);
  });
}

/** The text of a file; for a field with one text per line, the texts of a table. */
export async function readText(file, asLines) {
  if (file.size > MAX_BYTES) throw new Error(`${file.name} has more than 5 MB.`);
  const text = (await file.text()).replaceAll("\r\n", "\n").replace(/^\ufeff/, "");
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is not a UTF-8 text file.`);
  if (!asLines) return text;
  if (/\.jsonl?$/i.test(file.name)) return oneLineEach(jsonTexts(text, file.name));
  if (/\.[ct]sv$/i.test(file.name)) return oneLineEach(columnTexts(text, /\.tsv$/i.test(file.name) ? "\t" : ","));
  return text;
}

const oneLineEach = (texts) => texts.map((item) => String(item).replaceAll(/\s+/g, " ").trim()).filter(Boolean).join("\n");

function jsonTexts(text, name) {
  let rows;
  try {
    rows = /\.jsonl$/i.test(name) ? text.split("\n").filter((line) => line.trim()).map((line) => JSON.parse(line)) : JSON.parse(text);
  } catch {
    throw new Error(`${name} is not valid JSON.`);
  }
  if (!Array.isArray(rows)) throw new Error(`${name} has no list of texts.`);
  return rows.map((row) => (typeof row === "string" ? row : TEXT_COLUMNS.map((column) => row?.[column]).find((value) => typeof value === "string") ?? ""));
}

/** The column named text, sentence, …, or the one with the longest values. */
function columnTexts(text, separator) {
  const rows = parseTable(text, separator);
  const [header, ...body] = rows;
  const named = TEXT_COLUMNS.map((name) => header.findIndex((cell) => cell.trim().toLowerCase() === name)).find((i) => i >= 0);
  if (named !== undefined) return body.map((row) => row[named] ?? "");
  const size = (i) => rows.reduce((total, row) => total + (row[i]?.length ?? 0), 0);
  const longest = header.reduce((best, _, i) => (size(i) > size(best) ? i : best), 0);
  return rows.map((row) => row[longest] ?? "");
}

/** Rows and cells; a cell in quotes may contain the separator, new lines, and quotes written twice. */
function parseTable(text, separator) {
  const rows = [[""]];
  let quoted = false;
  for (let i = 0; i < text.length; i += 1) {
    const row = rows.at(-1);
    const c = text[i];
    if (quoted) {
      if (c !== '"') row[row.length - 1] += c;
      else if (text[i + 1] === '"') {
        row[row.length - 1] += '"';
        i += 1;
      } else quoted = false;
    } else if (c === '"' && row.at(-1) === "") quoted = true;
    else if (c === separator) row.push("");
    else if (c === "\n") rows.push([""]);
    else row[row.length - 1] += c;
  }
  return rows.filter((row) => row.some((cell) => cell.trim()));
}
