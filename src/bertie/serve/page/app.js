// The playground: one page, no framework, no build step. Each view asks one endpoint and shows what it said.

const $ = (id) => document.getElementById(id);

/** An element with properties, attributes (aria-…, role, class) and children. */
function el(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && !name.includes("-")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const percent = (x) => (x >= 0.9995 && x < 1 ? ">99.9%" : `${(100 * x).toFixed(1)}%`);
const rounded = (x) => (Math.abs(x) < 0.005 ? 0 : x).toFixed(2); // no −0.00
const counted = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;
const codepoints = (text) => Array.from(text); // the server counts characters, JavaScript counts halves of some

/** A function that cuts text by characters as the server counts them; quick where both counts agree. */
function cutter(text) {
  if (!/[\ud800-\udfff]/.test(text)) return (start, end) => text.slice(start, end);
  const letters = codepoints(text);
  return (start, end) => letters.slice(start, end).join("");
}

// --- the server ---

const server = { about: null, model: null, key: sessionStorage.getItem("bertie-key") };

/** What went wrong, in words a person can act on. */
class Problem extends Error {}

async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (server.key) headers.Authorization = `Bearer ${server.key}`;
  const options = body === null ? { headers, signal } : { method: "POST", headers, body: JSON.stringify(body), signal };
  let reply;
  try {
    reply = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server cannot be reached. Is it still running?");
  }
  const said = await reply.json().catch(() => null);
  if (reply.ok) return said;
  if (reply.status === 401 || reply.status === 403) $("key-form").hidden = false;
  throw new Problem(inWords(reply, said));
}

function inWords(reply, said) {
  const found = said?.error?.message ?? said?.error ?? said?.message ?? said?.detail;
  const words = Array.isArray(found) ? found.map((one) => one.msg ?? String(one)).join("; ") : found;
  if (reply.status === 429) {
    const wait = reply.headers.get("Retry-After");
    return `The server is busy${wait ? `; it may have room again in ${counted(Number(wait), "second")}` : ""}. ${words ?? ""}`;
  }
  return words ? `The server says: ${words}` : `The server answered with status ${reply.status} and no words.`;
}

// --- what all views share ---

const requests = {}; // by view: how to show its last request

/** Show what was read, and how long the answer took. */
function showRead(view, read, began) {
  const windows = read.windows === undefined ? "" : ` in ${counted(read.windows, "window")}`;
  const tokens = `Read ${read.tokens_read.toLocaleString("en")} of ${counted(read.tokens_total, "token")}${windows}`;
  const seconds = (performance.now() - began) / 1000;
  const took = seconds < 1 ? `${Math.round(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`;
  view.querySelector(".read").textContent = `${tokens} · answered in ${took}`;
}

/** Tell it to screen readers. */
const say = (words) => {
  $("said").textContent = words;
};

function showProblem(view, words) {
  const place = view.querySelector(".problem");
  place.hidden = !words;
  place.textContent = words ?? "";
  if (words) {
    view.querySelector(".read").textContent = "";
    say(words);
  }
}

const LATER = 250; // milliseconds after the last key
const LONG = 5000; // characters, from which on one waits longer before asking again

/** A view's work: only the latest counts, and what it asked before is cancelled. */
function worker(name, work) {
  const view = $(`view-${name}`);
  let running = null;
  let timer = null;
  const run = async () => {
    clearTimeout(timer);
    running?.abort();
    const mine = (running = new AbortController());
    view.setAttribute("aria-busy", "true");
    const waiting = setTimeout(() => {
      view.querySelector(".read").textContent = "Waiting for the server …";
    }, 2 * LATER);
    mine.signal.addEventListener("abort", () => clearTimeout(waiting));
    try {
      await work(view, mine.signal);
      if (running === mine) showProblem(view, null);
    } catch (error) {
      if (error.name === "AbortError" || running !== mine) return;
      if (!(error instanceof Problem)) console.error(error);
      showProblem(view, error instanceof Problem ? error.message : `The page stumbled: ${error.message}`);
    } finally {
      clearTimeout(waiting);
      if (running === mine) view.removeAttribute("aria-busy");
    }
  };
  const later = (size = 0) => {
    clearTimeout(timer);
    timer = setTimeout(run, size > LONG ? 4 * LATER : LATER);
  };
  return { run, later };
}

/** Ask, and remember the request so that it can be shown. Only what differs from the defaults is sent. */
async function asked(name, path, body, python, signal) {
  const whole = server.about.models.length > 1 ? { ...body, model: server.model.name } : body;
  requests[name] = { path, body: whole, python };
  if (name === current()) showRequest();
  return ask(path, whole, signal);
}

function bar(label, score, { mark = null, best = false } = {}) {
  const fill = el("span", { className: "fill" });
  fill.style.setProperty("inline-size", `${(100 * score).toFixed(2)}%`);
  const track = el("span", { className: "track", "aria-hidden": "true" }, fill);
  if (mark !== null) {
    const line = el("span", { className: "mark" });
    line.style.setProperty("inset-inline-start", `${(100 * mark).toFixed(2)}%`);
    track.append(line);
  }
  const row = [el("span", { className: "name" }, label), track, el("span", { className: "score" }, percent(score))];
  return el("li", { className: best ? "best" : "" }, ...row);
}

/** Text with some of its stretches wrapped; `spans` are in order and apart. */
function wrapped(text, spans, wrap) {
  const cut = cutter(text);
  const out = document.createDocumentFragment();
  let at = 0;
  for (const span of spans) {
    out.append(cut(at, span.start), wrap(cut(span.start, span.end), span));
    at = span.end;
  }
  out.append(cut(at, undefined));
  return out;
}

const SHOWN = 20000; // characters of a text that are drawn; all of it is read

function empty(text) {
  if (!text.trim()) throw new Problem("There is no text yet.");
  return text;
}

// --- fill a mask ---

const fill = worker("fill", async (view, signal) => {
  needs("fill", "filling masks");
  const text = empty($("fill-text").value);
  const mask = server.model.mask_token;
  if (!text.includes(mask)) throw new Problem(`The text needs at least one ${mask}, where a word is to be found.`);
  const top = Number($("fill-top").value);
  const began = performance.now();
  const python = `client.fill([${py(text)}], top_k=${top})`;
  const said = await asked("fill", "fill", { texts: [text], top_k: top }, python, signal);
  const [result] = said.results;
  const cut = cutter(text);
  const blocks = result.masks.slice(0, 20).map((one, i) => {
    const before = `${one.start > 30 ? "… " : ""}${cut(Math.max(0, one.start - 30), one.start)}`;
    const after = `${cut(one.end, one.end + 30)}${cut(one.end + 30, one.end + 31) ? " …" : ""}`;
    const where = el("p", { className: "where quiet" }, before, el("b", {}, "▢"), after);
    const bars = one.candidates.map((word, rank) => bar(word.text.trim() || word.token, word.score, { best: rank === 0 }));
    const title = el("h3", {}, result.masks.length > 1 ? `Mask ${i + 1}` : "Mask");
    return el("div", {}, title, where, el("ol", { className: "bars", "aria-label": `Words for mask ${i + 1}` }, ...bars));
  });
  if (result.masks.length > 20) blocks.push(el("p", { className: "quiet" }, `… and ${result.masks.length - 20} more masks`));
  $("fill-masks").replaceChildren(...blocks);
  showRead(view, result, began);
  const best = result.masks.slice(0, 5).map((one) => `${one.candidates[0].text.trim()} ${percent(one.candidates[0].score)}`);
  say(`Best words: ${best.join(", ")}`);
});

// --- tokens and attention ---

const attention = { found: null, chosen: 5 }; // the first “bank” of the example

const attend = worker("attention", async (view, signal) => {
  const text = empty($("attention-text").value);
  const layer = Number($("attention-layer").value);
  const head = $("attention-head").value === "" ? null : Number($("attention-head").value);
  const began = performance.now();
  const said = await asked("attention", "attention", { text, layer, head }, null, signal);
  attention.found = said;
  attention.chosen = Math.min(attention.chosen, said.tokens.length - 1);
  showTokens();
  showAttention();
  showRead(view, said, began);
});

const shown = (token) => token.text.replace(/^##/, "·").replace(/^[Ġ▁]/, "").replace(/Ċ/g, "⏎") || "␣";

function showTokens() {
  const { tokens } = attention.found;
  const buttons = tokens.map((token, i) =>
    el("button", { type: "button", className: token.special ? "special" : "", "data-token": i }, shown(token))
  );
  $("attention-tokens").replaceChildren(...buttons);
}

function choose(i) {
  attention.chosen = i;
  showAttention();
}

function showAttention() {
  const { tokens, weights, causal } = attention.found;
  const chosen = attention.chosen;
  for (const button of $("attention-tokens").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.token) === chosen));
  }
  const drawing = document.querySelector("input[name=drawing]:checked").value;
  const told = [];
  for (const [side, table] of [["both", weights], ["causal", causal]]) {
    const draw = drawing === "lines" ? drawLines : drawHeat;
    const place = $(`attention-${side}`);
    const { scrollTop, scrollLeft } = place;
    place.replaceChildren(draw(tokens, table, chosen, place.clientWidth - 24));
    place.scrollTo(scrollLeft, scrollTop);
    const row = table[chosen].map((weight, i) => ({ weight, i })).filter((one) => one.weight >= 0.0005);
    row.sort((a, b) => b.weight - a.weight);
    const bars = row.slice(0, 5).map(({ weight, i }, rank) => bar(shown(tokens[i]), weight, { best: rank === 0 }));
    $(`attention-${side}-list`).replaceChildren(...bars);
    told.push(`${side === "both" ? "Both sides" : "Causal"}: ${row.slice(0, 3).map(({ weight, i }) => `${shown(tokens[i])} ${percent(weight)}`).join(", ")}`);
  }
  say(`${shown(tokens[chosen])} looks most at. ${told.join(". ")}`);
}

const LEAST = 0.02; // a weight below this is no line

function drawLines(tokens, table, chosen, room) {
  const step = 22;
  const width = Math.max(280, Math.min(460, room));
  const [left, right] = [100, width - 100];
  const height = step * tokens.length + 8;
  const title = `Lines from each token to those it looks at; ${shown(tokens[chosen])} is drawn strong`;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": title, class: "lines" });
  const y = (i) => step * i + 16;
  table.forEach((row, i) =>
    row.forEach((weight, j) => {
      if (weight < LEAST || i === chosen) return;
      out.append(svg("line", { x1: left + 6, y1: y(i) - 4, x2: right - 6, y2: y(j) - 4, "stroke-opacity": Math.min(1, 0.9 * weight).toFixed(3) }));
    })
  );
  table[chosen].forEach((weight, j) => {
    if (weight < LEAST / 4) return;
    const place = { x1: left + 6, y1: y(chosen) - 4, x2: right - 6, y2: y(j) - 4 };
    out.append(svg("line", { ...place, class: "strong", "stroke-opacity": Math.min(1, 0.25 + weight).toFixed(3), "stroke-width": (1 + 8 * weight).toFixed(2) }));
  });
  tokens.forEach((token, i) => {
    const words = shown(token).slice(0, 14);
    const looking = svg("text", { x: left, y: y(i), "text-anchor": "end", class: i === chosen ? "chosen" : "", "data-token": i }, words);
    const seen = svg("text", { x: right, y: y(i), class: table[chosen][i] >= 0.1 ? "chosen" : "" }, words);
    out.append(looking, seen);
  });
  return out;
}

function drawHeat(tokens, table, chosen, room) {
  const n = tokens.length;
  const cell = Math.max(6, Math.min(24, Math.floor((room - 92) / n)));
  const labels = cell >= 10;
  const side = labels ? 84 : 4;
  const size = side + n * cell + 4;
  const scale = window.devicePixelRatio || 1;
  const title = `Heat map, a row for each token that looks and a column for each that is seen; the row of ${shown(tokens[chosen])} is framed`;
  const out = el("canvas", { width: size * scale, height: size * scale, role: "img", "aria-label": title, className: "heat" });
  out.style.setProperty("inline-size", `${size}px`);
  out.style.setProperty("block-size", `${size}px`);
  const look = getComputedStyle(document.documentElement);
  const colour = (name) => look.getPropertyValue(name).trim();
  const draw = out.getContext("2d");
  draw.scale(scale, scale);
  // Colours are resolved on a real element: a canvas does not know light-dark().
  const probe = document.body.appendChild(el("span", { className: "probe" }));
  const resolved = (name) => {
    probe.style.setProperty("color", colour(name));
    return getComputedStyle(probe).color;
  };
  const [ink, accent, quiet] = [resolved("--ink"), resolved("--accent"), resolved("--line")];
  probe.remove();
  draw.fillStyle = quiet;
  draw.globalAlpha = 0.35;
  draw.fillRect(side, side, n * cell, n * cell);
  draw.fillStyle = accent;
  table.forEach((row, i) =>
    row.forEach((weight, j) => {
      draw.globalAlpha = Math.min(1, Math.sqrt(weight));
      draw.fillRect(side + j * cell, side + i * cell, cell - (cell > 8 ? 1 : 0), cell - (cell > 8 ? 1 : 0));
    })
  );
  draw.globalAlpha = 1;
  draw.strokeStyle = ink;
  draw.strokeRect(side - 0.5, side + chosen * cell - 0.5, n * cell, cell);
  if (labels) {
    draw.fillStyle = ink;
    draw.font = `${Math.min(12, cell - 1)}px system-ui, sans-serif`;
    draw.textBaseline = "middle";
    tokens.forEach((token, i) => {
      const words = shown(token).slice(0, 12);
      draw.textAlign = "right";
      draw.fillText(words, side - 5, side + i * cell + cell / 2);
      draw.save();
      draw.translate(side + i * cell + cell / 2, side - 5);
      draw.rotate(-Math.PI / 2);
      draw.textAlign = "left";
      draw.fillText(words, 0, 0);
      draw.restore();
    });
  }
  out.addEventListener("click", (event) => {
    const row = Math.floor((event.offsetY - side) / cell);
    if (row >= 0 && row < n) choose(row);
  });
  return out;
}

// --- entities ---

const HUES = 6;

const tag = worker("tag", async (view, signal) => {
  needs("tag", "labelling spans");
  const text = empty($("tag-text").value);
  const began = performance.now();
  const [body, named] = headed("tag", { texts: [text] });
  const said = await asked("tag", "tag", body, `client.tag([${py(text)}]${named})`, signal);
  const [result] = said.results;
  const kinds = [...new Set(headOf("tag").labels.map((label) => label.replace(/^[BIESLU]-/, "")))].filter((one) => one !== "O");
  const hue = (label) => `hue-${Math.max(0, kinds.indexOf(label)) % HUES}`;
  const cut = cutter(text);
  const some = cut(0, SHOWN);
  const spans = result.spans.filter((span) => span.end <= SHOWN);
  const marked = wrapped(some, spans, (words, span) =>
    el("mark", { className: hue(span.label), title: `${span.label} ${percent(span.score)}` }, words, el("span", { className: "label" }, span.label))
  );
  if (some.length < text.length) marked.append(` … (all was read; the first ${SHOWN.toLocaleString("en")} characters are shown)`);
  $("tag-marked").replaceChildren(marked);
  const counts = kinds.map((kind) => [kind, result.spans.filter((span) => span.label === kind).length]);
  const items = counts.filter(([, n]) => n).map(([kind, n]) => el("li", {}, el("span", { className: `swatch ${hue(kind)}` }), `${kind} `, el("b", {}, String(n))));
  $("tag-legend").replaceChildren(...(items.length ? items : [el("li", { className: "quiet" }, "No entities found.")]));
  showRead(view, result, began);
  say(`${result.spans.length === 1 ? "1 entity" : `${result.spans.length} entities`}: ${result.spans.slice(0, 8).map((span) => `${span.text}, ${span.label}`).join("; ")}`);
});

// --- question answering ---

const AROUND = 1500; // characters shown before and after an answer

const answer = worker("answer", async (view, signal) => {
  needs("answer", "answering questions");
  const question = empty($("answer-question").value);
  const context = empty($("answer-context").value);
  const began = performance.now();
  const body = { questions: { question, documents: context }, top_k: 3 };
  const python = `client.answer([(${py(question)}, ${py(context)})], top_k=3)`;
  const pair = { text: question, pair: context };
  const [said, map] = await Promise.all([
    asked("answer", "answer", body, python, signal),
    ask("windows", server.about.models.length > 1 ? { ...pair, model: server.model.name } : pair, signal),
  ]);
  const [result] = said.results;
  const found = result.answers.filter((one) => one.start !== null);
  const [best] = found;
  const cut = cutter(context);
  const total = codepoints(context).length;
  const margin = best ? best.score - result.no_answer : 0;
  const verdict = best
    ? [
        el("p", { className: "verdict" }, best.text),
        el("p", { className: "quiet" }, margin >= 0 ? `It beats “there is no answer” by ${margin.toFixed(1)}.` : `But “there is no answer” beats it by ${(-margin).toFixed(1)}: the text may not say.`),
      ]
    : [el("p", { className: "verdict" }, "No answer")];
  const others = found.slice(1).map((one) => el("li", {}, `${one.text} `, el("span", { className: "quiet" }, `${one.score.toFixed(1)}`)));
  if (others.length) verdict.push(el("h3", {}, "Next best"), el("ul", { className: "others" }, ...others));
  $("answer-best").replaceChildren(...verdict);
  $("answer-map").hidden = false;
  $("answer-map").replaceChildren(...windowMap(map, total, best));
  if (best) {
    const from = Math.max(0, best.start - AROUND);
    const to = Math.min(total, best.end + AROUND);
    const mark = { start: best.start - from, end: best.end - from };
    const around = wrapped(cut(from, to), [mark], (words) => el("mark", { className: "hue-0", id: "answer-span" }, words));
    $("answer-text").replaceChildren(from > 0 ? "… " : "", around, to < total ? " …" : "");
    const box = $("answer-text");
    box.scrollTop = Math.max(0, $("answer-span").offsetTop - box.offsetTop - box.clientHeight / 2);
  } else $("answer-text").replaceChildren(cut(0, 2 * AROUND));
  showRead(view, result, began);
  say(best ? `Answer: ${best.text}` : "No answer");
});

/** Windows as strips over the length of the text; what each answers for is drawn full. */
function windowMap(map, total, best) {
  const [width, strip, gap] = [600, 12, 5];
  const lanes = Math.min(map.windows.length, 3); // neighbours overlap: they take turns
  const height = lanes * (strip + gap) + 6;
  const x = (at) => (width * at) / Math.max(1, total);
  const where = best ? `; the answer lies ${Math.round((100 * best.start) / Math.max(1, total))}% into it` : "";
  const title = `${counted(map.windows.length, "window")} over a text of ${counted(total, "character")}${where}`;
  const out = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  map.windows.forEach((one, i) => {
    const y = (i % lanes) * (strip + gap) + 3;
    out.append(svg("rect", { x: x(one.start), y, width: Math.max(1, x(one.end - one.start)), height: strip, rx: 2, class: "reads" }));
    out.append(svg("rect", { x: x(one.owns[0]), y, width: Math.max(1, x(one.owns[1] - one.owns[0])), height: strip, rx: 2, class: "owns" }));
  });
  if (best) out.append(svg("rect", { x: Math.max(0, x(best.start) - 1.5), y: 0, width: 3 + x(best.end - best.start), height, class: "answer" }));
  const holding = best ? map.windows.findIndex((one) => one.owns[0] <= best.start && best.start < one.owns[1]) + 1 : 0;
  const legend = el(
    "p",
    { className: "quiet" },
    `${title}.`,
    map.windows.length > 1 ? ` Pale: read for context. Full: answered for.${holding ? ` The answer is window ${holding}'s.` : ""}` : ""
  );
  return [el("h3", {}, "Windows over the text"), out, legend];
}

// --- similarity ---

const similarity = worker("similarity", async (view, signal) => {
  const texts = $("similarity-texts").value.split("\n").map((line) => line.trim()).filter(Boolean);
  if (texts.length < 2 || texts.length > 24) throw new Problem(`There are ${texts.length} sentences; give 2 to 24, one a line.`);
  const began = performance.now();
  const poolings = ["cls", "mean"];
  const said = [];
  for (const pooling of poolings) said.push(await asked("similarity", "compare", { texts, pooling }, null, signal));
  poolings.forEach((pooling, i) => {
    $(`similarity-${pooling}`).replaceChildren(heatTable(said[i].similarity, texts));
    const spread = pairsOf(said[i].similarity).map((one) => one.score);
    $(`similarity-${pooling}-title`).querySelector("span").textContent = `pairs from ${rounded(Math.min(...spread))} to ${rounded(Math.max(...spread))}`;
  });
  const nearest = said.map((one) => pairsOf(one.similarity).sort((a, b) => b.score - a.score)[0]);
  const words = nearest.map((one, i) => `${i ? "mean" : "CLS"}: ${one.i + 1} and ${one.j + 1} (${rounded(one.score)})`);
  $("similarity-said").textContent = `Most alike by ${words.join("; by ")}.`;
  say($("similarity-said").textContent);
  const sum = (key) => said[1].results.reduce((all, one) => all + one[key], 0);
  showRead(view, { tokens_total: sum("tokens_total"), tokens_read: sum("tokens_read"), windows: sum("windows") }, began);
});

function pairsOf(table) {
  return table.flatMap((row, i) => row.slice(0, i).map((score, j) => ({ i: j, j: i, score })));
}

/** A heat map that is a table: it can be read aloud, and its numbers copied. */
function heatTable(table, texts) {
  const head = el("tr", {}, el("td", {}), ...texts.map((text, i) => el("th", { scope: "col", title: text }, String(i + 1))));
  const rows = table.map((row, i) =>
    el(
      "tr",
      {},
      el("th", { scope: "row", title: texts[i] }, `${i + 1} `, el("span", {}, texts[i])),
      ...row.map((score) => el("td", { className: `heat-${Math.round(10 * Math.max(0, Math.min(1, score)))}` }, rounded(score)))
    )
  );
  return el("table", { className: "heat-table" }, el("thead", {}, head), el("tbody", {}, ...rows));
}

// --- search ---

const search = worker("search", async (view, signal) => {
  const query = $("search-query").value.trim();
  if (!query) throw new Problem("There is no query yet.");
  const mode = $("search-mode").value;
  const rerank = $("search-rerank").checked;
  const began = performance.now();
  const body = { queries: [query], k: 5, mode, ...(rerank ? { rerank } : {}) };
  const python = `client.search(${py(query)}, k=5, mode=${py(mode)}${rerank ? ", rerank=True" : ""})`;
  requests.search = { path: "search", body, python };
  showRequest();
  const said = await ask("search", body, signal);
  const [result] = said.results;
  $("search-said").textContent = result.hits.length
    ? `The best ${result.hits.length} of ${counted(said.passages, "passage")}`
    : `Nothing found in ${counted(said.passages, "passage")}.`;
  $("search-hits").replaceChildren(...result.hits.map(hit));
  showRead(view, result, began);
  say($("search-said").textContent);
});

function hit(one) {
  const spans = one.highlights.map(([start, end]) => ({ start, end }));
  const scores = Object.entries(one.scores).map(([stage, score]) => `${stage} ${score.toFixed(3)}`);
  return el(
    "li",
    {},
    el("h3", {}, [one.document, ...one.headings].join(" › ")),
    el("p", { className: "text" }, wrapped(one.text, spans, (words) => el("mark", { className: "hue-0" }, words))),
    el("p", { className: "quiet" }, scores.join(" · "))
  );
}

// --- classify ---

const ownLabels = () => document.querySelector("input[name=labels]:checked").value === "own";

const classified = { result: null, head: null };

const classify = worker("classify", async (view, signal) => {
  const text = empty($("classify-text").value);
  const began = performance.now();
  let body, python;
  if (ownLabels()) {
    needs("classify", "classes");
    const head = headOf("classify");
    const texts = head.pairs ? [[text, empty($("classify-pair").value)]] : [text];
    const shownTexts = head.pairs ? `(${py(text)}, ${py($("classify-pair").value)})` : py(text);
    let named;
    [body, named] = headed("classify", { texts });
    python = `client.classify([${shownTexts}]${named})`;
    classified.head = head;
  } else {
    const labels = $("classify-labels").value.split(",").map((one) => one.trim()).filter(Boolean);
    if (!labels.length) throw new Problem("Name at least one label.");
    const template = $("classify-template").value;
    const multi = $("classify-multi").checked;
    body = { texts: [text], labels, template, ...(multi ? { multi } : {}) };
    python = `client.zero_shot([${py(text)}], [${labels.map(py).join(", ")}], template=${py(template)}${multi ? ", multi=True" : ""})`;
    classified.head = null;
  }
  const said = await asked("classify", "classify", body, python, signal);
  [classified.result] = said.results;
  showClasses();
  showRead(view, classified.result, began);
});

function showClasses() {
  const { result, head } = classified;
  if (!result) return;
  const below = Number($("classify-below").value) / 100;
  const rows = Object.entries(result.scores).sort((a, b) => b[1] - a[1]);
  const sure = result.score >= below;
  $("classify-said").replaceChildren(
    sure ? result.label : "Left to a person",
    el("span", { className: "quiet" }, sure ? ` ${percent(result.score)}` : ` the likeliest, ${result.label}, has only ${percent(result.score)}`)
  );
  $("classify-said").classList.toggle("unsure", !sure);
  $("classify-bars").replaceChildren(...rows.map(([label, score], i) => bar(label, score, { mark: below, best: i === 0 && sure })));
  $("classify-note").textContent = head
    ? head.temperature === 1
      ? "This head was not calibrated: its probabilities may be too sure of themselves."
      : `Calibrated: logits are divided by a temperature of ${head.temperature.toFixed(2)}, fitted on held-out texts.`
    : "By natural language inference: is the sentence with this label true, given the text? These are not calibrated.";
  say(`${$("classify-said").textContent}. ${rows.slice(0, 5).map(([label, score]) => `${label} ${percent(score)}`).join(", ")}`);
}

function showBelow() {
  $("classify-below-said").textContent = `${Number(Number($("classify-below").value).toFixed(1))}%`;
}

/** The threshold that came with the head, where there is one. */
function resetBelow() {
  const fitted = ownLabels() ? headOf("classify")?.abstain_below : null;
  if (fitted !== null && fitted !== undefined) $("classify-below").value = String(100 * fitted);
  const goal = headOf("classify")?.precision;
  $("classify-below-why").textContent = fitted
    ? `Set to what was fitted for this head${goal ? `, for a precision of ${percent(goal)}` : ""}.`
    : "No threshold was fitted for this; the line is yours to draw.";
  showBelow();
}

// --- heads ---

const headsOf = (task) => server.model.tasks[task] ?? [];
const headOf = (task) => headsOf(task).find((one) => one.head === $(`${task}-head`).value) ?? headsOf(task)[0];

function needs(task, what) {
  if (!headsOf(task).length) throw new Problem(`${server.model.name} has no head for ${what}.`);
}

/** A request's body with the head in it, where there are several to choose from; and the same as a Python argument. */
function headed(task, body) {
  if (headsOf(task).length === 1) return [body, ""];
  const { head } = headOf(task);
  return [{ ...body, head }, `, head=${py(head)}`];
}

function options(select, rows, chosen) {
  select.replaceChildren(...rows.map(([value, words]) => el("option", { value, selected: value === chosen }, words)));
}

// --- the request as curl and Python ---

const SNIPPET = 1500; // characters of a text; longer ones are cut for show

function py(text) {
  return JSON.stringify(shortened(text)); // Python reads a string of JSON's as JSON does
}

function shortened(text) {
  return text.length > SNIPPET ? `${text.slice(0, 120)} … (${text.length.toLocaleString("en")} characters)` : text;
}

function pyValue(value) {
  if (value === null) return "None";
  if (value === true || value === false) return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(pyValue).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([k, v]) => `${py(k)}: ${pyValue(v)}`).join(", ")}}`;
  return typeof value === "string" ? py(value) : String(value);
}

function showRequest() {
  const last = requests[current()];
  $("request").hidden = !last;
  if (!last) return;
  const url = new URL(last.path, location.href.replace(/[#?].*$/, "")).href;
  const json = JSON.stringify(last.body, (_, value) => (typeof value === "string" ? shortened(value) : value));
  const key = server.key ? ` \\\n  -H "Authorization: Bearer $BERTIE_KEY"` : "";
  $("request-curl").textContent = `curl ${url} \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${json.replaceAll("'", "'\\''")}'`;
  const base = new URL(".", location.href.replace(/[#?].*$/, "")).href.replace(/\/$/, "");
  const withKey = server.key ? `, api_key=os.environ["BERTIE_KEY"]` : "";
  const imports = server.key ? "import os\n\n" : "";
  if (last.python) {
    const named = last.body.model ? `, model=${py(last.body.model)}` : "";
    $("request-python").textContent = `${imports}import bertie\n\nclient = bertie.Client(${py(base)}${withKey}${named})\n${last.python}`;
  } else {
    const headers = server.key ? `, headers={"Authorization": f"Bearer {os.environ['BERTIE_KEY']}"}` : "";
    $("request-python").textContent = `${imports}import httpx\n\nhttpx.post(${py(url)}, json=${pyValue(last.body)}${headers}).json()`;
  }
}

async function copy(button) {
  const text = $(button.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
    say("Copied");
    button.classList.add("done");
    setTimeout(() => button.classList.remove("done"), 1500);
  } catch {
    // Without HTTPS a browser may refuse: select it, so that one key is enough.
    getSelection().selectAllChildren($(button.dataset.copy));
    say("Selected; copy it with the keyboard");
  }
}

// --- the frame: views by hash, the model, the theme ---

const VIEWS = { fill, attention: attend, tag, answer, similarity, search, classify };
const TITLES = Object.fromEntries(Object.keys(VIEWS).map((name) => [name, document.querySelector(`#tabs a[href="#/${name}"]`).textContent]));
const opened = new Set(); // views that have been asked once

const current = () => (location.hash.slice(2) in VIEWS ? location.hash.slice(2) : "fill"); // #/fill

function showView() {
  const name = current();
  for (const one of Object.keys(VIEWS)) $(`view-${one}`).hidden = one !== name;
  for (const link of document.querySelectorAll("#tabs a")) {
    if (link.hash === `#/${name}`) {
      link.setAttribute("aria-current", "page");
      const box = $("tabs");
      if (link.offsetLeft < box.scrollLeft || link.offsetLeft + link.offsetWidth > box.scrollLeft + box.clientWidth) box.scrollLeft = link.offsetLeft - 16;
    } else link.removeAttribute("aria-current");
  }
  document.title = `${TITLES[name]} · Bertie playground`;
  showRequest();
  if (server.model && !opened.has(name) && name !== "search") {
    opened.add(name);
    VIEWS[name].run();
  }
}

function useModel(name) {
  server.model = server.about.models.find((one) => one.name === name);
  const { layers, heads, width, max_length, parameters, mask_token: mask } = server.model;
  const millions = `${(parameters / 1e6).toFixed(0)} million parameters`;
  $("facts").textContent = `${name}: ${millions}, ${layers} layers, ${heads} heads, width ${width}, reads ${counted(max_length, "token")} at once`;
  for (const place of document.querySelectorAll(".mask-token")) place.textContent = mask ?? "no mask";
  if (mask && !$("fill-text").value.includes(mask)) $("fill-text").value = $("fill-text").value.replaceAll(/\[MASK\]|<mask>/g, mask);
  options($("attention-layer"), Array.from({ length: layers }, (_, i) => [String(i), String(i + 1)]), String(layers - 1));
  options($("attention-head"), [["", "mean of all"], ...Array.from({ length: heads }, (_, i) => [String(i), String(i + 1)])], "");
  for (const task of ["classify", "tag"]) {
    const found = headsOf(task);
    const first = found.find((one) => !one.pairs) ?? found[0];
    options($(`${task}-head`), found.map((one) => [one.head, one.pairs ? `${one.head} (two texts)` : one.head]), first?.head);
  }
  $("tag-head-field").hidden = headsOf("tag").length < 2;
  const { index } = server.about;
  $("search-none").hidden = index !== null;
  $("search-form").hidden = index === null;
  opened.clear();
  adaptClassify();
  showView();
}

const EXAMPLES = ["A delight from start to finish.", "The match ended in a draw after extra time."]; // own labels, any

function adaptClassify() {
  const own = ownLabels();
  if (EXAMPLES.includes($("classify-text").value)) $("classify-text").value = EXAMPLES[own ? 0 : 1];
  $("classify-own").hidden = !own;
  $("classify-any").hidden = own;
  $("classify-pair-field").hidden = !(own && headOf("classify")?.pairs);
  resetBelow();
}

function useTheme(theme) {
  document.documentElement.dataset.theme = theme;
  if (theme) localStorage.setItem("bertie-theme", theme);
  else localStorage.removeItem("bertie-theme");
  if (attention.found) showAttention(); // a canvas has its colours drawn in
}

async function start() {
  try {
    server.about = await ask("about", null);
  } catch (error) {
    $("facts").textContent = error.message;
    return;
  }
  const names = server.about.models.map((one) => [one.name, one.name]);
  options($("model"), names, server.about.default);
  $("model-field").hidden = names.length < 2;
  useModel(server.about.default);
}

function listen() {
  const sized = (id) => () => $(id).value.length;
  const typed = (id, view, size = () => 0) => $(id).addEventListener("input", () => view.later(size()));
  const changed = (id, view) => $(id).addEventListener("change", view.run);
  typed("fill-text", fill, sized("fill-text"));
  changed("fill-top", fill);
  $("fill-mask").addEventListener("click", () => {
    const box = $("fill-text");
    box.setRangeText(server.model?.mask_token ?? "", box.selectionStart, box.selectionEnd, "end");
    box.focus();
    fill.later();
  });
  typed("attention-text", attend);
  changed("attention-layer", attend);
  changed("attention-head", attend);
  for (const one of document.querySelectorAll("input[name=drawing]")) one.addEventListener("change", () => attention.found && showAttention());
  $("attention-tokens").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose(Number(button.dataset.token));
  });
  for (const side of ["both", "causal"]) {
    $(`attention-${side}`).addEventListener("click", (event) => {
      const token = event.target.dataset?.token;
      if (token !== undefined) choose(Number(token));
    });
  }
  typed("tag-text", tag, sized("tag-text"));
  changed("tag-head", tag);
  $("answer-book").addEventListener("click", async () => {
    const book = await (await fetch("page/book.txt")).text();
    $("answer-context").value = book.slice(book.indexOf("\n\n") + 2);
    answer.run();
  });
  typed("similarity-texts", similarity, sized("similarity-texts"));
  for (const name of ["classify-text", "classify-pair", "classify-labels", "classify-template"]) typed(name, classify, sized(name));
  changed("classify-multi", classify);
  for (const one of [$("classify-head"), ...document.querySelectorAll("input[name=labels]")]) {
    one.addEventListener("change", () => {
      adaptClassify();
      classify.run();
    });
  }
  $("classify-below").addEventListener("input", () => {
    showBelow();
    showClasses();
  });
  for (const name of ["search-mode", "search-rerank"]) {
    $(name).addEventListener("change", () => $("search-query").value.trim() && search.run());
  }
  for (const form of document.forms) form.addEventListener("submit", (event) => event.preventDefault());
  $("answer-form").addEventListener("submit", answer.run);
  $("search-form").addEventListener("submit", search.run);
  $("key-form").addEventListener("submit", () => {
    server.key = $("key").value;
    sessionStorage.setItem("bertie-key", server.key);
    $("key-form").hidden = true;
    start();
  });
  $("model").addEventListener("change", () => useModel($("model").value));
  $("theme").addEventListener("change", () => useTheme($("theme").value));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => attention.found && showAttention());
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the hash is the view's
    $("main").focus();
  });
  addEventListener("hashchange", () => {
    showView();
    $("main").focus({ preventScroll: true });
  });
}

const theme = localStorage.getItem("bertie-theme") ?? "";
$("theme").value = theme;
useTheme(theme);
showBelow();
listen();
showView();
start();
