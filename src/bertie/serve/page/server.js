// Requests to the server, their errors, and the same request as curl and Python code.

import { $, announce, pluralize } from "./dom.js";

export const server = { about: null, model: null, key: sessionStorage.getItem("bertie-key") };

/** An error with a message for the user. */
export class UserError extends Error {}

export async function fetchJson(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (server.key) headers.Authorization = `Bearer ${server.key}`;
  const options = body === null ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new UserError("The server cannot be reached. Is it still running?");
  }
  const result = await response.json().catch(() => null);
  if (response.ok) return result;
  if (response.status === 401 || response.status === 403) $("key-form").hidden = false;
  throw new UserError(errorMessage(response, result));
}

function errorMessage(response, body) {
  const details = body?.error?.message ?? body?.error ?? body?.message ?? body?.detail;
  const message = Array.isArray(details) ? details.map((item) => item.msg ?? String(item)).join("; ") : details;
  if (response.status === 429) {
    const wait = response.headers.get("Retry-After");
    return `The server is overloaded${wait ? `; try again in ${pluralize(Number(wait), "second")}` : ""}. ${message ?? ""}`;
  }
  return message ? `The server answered: ${message}` : `The server answered with status ${response.status} and no message.`;
}

// --- views ---

export const VIEWS = ["fill", "attention", "tag", "answer", "similarity", "search", "classify"];
export const currentView = () => (VIEWS.includes(location.hash.slice(2)) ? location.hash.slice(2) : VIEWS[0]); // #/fill

const DEBOUNCE = 250; // milliseconds after the last key press
const LONG_TEXT = 5000; // characters from which the delay is longer

/** A view that sends requests as its form changes: a new request aborts the previous one. */
export function createView(name, send) {
  const view = $(`view-${name}`);
  let running = null;
  let timer = null;
  const update = async () => {
    clearTimeout(timer);
    running?.abort();
    const controller = (running = new AbortController());
    view.setAttribute("aria-busy", "true");
    const waiting = setTimeout(() => {
      view.querySelector(".read").textContent = "Waiting for the server …";
    }, 2 * DEBOUNCE);
    controller.signal.addEventListener("abort", () => clearTimeout(waiting));
    try {
      await send(view, controller.signal);
      if (running === controller) showError(view, null);
    } catch (error) {
      if (error.name === "AbortError" || running !== controller) return;
      if (!(error instanceof UserError)) console.error(error);
      showError(view, error instanceof UserError ? error.message : `Error in this page: ${error.message}`);
    } finally {
      clearTimeout(waiting);
      if (running === controller) view.removeAttribute("aria-busy");
    }
  };
  const updateLater = (length = 0) => {
    clearTimeout(timer);
    timer = setTimeout(update, length > LONG_TEXT ? 4 * DEBOUNCE : DEBOUNCE);
  };
  return { update, updateLater };
}

function showError(view, message) {
  const box = view.querySelector(".error");
  box.hidden = !message;
  box.textContent = message ?? "";
  if (message) {
    view.querySelector(".read").textContent = "";
    announce(message);
  }
}

/** Show how much of the text was read, and the response time. */
export function showCounts(view, counts, started) {
  const windows = counts.windows === undefined ? "" : ` in ${pluralize(counts.windows, "window")}`;
  const tokens = `Read ${counts.tokens_read.toLocaleString("en")} of ${pluralize(counts.tokens_total, "token")}${windows}`;
  const seconds = (performance.now() - started) / 1000;
  const time = seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
  view.querySelector(".read").textContent = `${tokens} · answered in ${time}`;
}

export function requireText(text) {
  if (!text.trim()) throw new UserError("Enter a text.");
  return text;
}

// --- heads ---

export const headsFor = (task) => server.model.tasks[task] ?? [];
export const selectedHead = (task) => headsFor(task).find((row) => row.head === $(`${task}-head`).value) ?? headsFor(task)[0];

export function requireHead(task, description) {
  if (!headsFor(task).length) throw new UserError(`${server.model.name} has no head for ${description}.`);
}

/** A request body with the selected head, if there are several, and the same as a Python argument. */
export function withHead(task, body) {
  if (headsFor(task).length === 1) return [body, ""];
  const { head } = selectedHead(task);
  return [{ ...body, head }, `, head=${py(head)}`];
}

// --- the request as curl and Python ---

const requests = {}; // the last one of each view
const MAX_SNIPPET = 1500; // characters of a text; longer ones are shortened for display

/** Send a view's request and display it. */
export async function sendRequest(view, path, body, python, signal) {
  const full = server.about.models.length > 1 && path !== "search" ? { ...body, model: server.model.name } : body;
  requests[view] = { path, body: full, python };
  if (view === currentView()) showRequest();
  return fetchJson(path, full, signal);
}

/** A text as a Python string literal, which JSON's syntax is. */
export function py(text) {
  return JSON.stringify(shorten(text));
}

function shorten(text) {
  return text.length > MAX_SNIPPET ? `${text.slice(0, 120)} … (${text.length.toLocaleString("en")} characters)` : text;
}

function pyValue(value) {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pyValue).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${py(k)}: ${pyValue(v)}`).join(", ")}}`;
  return typeof value === "string" ? py(value) : String(value);
}

export function showRequest() {
  const last = requests[currentView()];
  $("request").hidden = !last;
  if (!last) return;
  const page = location.href.replace(/[#?].*$/, "");
  const url = new URL(last.path, page).href;
  const json = JSON.stringify(last.body, (_, value) => (typeof value === "string" ? shorten(value) : value));
  const key = server.key ? ` \\\n  -H "Authorization: Bearer $BERTIE_KEY"` : "";
  $("request-curl").textContent = `curl ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json.replaceAll("'", "'\\''")}'`;
  const base = new URL(".", page).href.replace(/\/$/, "");
  const imports = server.key ? "import os\n\n" : "";
  if (last.python) {
    const apiKey = server.key ? `, api_key=os.environ["BERTIE_KEY"]` : "";
    const model = last.body.model ? `, model=${py(last.body.model)}` : "";
    $("request-python").textContent = `${imports}import bertie\n\nclient = bertie.Client(${py(base)}${apiKey}${model})\n${last.python}`;
  } else {
    const headers = server.key ? `, headers={"Authorization": f"Bearer {os.environ['BERTIE_KEY']}"}` : "";
    $("request-python").textContent = `${imports}import httpx\n\nhttpx.post(${py(url)}, json=${pyValue(last.body)}${headers}).json()`;
  }
}

export async function copySnippet(button) {
  const snippet = $(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(snippet.textContent);
    announce("Copied");
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  } catch {
    // Browsers may refuse without HTTPS: select the text, so that the copy shortcut works.
    getSelection().selectAllChildren(snippet);
    announce("Selected; copy it with the keyboard");
  }
}
