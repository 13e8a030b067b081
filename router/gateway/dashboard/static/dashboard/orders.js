// Orders: each is first sent as a question; what it would do is shown, and then confirmed.

import { askKeys, byId, h, headers, keyed, keys, reasonOf, say, setText, show } from "../shared/common.js";
import { withRole } from "../shared/text.js";

const ROLES = ["prefill", "decode", "mixed"];
const sizes = (pools) => ROLES.map((role) => `${role} ${pools[role]}`).join(", ");

async function call(path, body, query = "") {
  return fetch(`/dashboard/orders/${path}${query}`, {
    method: "POST",
    headers: headers({ "x-baton-admin-key": keys.admin, "content-type": "application/json" }),
    body: JSON.stringify(body ?? {}),
  });
}

function differences(preview, planner) {
  const lines = [];
  const before = new Map(preview.before.map((each) => [each.name, each]));
  for (const version of preview.after) {
    const old = before.get(version.name);
    before.delete(version.name);
    if (!old) { lines.push(`new version ${version.name}: ${version.model_name}, ${sizes(version.wanted)}, weight ${version.weight}`); continue; }
    if (sizes(old.wanted) !== sizes(version.wanted)) lines.push(`${version.name}: wanted ${sizes(old.wanted)} → ${sizes(version.wanted)}`);
    if (old.weight !== version.weight) lines.push(`${version.name}: weight ${old.weight} → ${version.weight}`);
    if (old.is_leaving !== version.is_leaving) lines.push(`${version.name} ${version.is_leaving ? "takes no new requests and leaves" : "stays"}`);
    if (old.is_current !== version.is_current) lines.push(`${version.name} ${version.is_current ? "becomes" : "is no more"} the current version`);
  }
  for (const name of before.keys()) lines.push(`${name} is removed`);
  if (planner !== preview.planner) lines.push(`planner ${planner} → ${preview.planner}`);
  return lines;
}

// Asks what an order would do, shows it, and gives it once it is confirmed. `then` is called after.
export async function order({ title, path, body, facts = [], planner = "", then = () => {} }) {
  if (!keys.admin) { askKeys("Orders need the admin key. Give it, and order again."); return; }
  try {
    const answer = await call(path, body, "?preview=1");
    if (!answer.ok) { refuse(title, answer.status, await reasonOf(answer)); return; }
    confirm({ title, path, body, extra: facts, preview: await answer.json(), planner, then });
  } catch (error) { refuse(title, 0, `the gateway does not answer (${error.message})`); }
}

function refuse(title, status, why) {
  const close = h("button", { type: "button", onclick: () => dialog.close() }, "Close");
  const other = h("button", { type: "button", onclick: () => { dialog.close(); askKeys(); } }, "Change keys");
  const dialog = h("dialog", { class: "narrow", "aria-labelledby": "order-title" }, h("h2", { id: "order-title" }, title),
    h("p", { class: "bad" }, `Not possible: ${why}`), h("p", { class: "row" }, close, status === 401 ? other : null));
  show(dialog);
}

function confirm({ title, path, body, extra, preview, planner, then }) {
  const list = (lines) => h("ul", {}, ...lines.map((each) => h("li", {}, each)));
  const changes = [...differences(preview, planner || preview.planner), ...extra];
  const steps = preview.steps.map((each) => `${withRole(each.subject, each.role)} ${each.what}${each.why ? `: ${each.why}` : ""}`);
  const nothing = !changes.length && !preview.effects.length && !steps.length;
  const status = h("p", { role: "status", class: "bad" });
  const go = h("button", { class: "main", type: "button", id: "confirm", autofocus: true, onclick: async () => {
    go.disabled = true;
    try {
      const answer = await call(path, body);
      if (answer.ok) { then(); dialog.close(); say(`Ordered: ${title}. The events below tell how it goes.`); return; }
      status.textContent = await reasonOf(answer);
    } catch (error) { status.textContent = `the gateway does not answer (${error.message})`; }
    go.disabled = false;
    go.focus();
  } }, "Order");
  const dialog = h("dialog", { class: "narrow", "aria-labelledby": "order-title" },
    h("h2", { id: "order-title" }, title),
    nothing ? h("p", {}, "This changes nothing.") : null,
    changes.length ? h("h3", {}, "What changes") : null, changes.length ? list(changes) : null,
    preview.effects.length ? h("h3", {}, "At once") : null, preview.effects.length ? list(preview.effects) : null,
    steps.length ? h("h3", {}, "The history will say") : null, steps.length ? list(steps) : null,
    status,
    h("p", { class: "row" }, go, h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
  show(dialog);
}

// ---------------------------------------------------------------- forms

// A field shows the present value until it is edited, and again after its order was given.
function field(attributes) {
  const input = h("input", attributes);
  input.addEventListener("input", () => { input._edited = true; });
  return input;
}
function settle(input, value) {
  if (!input._edited && input !== document.activeElement && input.value !== String(value)) input.value = value;
}
const settled = (inputs) => () => { for (const input of inputs) input._edited = false; };

function form(legend, submit, ...parts) {
  return h("form", { onsubmit: (event) => { event.preventDefault(); submit(); } }, h("fieldset", {}, h("legend", {}, legend), ...parts));
}
const row = (...parts) => h("p", { class: "row" }, ...parts);
const labelled = (text, input) => h("label", {}, `${text} `, input);
const preview = () => h("button", {}, "Preview …");

export class OrderForms {
  show(state) {
    const isOpen = state.can_order && Boolean(state.cluster);
    byId("orders").hidden = !isOpen;
    if (!isOpen) return;
    const { versions, planner } = state.cluster;
    this.planner = planner;
    const holder = byId("order-forms");
    if (!holder.firstElementChild) holder.append(h("div", { class: "forms" }));
    // A single version has all requests of its model.
    const shared = versions.filter((each) => versions.some((other) => other !== each && other.line === each.line));
    const lines = [...new Map(versions.map((each) => [each.line, each.model_name]))];
    const items = [
      ...versions.filter((each) => !each.is_leaving).map((each) => ({ key: `pools ${each.name}`, make: () => this.pools(each), data: each })),
      { key: "planner", make: () => this.plannerForm(), data: planner },
      ...(shared.length ? [{ key: `weights ${shared.map((each) => each.name)}`, make: () => this.weights(shared), data: shared }] : []),
      { key: `update ${lines}`, make: () => this.update(lines) },
    ];
    keyed(holder.firstElementChild, items, (each) => each.key, (each) => each.make(), (element, each) => element._fill?.(each.data));
  }

  pools(version) {
    const inputs = ROLES.map((role) => field({ type: "number", min: 0, max: 100000, name: role, required: true }));
    const element = form(`Pools of ${version.name}`, () => {
      const body = Object.fromEntries(inputs.map((each) => [each.name, each.valueAsNumber]));
      order({ title: `Set pools of ${version.name}`, path: "v1/pools", body: { ...body, version: version.name }, planner: this.planner, then: settled(inputs) });
    }, row(...inputs.map((input) => labelled(input.name, input))), row(preview()));
    const legend = element.querySelector("legend");
    element._fill = ({ wanted, is_asleep: sleeps }) => {
      inputs.forEach((input) => settle(input, wanted[input.name]));
      setText(legend, `Pools of ${version.name}${sleeps ? ", which sleeps" : ""}`);
    };
    return element;
  }

  plannerForm() {
    const choice = h("select", {}, ...["off", "dry-run", "on"].map((each) => h("option", {}, each)));
    choice.addEventListener("input", () => { choice._edited = true; });
    const element = form("Planner", () => order({ title: `Set the planner to ${choice.value}`, path: "v1/planner", body: { mode: choice.value }, planner: this.planner, then: settled([choice]) }),
      row(labelled("Mode", choice)), row(preview()));
    element._fill = (mode) => settle(choice, mode);
    return element;
  }

  weights(versions) {
    const inputs = versions.map((each) => field({ type: "number", min: 0, max: 10000, name: each.name, required: true }));
    const act = (name, verb, text) => h("button", { type: "button", onclick: () => order({ title: `${text} ${name}`, path: `v1/versions/${encodeURIComponent(name)}/${verb}`, planner: this.planner }) }, `${text} ${name} …`);
    const element = form("Shares of versions", () => {
      const weights = Object.fromEntries(inputs.map((each) => [each.name, each.valueAsNumber]));
      order({ title: "Share requests", path: "v1/weights", body: { weights }, planner: this.planner, then: settled(inputs) });
    }, row(...inputs.map((input) => labelled(input.name, input))), row(preview()), row(...versions.flatMap((each) => [act(each.name, "finish", "Finish"), act(each.name, "abort", "Abort")])));
    element._fill = (latest) => inputs.forEach((input, index) => settle(input, latest[index].weight));
    return element;
  }

  update(lines) {
    const of = h("select", { name: "of" }, ...lines.map(([line, name]) => h("option", { value: line }, name)));
    const model = h("input", { name: "model", autocomplete: "off", placeholder: "as now" });
    const weight = h("input", { type: "number", name: "weight", min: 0, max: 10000, placeholder: "none" });
    const canary = h("input", { name: "canary", autocomplete: "off", placeholder: "5, 25, 50", pattern: "[0-9, ]*" });
    const hold = h("input", { type: "number", name: "hold", min: 0, step: "any", placeholder: "60" });
    return form("New version", () => {
      const body = of.value ? { of: of.value } : {};
      if (model.value.trim()) body.model = model.value.trim();
      if (weight.value) body.weight = weight.valueAsNumber;
      if (canary.value.trim()) body.canary = canary.value.split(/[ ,]+/).filter(Boolean).map(Number);
      if (hold.value) body.hold_s = hold.valueAsNumber;
      order({ title: "Start a version", path: "v1/versions", body, planner: this.planner });
    }, lines.length > 1 ? row(labelled("Of", of)) : null, row(labelled("Model", model), labelled("Weight", weight)), row(labelled("Canary, %", canary), labelled("held for, s", hold)),
    row(preview(), h("button", { type: "button", onclick: () => order({ title: "Roll back", path: "v1/rollback", planner: this.planner }) }, "Roll back …")),
    h("p", { class: "dim" }, "Without a weight it replaces all others of the same model, step by step."));
  }
}

export function workerOrders(read) {
  const path = (verb) => `v1/workers/${encodeURIComponent(read().worker_id)}/${verb}`;
  const shown = () => withRole(read().worker_id, read().role);
  const moving = () => {
    const { running, waiting } = read();
    return running || waiting ? [`${running} running and ${waiting} waiting sequences go on elsewhere, with the same tokens`] : ["it is idle now"];
  };
  const id = read().worker_id;
  const flip = h("button", { type: "button", class: "small", "aria-label": `Flip ${id}`, "data-key": `flip ${id}`, onclick: () => {
    const choose = (role) => { dialog.close(); order({ title: `Flip ${shown()} to ${role}`, path: path("flip"), body: { role }, facts: moving() }); };
    const dialog = h("dialog", { class: "narrow", "aria-labelledby": "flip-title" }, h("h2", { id: "flip-title" }, `Flip ${id}, now ${read().role ?? "without a role"}, to`),
      row(...ROLES.filter((role) => role !== read().role).map((role) => h("button", { type: "button", value: role, onclick: () => choose(role) }, `${role} …`)), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel")));
    show(dialog);
  } }, "Flip");
  const then = { drain: "it stays, without work, until it is flipped or stopped", stop: "its process ends when it has no work left" };
  const button = (verb, text) => h("button", { type: "button", class: "small", "aria-label": `${text} ${id}`, "data-key": `${verb} ${id}`, onclick: () => order({ title: `${text} ${shown()}`, path: path(verb), facts: [...moving(), then[verb]] }) }, text);
  return h("span", { class: "orders" }, flip, button("drain", "Drain"), button("stop", "Stop"));
}
