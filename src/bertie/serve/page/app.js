// The playground: one page without a framework or a build step. Each view has a form, examples, and a file of its own.

import { attentionView } from "./attention.js";
import { $, announce, el, pluralize, setOptions } from "./dom.js";
import { rerankView, searchView, showIndex, similarityView } from "./embeddings.js";
import { acceptFiles } from "./files.js";
import { fillView, insertMask, tokensView, undoPrediction } from "./fill.js";
import { mapView } from "./map.js";
import { copyText, fetchJson, headsFor, server, useKey } from "./server.js";
import { showRequest } from "./snippets.js";
import { makeFragment, parseFragment, readState, setDefaults, writeState } from "./state.js";
import { answerView, classifyView, showThreshold, tagView, updateClassifyForm } from "./tasks.js";

const views = new Map(
  [fillView, tokensView, attentionView, tagView, answerView, classifyView, similarityView, mapView, rerankView, searchView].map((view) => [view.name, view])
);
const names = [...views.keys()];
const tabs = new Map(names.map((name) => [name, document.querySelector(`#tabs a[href="#/${name}"]`)]));
const titles = new Map(names.map((name) => [name, tabs.get(name).textContent]));
const ON_SUBMIT = new Set(["search", "map"]); // views that wait for their button
const LONG_TEXT = 5000; // characters from which questions are answered only on submit
const ADDRESS_DELAY = 250; // milliseconds; browsers refuse to change the address too often
const loaded = new Set(); // views that have sent their first request
let examples = {};
let addressTimer = null;

const currentView = () => parseFragment(location.hash, names)?.view ?? names[0];

// --- views and the address ---

function showView() {
  const current = currentView();
  const { section } = views.get(current);
  for (const view of views.values()) view.section.hidden = view.section !== section;
  for (const [name, link] of tabs) {
    if (name === current) {
      link.setAttribute("aria-current", "page");
      const bar = $("tabs");
      if (link.offsetLeft < bar.scrollLeft || link.offsetLeft + link.offsetWidth > bar.scrollLeft + bar.clientWidth) bar.scrollLeft = link.offsetLeft - 16;
    } else link.removeAttribute("aria-current");
  }
  document.title = `${titles.get(current)} · Bertie playground`;
  showRequest(current);
  if (server.model && !loaded.has(current) && (current !== "search" || $("search-query").value.trim())) {
    loaded.add(current);
    views.get(current).update();
  }
}

const fragmentOf = (view) => {
  const model = server.model && server.model.name !== server.about.default ? server.model.name : "";
  return makeFragment(view.name, view.form, { model, compare: server.compared?.name ?? "" });
};

/** Keep the state of a view in the address, and in the link to the view. */
function saveState(view) {
  const fragment = fragmentOf(view);
  tabs.get(view.name).setAttribute("href", fragment);
  if (view.name !== currentView()) return;
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    if (view.name === currentView() && (!location.hash || parseFragment(location.hash, names))) history.replaceState(null, "", fragment);
  }, ADDRESS_DELAY);
}

/** Set the form of a view to the state that the address names, unless it is in that state already. */
function restoreState() {
  const { view: name, values } = parseFragment(location.hash, names) ?? { view: names[0], values: {} };
  const view = views.get(name);
  const find = (model) => server.about.models.find((row) => row.name === model) ?? null;
  const model = find(values.model ?? server.about.default) ?? server.model;
  const compared = values.compare ? find(values.compare) : null;
  if (Object.keys(values).length && (model !== server.model || compared !== server.compared)) useModels(model, compared);
  if (location.hash === tabs.get(name).getAttribute("href")) return; // the link to the view as it is now
  writeState(view.form, values);
  if (view === classifyView) updateClassifyForm({ keepThreshold: Object.hasOwn(values, "threshold") });
  loaded.delete(name);
}

// --- models ---

function useModels(model, compared = null) {
  server.model = model;
  server.compared = compared === model ? null : compared;
  const { name, layers, heads, width, max_length: maxLength, parameters, mask_token: mask } = model;
  const millions = `${(parameters / 1e6).toFixed(0)} million parameters`;
  $("model-summary").textContent = `${name}: ${millions}, ${layers} layers, ${heads} heads, hidden size ${width}, maximum length ${pluralize(maxLength, "token")}`;
  const rows = server.about.models.map((row) => [row.name, row.name]);
  setOptions($("model"), rows, name);
  setOptions($("compare"), [["", "no other model"], ...rows.filter(([other]) => other !== name)], server.compared?.name ?? "");
  for (const field of document.querySelectorAll(".models")) field.hidden = rows.length < 2;
  for (const element of document.querySelectorAll(".mask-token")) element.textContent = mask ?? "no mask token";
  if (mask) {
    const box = $("fill-text");
    box.value = withMask(box.value);
    box.dataset.default = withMask(box.dataset.default ?? "");
  }
  const count = (n) => Array.from({ length: n }, (_, i) => [String(i), String(i)]);
  keepValue($("attention-layer"), count(layers), String(layers - 1));
  keepValue($("attention-head"), [["", "mean over heads"], ...count(heads)], "");
  for (const [select, task] of [["classify-head", "classify"], ["tag-head", "tag"], ["attention-classifier", "classify"]]) {
    const found = headsFor(task).filter((row) => select !== "attention-classifier" || !row.pairs);
    const first = found.find((row) => !row.pairs) ?? found[0];
    keepValue($(select), found.map((row) => [row.head, row.pairs ? `${row.head} (pairs)` : row.head]), first?.head);
  }
  $("tag-head-field").hidden = headsFor("tag").length < 2;
  $("attention-classifier-field").hidden = !$("attention-classifier").options.length;
  loaded.clear();
  updateClassifyForm();
  showExamples();
}

/** New options for a select, which keeps its value if that is one of them. */
function keepValue(select, rows, selected) {
  const before = select.value;
  setOptions(select, rows, selected);
  if (before !== "" && rows.some(([value]) => value === before)) select.value = before;
}

const withMask = (text) => (server.model?.mask_token ? text.replaceAll(/\[MASK\]|<mask>/g, server.model.mask_token) : text);

async function load() {
  try {
    const [about, found] = await Promise.all([fetchJson("about", null), fetchJson("page/examples.json", null)]);
    [server.about, examples] = [about, { ...found, search: [] }];
  } catch (error) {
    $("model-summary").textContent = error.message;
    return;
  }
  for (const [name, [first]] of Object.entries(examples)) if (first) setDefaults(views.get(name).form, first.fields);
  examples.search = showIndex();
  useModels(server.about.models.find((model) => model.name === server.about.default));
  restoreState();
  showView();
}

// --- examples ---

function showExamples() {
  for (const view of views.values()) {
    const fitting = (examples[view.name] ?? []).filter(({ fields: { head } }) => !head || headsFor(view.name).some((row) => row.head === head));
    const buttons = fitting.map((example) => {
      const button = el("button", { type: "button", className: "plain small" }, example.name);
      button.addEventListener("click", () => useExample(view, example));
      return button;
    });
    const label = el("span", { className: "quiet" }, "Examples");
    view.form.querySelector(".examples").replaceChildren(...(buttons.length ? [label, ...buttons] : []));
  }
}

async function useExample(view, { fields }) {
  const values = {};
  for (const [name, value] of Object.entries(fields)) {
    if (typeof value === "string") values[name] = view === fillView ? withMask(value) : value;
    else values[name] = await loadExample(value.file);
  }
  writeState(view.form, values);
  if (view === classifyView) updateClassifyForm();
  view.update();
}

/** With other labels, an example's text is replaced by one that fits them; a text of the user stays. */
function useMatchingExample() {
  const { text, labels, head } = readState(classifyView.form);
  const rows = examples.classify ?? [];
  if (!rows.some(({ fields }) => fields.text === text)) return false;
  const match = rows.find(({ fields }) => (labels === "head" ? fields.head === head : fields.labels === labels));
  if (match) useExample(classifyView, match);
  return Boolean(match);
}

/** A book without its first paragraph, which says where it comes from. */
async function loadExample(file) {
  const text = await (await fetch(`page/${file}`)).text();
  return text.slice(text.indexOf("\n\n") + 2);
}

// --- events ---

function redrawAll() {
  for (const output of document.querySelectorAll(".output")) output.redraw?.();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (theme) localStorage.setItem("bertie-theme", theme);
  else localStorage.removeItem("bertie-theme");
  redrawAll(); // a canvas does not follow the theme
}

function listenToForm(view) {
  const { form } = view;
  const onChange = (event) => {
    if (view === classifyView && event.target.matches("#classify-head, [name=labels]")) {
      if (useMatchingExample()) return;
      updateClassifyForm();
    }
    if (event.target.matches("[name=display], [name=threshold]")) {
      showThreshold();
      redrawAll();
      saveState(view);
    } else if (event.type === "change" || !ON_SUBMIT.has(view.name)) {
      const { length } = Object.values(readState(form)).join("");
      if (event.type === "change") view.update();
      else if (view !== answerView || length < LONG_TEXT) view.updateLater(length);
    }
  };
  form.addEventListener("input", (event) => {
    if (event.target.matches("textarea, input:not([type=radio], [type=checkbox], [type=file])")) onChange(event);
  });
  form.addEventListener("change", (event) => {
    if (event.target.matches("select, [type=radio], [type=checkbox]")) onChange(event);
  });
  for (const box of form.querySelectorAll("[data-drop]")) acceptFiles(box, view.update);
  view.onUpdate = () => saveState(view);
}

function addPageListeners() {
  $("fill-mask").addEventListener("click", insertMask);
  $("fill-undo").addEventListener("click", undoPrediction);
  $("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey($("key").value);
    load();
  });
  const change = (model, compared) => {
    useModels(model, compared);
    saveState(views.get(currentView()));
    showView();
  };
  const find = (name) => server.about.models.find((model) => model.name === name) ?? null;
  $("model").addEventListener("change", () => change(find($("model").value), server.compared));
  $("compare").addEventListener("change", () => change(server.model, find($("compare").value)));
  $("theme").addEventListener("change", () => setTheme($("theme").value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  for (const button of document.querySelectorAll("[data-copy]")) {
    button.addEventListener("click", () => copyText($(button.dataset.copy).textContent, button, $(button.dataset.copy)));
  }
  $("copy-link").addEventListener("click", () => {
    const view = views.get(currentView());
    const address = `${location.href.replace(/#.*$/, "")}${fragmentOf(view)}`;
    copyText(address, $("copy-link"));
    if (fragmentOf(view) === `#/${view.name}` && view.form.querySelector("textarea")?.value.length > LONG_TEXT) announce("The text is too long for a link; the link opens the view without it");
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash names the view
    $("main").focus();
  });
  addEventListener("hashchange", () => {
    clearTimeout(addressTimer);
    if (server.about) restoreState();
    showView();
    $("main").focus({ preventScroll: true });
  });
}

const theme = localStorage.getItem("bertie-theme") ?? "";
$("theme").value = theme;
setTheme(theme);
showThreshold();
for (const view of views.values()) listenToForm(view);
addPageListeners();
showView();
load();
