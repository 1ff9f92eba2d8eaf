// Requests to the server, its models and heads, and errors in words for the user.

import { $, announce, pluralize } from "./dom.js";

export const server = { about: null, model: null, compared: null, key: sessionStorage.getItem("bertie-key") };

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
  const result = await response.json().catch((error) => {
    if (error.name === "AbortError") throw error;
    return null;
  });
  if (response.ok) return result;
  if (response.status === 401) throw new UserError(askForKey());
  throw new UserError(errorMessage(response, result));
}

/** Show the form for the API key, and return the message to display: whether a key is missing or wrong. */
function askForKey() {
  const wrong = server.key !== null;
  const message = wrong ? "The server does not accept this API key. Check it, or ask for another one." : "This server requires an API key.";
  server.key = null;
  sessionStorage.removeItem("bertie-key");
  $("key-form").hidden = false;
  $("key-error").hidden = !wrong;
  $("key-error").textContent = wrong ? message : "";
  $("key").focus();
  $("key").select();
  return message;
}

export function useKey(key) {
  server.key = key;
  sessionStorage.setItem("bertie-key", key);
  $("key-form").hidden = true;
  $("key-error").hidden = true;
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

export function requireText(text, what = "a text") {
  if (!text.trim()) throw new UserError(`Enter ${what}.`);
  return text;
}

// --- heads ---

export const headsFor = (task, model = server.model) => model.tasks[task] ?? [];
/** The head of that name, or the first one that does not classify pairs. */
export const findHead = (task, name, model = server.model) => {
  const rows = headsFor(task, model);
  return rows.find((row) => row.head === name) ?? rows.find((row) => !row.pairs) ?? rows[0];
};

export function requireHead(task, description, model) {
  if (!headsFor(task, model).length) throw new UserError(`${model.name} has no head for ${description}.`);
}

/** A request body with the head, if there are several, and the same as a Python argument. */
export function withHead(task, name, model, body) {
  if (headsFor(task, model).length === 1) return [body, ""];
  const { head } = findHead(task, name, model);
  return [{ ...body, head }, `, head=${JSON.stringify(head)}`];
}

/** Copy a text, or select the element that shows it where browsers refuse, as without HTTPS. */
export async function copyText(text, button, shown = null) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  } catch {
    if (shown) getSelection().selectAllChildren(shown);
    announce(shown ? "Selected; copy it with the keyboard" : "The browser refused; copy the address of the page");
  }
}
