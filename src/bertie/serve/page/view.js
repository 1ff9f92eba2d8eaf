// What all views share: requests as the form changes, progress, cancelling, errors, and one column per model.

import { $, announce, el, pluralize } from "./dom.js";
import { fetchJson, server, UserError } from "./server.js";
import { setRequest, showRequest } from "./snippets.js";
import { readState } from "./state.js";

const READ_COUNTS = ["tokens_total", "tokens_read", "windows", "tokens_unknown", "tokens_non_english"]; // of each result
const FAST = 150; // milliseconds; after an answer in less, the next request is sent without delay
const MAX_DELAY = 1000; // milliseconds after the last key press
const SHOW_PROGRESS = 300; // milliseconds after which a running request shows its progress
const LONG_TEXT = 5000; // characters from which typing always waits a little
const REST = 150; // milliseconds without typing after an answer, before its details are requested

/**
 * A view that sends requests as its form changes; a new request replaces the one that is running.
 *
 * `run` is called for each model with the context of one column: `state` (the values of the form), `model`, `output`
 * (the element to draw into), `call(path, body, python)` (a request with that model), `answered(counts)` (show how much
 * was read, and the time so far) and `rest()` (wait until the user does not type, before details are requested).
 */
export function createView(name, run) {
  const section = $(`view-${name}`);
  const form = $(`${name}-form`);
  const progress = section.querySelector(".progress");
  let running = null; // an AbortController
  let answered = false; // whether the running requests only add details to an answer
  let timer = null;
  let lastDuration = 0;

  async function update() {
    clearTimeout(timer);
    timer = null;
    running?.abort();
    if (!server.model) return;
    const controller = (running = new AbortController());
    const started = performance.now();
    const hideProgress = showProgress(progress, started);
    section.setAttribute("aria-busy", "true");
    answered = false;
    view.onUpdate();
    const state = readState(form);
    try {
      const columns = showColumns(section);
      let left = columns.length;
      const onAnswer = () => {
        left -= 1;
        if (running !== controller || left > 0) return;
        answered = true;
        lastDuration = performance.now() - started;
        section.removeAttribute("aria-busy");
        if (timer !== null) update(); // the form has changed meanwhile
      };
      const failures = [];
      const runs = columns.map(async ([model, output]) => {
        try {
          await run(column(name, model, output, state, controller.signal, started, onAnswer));
        } catch (error) {
          if (!(error instanceof UserError)) throw error;
          failures.push([error, output]);
        }
      });
      await Promise.all(runs);
      if (failures.length === columns.length) throw failures[0][0];
      for (const [error, output] of failures) showColumnError(output, error.message);
      if (running === controller) showError(section, null);
    } catch (error) {
      if (running === controller) {
        if (error.name === "AbortError") showStopped(section);
        else {
          if (!(error instanceof UserError)) console.error(error);
          showError(section, error instanceof UserError ? error.message : `Error in this page: ${error.message}`);
        }
      }
      controller.abort(); // the requests of the other columns
    } finally {
      if (running === controller) {
        running = null;
        hideProgress();
        section.removeAttribute("aria-busy");
        if (timer !== null) update();
      } else hideProgress();
    }
  }

  function updateLater(length = 0) {
    clearTimeout(timer);
    const typing = lastDuration < FAST && length < LONG_TEXT;
    const delay = running && !answered ? FAST : typing ? 0 : Math.min(MAX_DELAY, Math.max(FAST, lastDuration));
    timer = setTimeout(update, delay);
  }

  progress.querySelector(".cancel").addEventListener("click", () => running?.abort());
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    update();
  });
  const view = { name, section, form, update, updateLater, onUpdate: () => {} };
  return view;
}

function column(name, model, output, state, signal, started, onAnswer) {
  let first = model === server.model; // only the first request of the first column is displayed
  return {
    state,
    model,
    output,
    signal,
    async call(path, body, python = null) {
      const full = server.about.models.length > 1 && path !== "search" ? { ...body, model: model.name } : body;
      if (first) {
        first = false;
        setRequest(name, path, full, python);
        showRequest(name);
      }
      const result = await fetchJson(path, full, signal);
      signal.throwIfAborted();
      return result;
    },
    async rest() {
      await new Promise((resolve) => setTimeout(resolve, REST));
      signal.throwIfAborted();
    },
    answered(counts) {
      showCounts(output, counts, started);
      onAnswer();
    },
  };
}

/** The model and the element of each column: one, or two while models are compared. */
function showColumns(section) {
  const box = section.querySelector(".outputs");
  const models = server.compared && section.id !== "view-search" ? [server.model, server.compared] : [server.model];
  while (box.children.length > models.length) box.lastChild.remove();
  while (box.children.length < models.length) {
    box.append(el("div", { className: "column" }, el("h3", { className: "model-name" }), el("div", { className: "output" }), el("p", { className: "read" })));
  }
  box.classList.toggle("two", models.length === 2);
  section.classList.toggle("comparing", models.length === 2);
  return models.map((model, i) => {
    const heading = box.children[i].querySelector(".model-name");
    heading.hidden = models.length === 1;
    heading.textContent = model.name;
    return [model, box.children[i].querySelector(".output")];
  });
}

/** Show the time that has passed and a button to cancel, once a request takes long; returns a function to stop. */
function showProgress(box, started) {
  const elapsed = box.querySelector(".elapsed");
  const show = () => {
    box.hidden = false;
    elapsed.textContent = `Waiting for the server: ${((performance.now() - started) / 1000).toFixed(1)} s`;
  };
  let interval = null;
  const timeout = setTimeout(() => {
    show();
    interval = setInterval(show, 100);
  }, SHOW_PROGRESS);
  return () => {
    clearTimeout(timeout);
    clearInterval(interval);
    if (interval !== null || !box.hidden) box.hidden = true;
  };
}

function showError(section, message) {
  const box = section.querySelector(".error");
  box.hidden = !message;
  box.textContent = message ?? "";
  section.querySelector(".outputs").classList.toggle("stale", Boolean(message));
  if (!message) return;
  for (const read of section.querySelectorAll(".read")) read.textContent = "";
  announce(message);
}

/** An error of one model while another one has answered. */
function showColumnError(output, message) {
  output.replaceChildren(el("p", { className: "error" }, message));
  output.parts = output.redraw = null;
  output.parentElement.querySelector(".read").textContent = "";
}

function showStopped(section) {
  showError(section, "Cancelled. Results below are those of an earlier request.");
}

/** Show how much of the text was read, and the response time. */
function showCounts(output, counts, started) {
  const seconds = (performance.now() - started) / 1000;
  const time = seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
  const read = output.parentElement.querySelector(".read");
  if (!counts) {
    read.textContent = `Answered in ${time}`;
    return;
  }
  const windows = counts.windows === undefined ? "" : ` in ${pluralize(counts.windows, "window")}`;
  const tokens = `Read ${counts.tokens_read.toLocaleString("en")} of ${pluralize(counts.tokens_total, "token")}${windows}`;
  const unknown = counts.tokens_unknown ? ` · ${counts.tokens_unknown.toLocaleString("en")} not covered by the vocabulary` : "";
  const other = counts.tokens_non_english ? ` · ${counts.tokens_non_english.toLocaleString("en")} not English` : "";
  read.textContent = `${tokens}${unknown}${other} · answered in ${time}`;
}

/** The counts of several texts together. */
export function addCounts(results) {
  const sum = (key) => results.reduce((total, counts) => total + counts[key], 0);
  return Object.fromEntries(READ_COUNTS.map((key) => [key, sum(key)]));
}
