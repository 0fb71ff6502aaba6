"use strict";
// The page of a polylens server: one picture, one prompt, several adapters answering side by side.
// Plain DOM, no build step, nothing from other hosts. Answers are set as text, never as HTML.

const STATS_EVERY_MS = 1000;
const KEY = "polylens-key"; // kept in the tab only
const $ = (id) => document.getElementById(id);

let picture = null; // data URL
let running = null; // AbortController of the answers on their way
let known = ""; // the models shown, to redraw them only when they change

function headers() {
  const key = sessionStorage.getItem(KEY);
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: { ...headers(), ...options.headers } });
  if (answer.status === 401) askForKey();
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new Error(body?.error?.message ?? `status ${answer.status}`);
  }
  return answer;
}

// ---- the key

function askForKey() {
  if (!$("key-form").hidden && !sessionStorage.getItem(KEY)) return;
  $("key-form").hidden = false;
  $("key-note").textContent = sessionStorage.getItem(KEY) ? "That key is not accepted." : "This server asks for a key.";
  sessionStorage.removeItem(KEY);
  $("key").focus();
}

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value.trim());
  $("key").value = "";
  refresh();
});

// ---- the picture

async function take(file) {
  if (!file) return;
  if (!file.type.startsWith("image/")) return note("That is not a picture.");
  picture = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
  $("preview").src = picture;
  $("preview").alt = `Picture ${file.name}`;
  $("preview").hidden = false;
  $("drop-note").hidden = true;
  $("no-picture").disabled = false;
  note("");
}

$("picture").addEventListener("change", () => take($("picture").files[0]));
$("no-picture").addEventListener("click", () => {
  picture = null;
  $("picture").value = "";
  $("preview").hidden = true;
  $("preview").removeAttribute("src");
  $("drop-note").hidden = false;
  $("no-picture").disabled = true;
  $("picture").focus();
});
for (const name of ["dragover", "dragleave", "drop"]) {
  $("drop").addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") take(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", (event) => {
  const file = [...event.clipboardData.files].find((one) => one.type.startsWith("image/"));
  if (file) take(file);
});

// ---- asking

function note(text) {
  $("note").textContent = text;
}

function ticked() {
  return [...document.querySelectorAll("#models input:checked")].map((box) => box.value);
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  run();
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("ask").requestSubmit();
  if (event.key === "Escape") running?.abort();
});

async function run() {
  const models = ticked();
  if (!models.length) return note("Tick at least one model.");
  note("");
  running?.abort();
  const mine = (running = new AbortController());
  $("stop").disabled = false;
  $("answers").replaceChildren();
  await Promise.all(models.map((model) => answer(model, mine.signal)));
  if (running === mine) {
    running = null;
    $("stop").disabled = true;
  }
  refresh();
}

function body(model) {
  const content = [{ type: "text", text: $("prompt").value }];
  if (picture) content.unshift({ type: "image_url", image_url: { url: picture } });
  return JSON.stringify({
    model,
    messages: [{ role: "user", content }],
    max_tokens: $("max-tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    stream: true,
    stream_options: { include_usage: true },
  });
}

function card(model) {
  const article = document.createElement("article");
  const [title, text, times] = ["h3", "p", "p"].map((tag) => article.appendChild(document.createElement(tag)));
  title.textContent = model;
  text.className = "text";
  text.setAttribute("aria-live", "polite");
  text.setAttribute("aria-busy", "true");
  times.className = "times";
  times.textContent = "waiting …";
  $("answers").append(article);
  return { article, text, times };
}

async function answer(model, signal) {
  const { article, text, times } = card(model);
  const began = performance.now();
  let first = null;
  let last = began;
  let pieces = 0;
  let tokens = null;
  const show = () => {
    if (first === null) return;
    const count = tokens ?? pieces;
    const rate = count > 1 && last > first ? ((count - 1) / (last - first)) * 1000 : null;
    times.textContent =
      `first token ${Math.round(first - began)} ms` + (rate ? ` · ${rate.toFixed(1)} tokens/s` : "") + ` · ${count} tokens`;
  };
  try {
    const response = await call("/v1/chat/completions", {
      method: "POST", body: body(model), signal, headers: { "Content-Type": "application/json" },
    });
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        last = performance.now();
        first ??= last;
        pieces += 1;
        text.append(piece);
      }
      if (event.usage) tokens = event.usage.completion_tokens;
      show();
    }
    if (first === null) times.textContent = "empty answer";
    article.dataset.state = "done";
  } catch (error) {
    article.dataset.state = signal.aborted ? "stopped" : "failed";
    times.classList.toggle("wrong", !signal.aborted);
    times.textContent = signal.aborted ? "stopped" : error.message;
  }
  text.setAttribute("aria-busy", "false");
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// ---- the server

function share(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : "–";
}

function counts(byAdapter) {
  const entries = Object.entries(byAdapter);
  const total = entries.reduce((sum, [, count]) => sum + count, 0);
  const named = entries.map(([name, count]) => `${name || "base"} ${count}`).join(", ");
  return total ? `${total} (${named})` : "0";
}

function row(adapter) {
  const tr = document.createElement("tr");
  const size = adapter.bytes === null ? "not read" : adapter.bytes >= 1e6 ? `${(adapter.bytes / 1e6).toFixed(1)} MB` : `${Math.ceil(adapter.bytes / 1e3)} kB`;
  for (const text of [adapter.name, size, adapter.components.join(", ").replaceAll("_", " ")]) {
    tr.append(Object.assign(document.createElement("td"), { textContent: text }));
  }
  return tr;
}

function showModels(stats) {
  const names = [stats.model, ...stats.adapters.map((adapter) => adapter.name)];
  if (names.join("\n") === known) return;
  const before = known ? new Set(ticked()) : new Set(names.slice(0, 3));
  known = names.join("\n");
  $("models").replaceChildren(
    ...names.map((name) => {
      const label = document.createElement("label");
      const box = Object.assign(document.createElement("input"), { type: "checkbox", value: name, checked: before.has(name) });
      label.append(box, name === stats.model ? `${name} (base)` : name);
      return label;
    }),
  );
}

async function refresh() {
  try {
    const stats = await (await call("/stats")).json();
    $("key-form").hidden = true;
    $("model").textContent = `${stats.model} · ${stats.version}`;
    $("running").textContent = counts(stats.running);
    $("waiting").textContent = counts(stats.waiting);
    $("kv").textContent = `${stats.kv_pages_used} of ${stats.kv_pages}`;
    $("prefix").textContent = share(stats.cached_tokens, stats.prompt_tokens);
    $("vision").textContent = share(stats.vision_hits, stats.vision_hits + stats.vision_misses);
    $("adapters").replaceChildren(...stats.adapters.map(row));
    showModels(stats);
  } catch (error) {
    $("running").textContent = $("waiting").textContent = "–";
    if ($("key-form").hidden) $("model").textContent = error.message;
  }
}

refresh();
setInterval(() => {
  if (!document.hidden && $("key-form").hidden) refresh();
}, STATS_EVERY_MS);
