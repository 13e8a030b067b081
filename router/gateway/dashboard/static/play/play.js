// The playground: one chat, its parameters, and what each answer's tokens and time were.

import { askKeys, byId, eachEvent, fillBar, h, headers, isShortcut, onKeys, reasonOf, roving, say, setText, turnTheme } from "../shared/common.js";
import { seconds, several } from "../shared/text.js";
import { stagesOf } from "../shared/stages.js";
import { candidates, placement, waterfall } from "../shared/timeline.js";
import { hideTip, withTip } from "../shared/tips.js";
import { treeOf } from "./markdown.js";

const number = (name, label, attributes) => [name, label, h("input", { type: "number", name, ...attributes })];
const FIELDS = [
  number("max_tokens", "Most tokens", { min: 1, step: 1, value: 200 }),
  number("temperature", "Temperature", { min: 0, max: 2, step: "any", placeholder: "the model’s" }),
  number("top_p", "Top p", { min: 0, max: 1, step: "any", placeholder: "1" }),
  number("top_k", "Top k", { min: -1, step: 1, placeholder: "all" }),
  number("min_p", "Min p", { min: 0, max: 1, step: "any", placeholder: "0" }),
  number("seed", "Seed", { step: 1, placeholder: "random" }),
  number("presence_penalty", "Presence", { min: -2, max: 2, step: "any", placeholder: "0" }),
  number("frequency_penalty", "Frequency", { min: -2, max: 2, step: "any", placeholder: "0" }),
];
const model = h("select", { name: "model" });
const system = h("textarea", { name: "system", rows: 2 });
const stopAt = h("input", { name: "stop", autocomplete: "off", placeholder: "none" });
const scores = h("input", { type: "checkbox", name: "logprobs" });
const tools = h("textarea", { name: "tools", rows: 5, class: "mono", spellcheck: "false", placeholder: '[{"type":"function","function":{"name":"…","parameters":{…}}}]' });
const schema = h("textarea", { name: "schema", rows: 5, class: "mono", spellcheck: "false", placeholder: '{"type":"object","properties":{…}}' });
const more = h("textarea", { name: "more", rows: 2, class: "mono", spellcheck: "false", placeholder: '{"min_tokens": 5}' });
const shown = h("pre", { tabindex: 0, role: "region", "aria-label": "The request as it was sent" }, "");

let messages = []; // as they are sent
let running = null;
let redrawTimeline = () => {}; // for another width

function parsed(field, name) {
  field.removeAttribute("aria-invalid");
  if (!field.value.trim()) return undefined;
  try { return JSON.parse(field.value); } catch (error) {
    field.setAttribute("aria-invalid", "true");
    field.closest("details").open = true;
    throw new Error(`${name} is no JSON: ${error.message}`);
  }
}

function bodyOf() {
  const body = { model: model.value, messages: [...(system.value.trim() ? [{ role: "system", content: system.value }] : []), ...messages], stream: true, stream_options: { include_usage: true } };
  for (const [name, , input] of FIELDS) if (input.value !== "") body[name] = input.valueAsNumber;
  if (stopAt.value) body.stop = stopAt.value;
  if (scores.checked) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  const asked = parsed(tools, "Tools");
  if (asked !== undefined) body.tools = asked;
  const wanted = parsed(schema, "Schema");
  if (wanted !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: wanted } };
  return { ...body, ...parsed(more, "More fields") };
}

function bubble(role, text) {
  byId("empty")?.remove();
  const content = h("span", {}, text);
  const element = h("div", { class: `msg ${role}` }, h("span", { class: "who" }, role), content);
  byId("messages").append(element);
  toEnd();
  return content;
}

const shareOf = (each) => `${(100 * Math.exp(each.logprob)).toFixed(1)} %`;

// A token that shows how likely it was, and what else could have come.
function token(entry) {
  const share = Math.exp(entry.logprob);
  const others = (entry.top_logprobs ?? []).filter((each) => each.token !== entry.token);
  const kind = share < 0.1 ? "p1" : share < 0.4 ? "p2" : share < 0.8 ? "p3" : "";
  const told = [entry, ...others].map((each) => `${JSON.stringify(each.token)} ${shareOf(each)}`).join(", ");
  const element = h("span", { class: `tok ${kind}`, tabindex: -1, role: "button", "aria-label": told }, entry.token);
  const line = (each, chosen) => {
    const bar = h("i", { class: "c-owned" });
    bar.style.width = `${100 * Math.exp(each.logprob)}%`;
    return h("tr", { class: chosen ? "chosen" : null }, h("td", { class: "mono" }, JSON.stringify(each.token)), h("td", {}, h("span", { class: "hbar" }, bar)), h("td", {}, shareOf(each)));
  };
  return withTip(element, () => h("table", {}, h("tbody", {}, line(entry, true), ...others.map((each) => line(each, false))), h("caption", {}, `log-probability ${entry.logprob.toFixed(3)}`)));
}

const built = (node) => (typeof node === "string" ? node : h(node[0], node[1], ...node[2].map(built)));

class Answer {
  constructor(begun) {
    this.begun = begun; // when it was asked for
    this.content = bubble("assistant", "");
    this.content.classList.add("tokens");
    roving(this.content, ".tok");
    this.text = "";
    this.isDrawn = true; // as far as it has come
    this.reasoning = null;
    this.calls = [];
    this.count = 0;
  }

  take(chunk) {
    if (chunk.error) { this.error = chunk.error.message; return; }
    this.line = chunk.baton_timeline ?? this.line;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.finish = choice.finish_reason ?? this.finish;
    const delta = choice.delta ?? {};
    const thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) this.think(thought);
    const entries = choice.logprobs?.content ?? [];
    this.text += delta.content ?? "";
    if (entries.length && delta.content) this.tokens(entries);
    else if (delta.content) this.drawSoon();
    for (const call of delta.tool_calls ?? []) this.call(call);
    if (delta.content || thought || delta.tool_calls) {
      this.first ??= performance.now();
      this.count += entries.length || 1;
      setText(byId("pace"), `${several(this.count, "piece")}, ${(this.count / Math.max((performance.now() - this.first) / 1000, 0.001)).toFixed(1)} per second`);
    }
    toEnd();
  }

  // Parses the text as Markdown again, at most once for each frame.
  drawSoon() {
    if (!this.isDrawn) return;
    this.isDrawn = false;
    requestAnimationFrame(() => {
      this.isDrawn = true;
      this.content.className = "marked";
      this.content.replaceChildren(...treeOf(this.text).map(built));
      toEnd();
    });
  }

  tokens(entries) {
    const made = entries.map(token);
    if (!this.content.querySelector(".tok")) made[0].tabIndex = 0; // arrow keys reach the others
    this.content.append(...made);
  }

  think(text) {
    if (!this.reasoning) this.content.before((this.reasoning = h("span", { class: "reason" })));
    this.reasoning.append(text);
  }

  call(part) {
    const call = (this.calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" }, element: null });
    if (!call.element) this.content.parentElement.append((call.element = h("span", { class: "call mono" })));
    call.id += part.id ?? "";
    call.function.name += part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
    setText(call.element, `${call.function.name}(${call.function.arguments})`);
  }

  // Returns true if there is something to keep as a message.
  end(broke) {
    const calls = this.calls.filter(Boolean).map(({ element, ...call }) => call);
    const all = (performance.now() - this.begun) / 1000;
    const used = this.usage ? `${this.usage.prompt_tokens} + ${several(this.usage.completion_tokens, "token")}, ` : "";
    const how = broke || this.error ? ", broke off" : this.finish ? `, ended by ${this.finish}` : ", stopped";
    setText(byId("pace"), `${used}${seconds(all)}${how}`);
    if (!this.text && !calls.length && !this.reasoning) { this.content.parentElement.remove(); return false; }
    messages.push({ role: "assistant", content: this.text, ...(calls.length ? { tool_calls: calls } : {}) });
    if (calls.length && !broke && !this.error) this.askResults(calls);
    this.timeline(all);
    return true;
  }

  timeline(all) {
    const holder = byId("timeline");
    if (!this.line) { holder.replaceChildren(h("p", {}, this.finish ? "The server sent no timeline. It needs a key that may debug." : "The answer did not end, so there is no timeline.")); return; }
    holder.className = "";
    const draw = () => holder.replaceChildren(waterfall(stagesOf(this.line, all), all, holder.clientWidth), placement(this.line), candidates(this.line));
    draw();
    redrawTimeline = draw;
  }

  // Tools are run by the user: a form for their results, sent together as the next messages.
  askResults(calls) {
    const inputs = calls.map((call) => h("input", { class: "mono", required: true, placeholder: "result of the tool", "aria-label": `Result of ${call.function.name}` }));
    const form = h("form", { class: "results", onsubmit: (event) => {
      event.preventDefault();
      if (running) return;
      calls.forEach((call, index) => {
        messages.push({ role: "tool", tool_call_id: call.id, content: inputs[index].value });
        bubble("tool", `${call.function.name}: ${inputs[index].value}`);
      });
      form.remove();
      ask();
    } }, ...calls.map((call, index) => h("label", {}, call.function.name, inputs[index])), h("button", { class: "small" }, calls.length > 1 ? "Send results" : "Send result"));
    this.content.parentElement.append(form);
    inputs[0].focus();
    toEnd();
  }
}

const HINTS = {
  400: "The server refuses this request", 401: "The key is missing or wrong", 403: "The key may not do that", 404: "There is no such model",
  413: "The request is too long", 429: "Too many requests for this key", 500: "The server has failed", 503: "The server cannot serve now", 504: "The server took too long",
};

async function refusal(response) {
  const again = Number(response.headers.get("retry-after"));
  const wait = again > 0 ? `. Try again in ${seconds(again)}` : "";
  return `${HINTS[response.status] ?? `The server answers ${response.status}`}: ${await reasonOf(response)}${wait}`;
}

// Tells what went wrong where the answer would have been, with a way to ask again.
function fail(text) {
  const again = h("button", { type: "button", class: "small", onclick: () => { note.remove(); if (!running) ask(); } }, "Try again");
  const note = h("div", { class: "msg fault", role: "alert" }, h("span", {}, text), again);
  byId("messages").append(note);
  toEnd();
}

function toEnd() { byId("messages").scrollTop = byId("messages").scrollHeight; }

async function ask() {
  say("");
  for (const old of byId("messages").querySelectorAll(".fault")) old.remove();
  let body;
  try { body = bodyOf(); } catch (error) { fail(error.message); return; }
  setText(shown, JSON.stringify(body, null, 2));
  running = new AbortController();
  byId("send").disabled = true;
  byId("stop").disabled = false;
  const begun = performance.now();
  let answer = null;
  let fault = "";
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers({ "content-type": "application/json", "x-baton-timeline": "1" }), body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) {
      fault = await refusal(response);
      if (response.status === 401) askKeys();
    } else {
      answer = new Answer(begun);
      await eachEvent(response, (_, data) => { if (data !== "[DONE]") answer.take(JSON.parse(data)); });
      if (answer.error) fault = `The answer broke off: ${answer.error}`;
      else if (!answer.finish) fault = "The answer broke off: the gateway has closed the connection";
    }
  } catch (error) {
    if (error.name !== "AbortError") fault = answer ? `The answer broke off: the gateway is lost (${error.message})` : `The gateway does not answer (${error.message})`;
  }
  running = null;
  byId("send").disabled = false;
  byId("stop").disabled = true;
  const isKept = answer?.end(Boolean(fault)) ?? false;
  if (!fault) return;
  if (isKept) messages.pop(); // a broken answer is shown, and asked for again
  fail(fault);
}

async function listModels() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.status === 401) { askKeys(); return; }
    if (!response.ok) { say(`There is no list of models: ${await reasonOf(response)}`, "bad"); return; }
    const { data } = await response.json();
    const chosen = model.value;
    model.replaceChildren(...data.map((each) => h("option", { selected: each.id === chosen }, each.id)));
    say("");
  } catch (error) { say(`The gateway does not answer (${error.message}). Press Keys and Use to try again.`, "bad"); }
}

const EXAMPLE_TOOLS = [{ type: "function", function: { name: "weather", description: "The weather of a city", parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const EXAMPLE_SCHEMA = { type: "object", properties: { name: { type: "string" }, year: { type: "integer" } }, required: ["name", "year"], additionalProperties: false };
const example = (field, value, what) => h("button", { type: "button", class: "small", "aria-label": `Insert an example of ${what}`, onclick: () => { field.value = JSON.stringify(value, null, 2); field.focus(); } }, "Insert an example");
const clear = (field, what) => h("button", { type: "button", class: "small", "aria-label": `Remove ${what}`, onclick: () => { field.value = ""; field.removeAttribute("aria-invalid"); field.focus(); } }, "Remove");

fillBar("/play");
byId("knobs").append(
  h("label", {}, "Model", model), h("label", {}, "System message", system),
  h("div", { class: "two" }, ...FIELDS.map(([, label, input]) => h("label", {}, label, input))),
  h("label", {}, "Stop at", stopAt),
  h("label", { class: "check" }, scores, "Log-probabilities: colours mark unlikely tokens; point at one, or go by Tab and arrow keys"),
  h("details", {}, h("summary", {}, "Tools"), h("label", {}, "JSON, as in OpenAI’s API", tools), h("p", { class: "row" }, example(tools, EXAMPLE_TOOLS, "tools"), clear(tools, "the tools"))),
  h("details", {}, h("summary", {}, "Schema of the answer"), h("label", {}, "JSON schema", schema), h("p", { class: "row" }, example(schema, EXAMPLE_SCHEMA, "a schema"), clear(schema, "the schema"))),
  h("details", {}, h("summary", {}, "More fields"), h("label", {}, "JSON, added to the request", more)),
  h("details", {}, h("summary", {}, "The request as it was sent"), shown));
byId("knobs").addEventListener("submit", (event) => event.preventDefault());
byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = byId("prompt").value || byId("prompt").placeholder; // the first time, an example
  if (running || !text.trim()) return;
  if (messages.at(-1)?.role === "user") { // it got no answer
    messages.pop();
    [...byId("messages").querySelectorAll(".msg.user")].at(-1)?.classList.add("dropped");
  }
  for (const old of byId("messages").querySelectorAll(".results")) old.remove();
  messages.push({ role: "user", content: text });
  bubble("user", text);
  byId("prompt").value = byId("prompt").placeholder = "";
  ask();
});
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); byId("ask").requestSubmit(); }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => { running?.abort(); messages = []; hideTip(); byId("messages").replaceChildren(); setText(byId("pace"), ""); byId("prompt").focus(); });
document.addEventListener("keydown", (event) => {
  if (!isShortcut(event)) return;
  if (event.key === "t") turnTheme();
  if (event.key === "k") { event.preventDefault(); askKeys(); }
});
let width = 0;
new ResizeObserver(([{ contentRect }]) => { if (contentRect.width !== width) { width = contentRect.width; redrawTimeline(); } }).observe(byId("line"));
onKeys(listModels);
listModels();
