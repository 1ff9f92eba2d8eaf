// The last request of each view as curl and Python code.

import { $ } from "./dom.js";
import { server } from "./server.js";

const requests = {}; // by view
const MAX_SNIPPET = 1500; // characters of a text; longer ones are shortened for display

export function setRequest(view, path, body, python) {
  requests[view] = { path, body, python };
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

export function showRequest(view) {
  const last = Object.hasOwn(requests, view) ? requests[view] : null;
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
