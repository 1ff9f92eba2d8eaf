// The playground: one page without a framework or a build step. Each view calls one endpoint.

import { attentionView, drawAttention, selectToken } from "./attention.js";
import { $, pluralize, setOptions } from "./dom.js";
import { copySnippet, currentView, fetchJson, headsFor, selectedHead, server, showRequest, VIEWS } from "./server.js";
import {
  answerView,
  classifyView,
  fillView,
  resetThreshold,
  searchView,
  showClassification,
  showThreshold,
  similarityView,
  tagView,
  usesHead,
} from "./tasks.js";

const views = {
  fill: fillView,
  attention: attentionView,
  tag: tagView,
  answer: answerView,
  similarity: similarityView,
  search: searchView,
  classify: classifyView,
};
const titles = Object.fromEntries(VIEWS.map((name) => [name, document.querySelector(`#tabs a[href="#/${name}"]`).textContent]));
const loaded = new Set(); // views that have sent their first request

function showView() {
  const current = currentView();
  for (const name of VIEWS) $(`view-${name}`).hidden = name !== current;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#/${current}`) {
      link.setAttribute("aria-current", "page");
      const tabs = $("tabs");
      if (link.offsetLeft < tabs.scrollLeft || link.offsetLeft + link.offsetWidth > tabs.scrollLeft + tabs.clientWidth) tabs.scrollLeft = link.offsetLeft - 16;
    } else link.removeAttribute("aria-current");
  }
  document.title = `${titles[current]} · Bertie playground`;
  showRequest();
  if (server.model && !loaded.has(current) && current !== "search") {
    loaded.add(current);
    views[current].update();
  }
}

function selectModel(name) {
  server.model = server.about.models.find((model) => model.name === name);
  const { layers, heads, width, max_length: maxLength, parameters, mask_token: mask } = server.model;
  const millions = `${(parameters / 1e6).toFixed(0)} million parameters`;
  $("model-summary").textContent = `${name}: ${millions}, ${layers} layers, ${heads} heads, hidden size ${width}, maximum length ${pluralize(maxLength, "token")}`;
  for (const element of document.querySelectorAll(".mask-token")) element.textContent = mask ?? "no mask token";
  if (mask && !$("fill-text").value.includes(mask)) $("fill-text").value = $("fill-text").value.replaceAll(/\[MASK\]|<mask>/g, mask);
  setOptions($("attention-layer"), Array.from({ length: layers }, (_, i) => [String(i), String(i + 1)]), String(layers - 1));
  setOptions($("attention-head"), [["", "mean over heads"], ...Array.from({ length: heads }, (_, i) => [String(i), String(i + 1)])], "");
  for (const task of ["classify", "tag"]) {
    const rows = headsFor(task);
    const first = rows.find((row) => !row.pairs) ?? rows[0];
    setOptions($(`${task}-head`), rows.map((row) => [row.head, row.pairs ? `${row.head} (pairs)` : row.head]), first?.head);
  }
  $("tag-head-field").hidden = headsFor("tag").length < 2;
  const { index } = server.about;
  $("search-none").hidden = index !== null;
  $("search-form").hidden = index === null;
  loaded.clear();
  updateClassifyForm();
  showView();
}

const EXAMPLES = ["A delight from start to finish.", "The match ended in a draw after extra time."]; // head, zero-shot

function updateClassifyForm() {
  const byHead = usesHead();
  if (EXAMPLES.includes($("classify-text").value)) $("classify-text").value = EXAMPLES[byHead ? 0 : 1];
  $("classify-by-head").hidden = !byHead;
  $("classify-zero-shot").hidden = byHead;
  $("classify-pair-field").hidden = !(byHead && selectedHead("classify")?.pairs);
  resetThreshold();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (theme) localStorage.setItem("bertie-theme", theme);
  else localStorage.removeItem("bertie-theme");
  drawAttention(); // a canvas does not follow the theme
}

async function loadModels() {
  try {
    server.about = await fetchJson("about", null);
  } catch (error) {
    $("model-summary").textContent = error.message;
    return;
  }
  const names = server.about.models.map(({ name }) => [name, name]);
  setOptions($("model"), names, server.about.default);
  $("model-field").hidden = names.length < 2;
  selectModel(server.about.default);
}

function addViewListeners() {
  const onInput = (id, view) => $(id).addEventListener("input", () => view.updateLater($(id).value.length));
  const onChange = (id, view) => $(id).addEventListener("change", view.update);
  onInput("fill-text", fillView);
  onChange("fill-top", fillView);
  $("fill-mask").addEventListener("click", () => {
    const box = $("fill-text");
    box.setRangeText(server.model?.mask_token ?? "", box.selectionStart, box.selectionEnd, "end");
    box.focus();
    fillView.updateLater();
  });
  onInput("attention-text", attentionView);
  onChange("attention-layer", attentionView);
  onChange("attention-head", attentionView);
  for (const input of document.querySelectorAll("input[name=drawing]")) input.addEventListener("change", drawAttention);
  for (const id of ["attention-tokens", "attention-bidirectional", "attention-causal"]) {
    $(id).addEventListener("click", (event) => {
      const token = event.target.closest("[data-token]")?.dataset.token;
      if (token !== undefined) selectToken(Number(token));
    });
  }
  onInput("tag-text", tagView);
  onChange("tag-head", tagView);
  $("answer-novel").addEventListener("click", async () => {
    const novel = await (await fetch("page/novel.txt")).text();
    $("answer-context").value = novel.slice(novel.indexOf("\n\n") + 2);
    answerView.update();
  });
  onInput("similarity-texts", similarityView);
  for (const id of ["classify-text", "classify-pair", "classify-labels", "classify-template"]) onInput(id, classifyView);
  onChange("classify-multi", classifyView);
  onChange("classify-method", classifyView);
  for (const input of [$("classify-head"), ...document.querySelectorAll("input[name=labels]")]) {
    input.addEventListener("change", () => {
      updateClassifyForm();
      classifyView.update();
    });
  }
  $("classify-threshold").addEventListener("input", () => {
    showThreshold();
    showClassification();
  });
  for (const id of ["search-mode", "search-rerank"]) {
    $(id).addEventListener("change", () => $("search-query").value.trim() && searchView.update());
  }
}

function addPageListeners() {
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  $("answer-form").addEventListener("submit", answerView.update);
  $("search-form").addEventListener("submit", searchView.update);
  $("key-form").addEventListener("submit", () => {
    server.key = $("key").value;
    sessionStorage.setItem("bertie-key", server.key);
    $("key-form").hidden = true;
    loadModels();
  });
  $("model").addEventListener("change", () => selectModel($("model").value));
  $("theme").addEventListener("change", () => setTheme($("theme").value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAttention);
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copySnippet(button));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash names the view
    $("main").focus();
  });
  addEventListener("hashchange", () => {
    showView();
    $("main").focus({ preventScroll: true });
  });
}

const theme = localStorage.getItem("bertie-theme") ?? "";
$("theme").value = theme;
setTheme(theme);
showThreshold();
addViewListeners();
addPageListeners();
showView();
loadModels();
