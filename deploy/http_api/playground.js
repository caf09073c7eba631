"use strict";
const byId = (id) => document.getElementById(id);
const copyOf = (id) => byId(id).content.firstElementChild.cloneNode(true);
const model = { name: null, layers: 0, checkpoints: [], modes: [] };
const HINTS = {
  full: "Every token runs all layers.",
  verified: "Early exits are drafts, and full depth verifies each: at temperature 0 the text equals that of full.",
  bounded: "As verified, but keeps near ties: at most this share of tokens differs from full depth's choice, each within the margin.",
  fast: "Fewest layers. Disagreement with full depth is measured, not bounded.",
};
let running = null;

/* A refusal becomes an Error with the server's message; status 401 shows the key field. */
async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" }, key = byId("key").value.trim();
  if (key) headers.Authorization = "Bearer " + key;
  let answer;
  try { answer = await fetch(path, { ...options, headers }); } catch (error) {
    throw error.name === "AbortError" ? error : new Error("the server does not answer");
  }
  if (answer.ok) return answer;
  if (answer.status === 401 && byId("keyLabel").hidden) { byId("keyLabel").hidden = false; byId("key").focus(); }
  const refusal = await answer.json().catch(() => ({}));
  throw new Error(refusal.error?.message ?? "the server answered with status " + answer.status);
}

async function connect() {
  try {
    const [about] = (await (await ask("v1/models")).json()).data, tide = about.tide;
    Object.assign(model, { name: about.id, layers: tide.num_layers, checkpoints: tide.checkpoint_layers });
    model.modes = tide.modes;
    byId("about").textContent = about.id + ", " + model.layers + " layers" +
      (model.checkpoints.length ? ", exits after " + model.checkpoints.join(", ") : ", no exits");
    fill("mode", tide.modes, tide.modes.includes("verified") ? "verified" : tide.modes[0]);
    byId("tokens").max = Math.min(4096, about.max_model_len);
    showControls();
  } catch (error) {
    byId("about").textContent = error.message;
  }
  return model.name !== null;
}

function fill(id, values, chosen) {
  byId(id).replaceChildren(...values.map((value) => new Option(value, value, false, value === chosen)));
}

function showControls() {
  const mode = byId("mode").value, score = Number(byId("threshold").value);
  byId("epsilonLabel").hidden = byId("marginLabel").hidden = mode !== "bounded";
  byId("epsilon").disabled = byId("margin").disabled = mode !== "bounded";
  byId("thresholdLabel").hidden = mode === "full";
  const text = score < 0 ? "calibrated" : score > 1 ? "no exit" : score.toFixed(2);
  byId("thresholdText").textContent = text;
  byId("threshold").setAttribute("aria-valuetext", text);
  byId("hint").textContent = HINTS[mode] ?? "";
}

function requestBody(mode, seed) {
  const tide = { mode, tokens: true }, score = Number(byId("threshold").value), prompt = byId("prompt").value;
  if (mode === "bounded") for (const name of ["epsilon", "margin"]) tide[name] = Number(byId(name).value);
  if (mode !== "full" && score >= 0) tide.threshold = score;
  const input = byId("chat").checked ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  return { model: model.name, ...input, max_tokens: Number(byId("tokens").value), seed,
    temperature: Number(byId("temperature").value), stream: true, stream_options: { include_usage: true }, tide };
}

function send(body, signal) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  return ask(path, { method: "POST", body: JSON.stringify(body), signal });
}

function colour(element, layer) {
  const place = model.checkpoints.indexOf(layer);
  element.classList.toggle("early", layer < model.layers);
  element.style.setProperty("--at", Math.max(0, place) / Math.max(1, model.checkpoints.length - 1));
}

/* A run: one request, its text, its histogram. */
class Run {
  constructor(mode, seed) {
    Object.assign(this, { mode, body: requestBody(mode, seed), bars: new Map() });
    Object.assign(this, { tokens: [], fresh: [], text: "", seconds: 0, end: null });
    this.box = copyOf("runTemplate");
    this.box.dataset.mode = mode;
    this.box.setAttribute("aria-label", "Run of mode " + mode);
    this.part("h2").textContent = mode;
    this.textBox = this.part(".text");
    this.textBox.setAttribute("aria-label", "Answer; arrow keys move from token to token");
    this.textBox.addEventListener("mouseover", (event) => this.show(event.target));
    this.textBox.addEventListener("focusin", (event) => this.hold(event.target));
    this.textBox.addEventListener("keydown", (event) => this.move(event));
    [...model.checkpoints, model.layers].forEach((layer) => this.bar(layer));
    byId("runs").append(this.box);
  }

  part(selector) { return this.box.querySelector(selector); }
  rate() { return this.seconds ? this.tokens.length / this.seconds : 0; }

  async go(signal) {
    this.began = performance.now();
    this.textBox.setAttribute("aria-busy", "true");
    const reader = (await send(this.body, signal)).body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "", whole = false;
    try {
      for (let piece; !(piece = await reader.read()).done;) {
        const events = (rest + piece.value).split("\n\n");
        rest = events.pop();
        for (const event of events.filter((line) => line.startsWith("data:"))) {
          const data = event.slice(5).trim();
          if (data === "[DONE]") whole = true; else this.take(JSON.parse(data));
        }
      }
    } catch (error) {
      reader.cancel().catch(() => {});
      throw error;
    }
    if (!whole) throw new Error("the answer broke off");
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    this.seconds = (performance.now() - this.began) / 1000;
    for (const token of chunk.tide?.tokens ?? []) this.add(token);
    if (chunk.tide?.total_s !== undefined) this.end = { ...chunk.tide, reason: chunk.choices[0].finish_reason };
    this.paint();
  }

  /* At most ten times a second: an engine on the same machine loses the time of every frame. */
  paint() {
    if (this.resting) return;
    this.draw();
    this.resting = setTimeout(() => { this.resting = null; if (this.fresh.length) this.paint(); }, 100);
  }

  add(token) {
    const span = document.createElement("span");
    span.className = "token";
    span.classList.toggle("disagreed", token.audit === "disagreed");
    span.classList.toggle("line", /^\n+$/.test(token.text));
    span.textContent = token.text;
    span.dataset.index = this.tokens.length;
    span.tabIndex = this.tokens.length ? -1 : 0;
    span.title = this.describe(token);
    colour(span, token.exit_layer);
    this.fresh.push(span);
    this.first ??= this.seconds;
    this.tokens.push(token);
    this.text += token.text;
    this.bar(token.exit_layer).tokens += 1;
  }

  bar(layer) {
    if (!this.bars.has(layer)) {
      const row = copyOf("barTemplate");
      row.querySelector(".layer").textContent = layer === model.layers ? "all " + layer : layer ? "layer " + layer : "text";
      colour(row.querySelector(".bar"), layer);
      this.part(".bars").append(row);
      this.bars.set(layer, { row, tokens: 0 });
    }
    return this.bars.get(layer);
  }

  draw() {
    this.textBox.append(...this.fresh.splice(0));
    this.part(".time").textContent = this.seconds.toFixed(2) + " s, " + this.rate().toFixed(1) + " tokens/s";
    for (const { row, tokens } of this.bars.values()) {
      const share = this.tokens.length ? 100 * tokens / this.tokens.length : 0;
      row.querySelector(".bar").style.width = share.toFixed(1) + "%";
      row.querySelector(".count").textContent = tokens + " (" + Math.round(share) + " %)";
    }
  }

  finish() {
    this.textBox.setAttribute("aria-busy", "false");
    this.draw();
    if (!this.end) return;
    const differing = this.end.differing ? ["differing from full depth: " + this.end.differing] : [];
    this.part(".summary").textContent = [this.tokens.length + " tokens, ended by " + this.end.reason, ...differing,
      "first after " + (this.first ?? 0).toFixed(2) + " s",
      this.end.tokens_per_deep_pass.toFixed(2) + " tokens per deep pass",
      this.end.layers_per_token.toFixed(1) + " layers run per token"].join(" · ");
  }

  fail(message) {
    const note = document.createElement("p");
    note.className = "error"; note.setAttribute("role", "alert"); note.textContent = message;
    this.box.append(note);
  }

  describe(token) {
    const score = token.score === null ? "none" : token.score.toFixed(3);
    const as = token.mode === this.mode ? "" : ", as " + token.mode;
    const where = token.exit_layer ? "layer " + token.exit_layer + " of " : "from the text, before any of ";
    const gap = token.gap == null ? "" : ", full depth's choice was " + token.gap.toFixed(3) + " nats likelier";
    return where + model.layers + ", score " + score + ", audit " + token.audit + gap + as;
  }

  show(span) {
    const token = this.tokens[span.dataset.index];
    if (token) this.part(".detail").textContent = JSON.stringify(token.text) + ": " + this.describe(token);
  }

  /* Tab returns to the token that last had the focus. */
  hold(span) {
    const before = this.part(".token[tabindex='0']");
    if (before) before.tabIndex = -1;
    span.tabIndex = 0;
    this.show(span);
  }

  move(event) {
    const last = this.tokens.length - 1, now = Number(event.target.dataset.index);
    const to = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1,
      Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    this.textBox.children[Math.min(last, Math.max(0, to))].focus();
  }
}

function showVerdict(text, strong = "") {
  const loud = document.createElement("strong");
  loud.textContent = strong;
  byId("verdict").replaceChildren(...(strong ? [loud, " "] : []), text);
}

function compare(full, other) {
  const same = full.text === other.text;
  const times = other.mode + " " + other.seconds.toFixed(2) + " s, full " + full.seconds.toFixed(2) + " s";
  const differing = full.tokens.findIndex((token, index) => token.id !== other.tokens[index]?.id);
  const place = differing < 0 ? full.tokens.length : differing;
  if (!same) [full, other].forEach((run) => run.textBox.children[place]?.classList.add("parted"));
  const why = full.body.temperature ? " (both drawn at random)" : "";
  const words = same ? "the same text" : "another text from token " + (place + 1) + why;
  const unit = full.tokens.length === other.tokens.length ? "as fast" : "the tokens/s";
  showVerdict(unit + ": " + times + ", " + words, full.rate() ? (other.rate() / full.rate()).toFixed(2) + "×" : "");
}

async function start() {
  if (running) return;
  const { signal } = running = new AbortController();
  busy(true);
  byId("runs").replaceChildren(); showVerdict("");
  if (model.name !== null || await connect()) await runAll(signal); else showVerdict("not run");
  running = null;
  busy(false);
}

async function runAll(signal) {
  const chosen = byId("mode").value, seed = Math.floor(Math.random() * 2 ** 31);
  const compares = byId("compare").checked && chosen !== "full" && model.modes.includes("full");
  const runs = (compares ? ["full", chosen] : [chosen]).map((mode) => new Run(mode, seed));
  for (const run of runs) {
    try {
      /* Put the prompt in the prefix cache first, so that the second run has no advantage. */
      if (compares && run === runs[0]) {
        showVerdict("reading the prompt…");
        await (await send({ ...run.body, max_tokens: 1 }, signal)).text();
      }
      showVerdict("running " + run.mode + "…");
      await run.go(signal);
    } catch (error) {
      if (!signal.aborted) run.fail(error.message);
      showVerdict((signal.aborted ? "stopped" : "failed") + " after " + run.tokens.length + " tokens of " + run.mode);
      return;
    } finally {
      run.finish();
    }
  }
  if (compares) compare(...runs); else showVerdict(runs[0].tokens.length + " tokens in " + runs[0].seconds.toFixed(2) + " s");
}

/* The active one of the two buttons keeps the focus. */
function busy(on) {
  const [from, to] = on ? [byId("go"), byId("stop")] : [byId("stop"), byId("go")];
  const held = document.activeElement === from;
  to.disabled = false;
  if (held) to.focus();
  from.disabled = true;
}

byId("form").addEventListener("submit", (event) => { event.preventDefault(); start(); });
byId("form").addEventListener("input", showControls);
byId("key").addEventListener("change", connect);
byId("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("form").requestSubmit();
  if (event.key === "Escape") running?.abort();
});
connect();
