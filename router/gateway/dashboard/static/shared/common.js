// What all pages share: elements, keys, colours, the bar, and streams of events.
// Data becomes text nodes and attributes only; nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((each) => each !== null && each !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function setText(element, text) {
  const value = String(text);
  if (element.textContent !== value) element.textContent = value;
}

// Keeps one element for each item, so that focus and scrolling survive an update.
export function keyed(container, items, keyOf, make, update) {
  const known = container._known ?? (container._known = new Map());
  const seen = new Set();
  let place = container.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    seen.add(key);
    let element = known.get(key);
    if (!element) known.set(key, (element = make(item)));
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else container.insertBefore(element, place);
  }
  for (const [key, element] of known) {
    if (!seen.has(key)) { element.remove(); known.delete(key); }
  }
}

// ---------------------------------------------------------------- keys and colours

export const keys = {
  get api() { return sessionStorage.getItem("baton.key") ?? ""; },
  get admin() { return sessionStorage.getItem("baton.admin") ?? ""; },
};
const whenKeysChange = new Set();
export const onKeys = (call) => whenKeysChange.add(call);

export function headers(extra = {}) {
  return keys.api ? { authorization: `Bearer ${keys.api}`, ...extra } : extra;
}

export async function reasonOf(response) {
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return text.slice(0, 300) || `status ${response.status}`; }
}

// Opens a dialog. At its end the focus returns to where it was, or to what took that place.
export function show(dialog) {
  const before = document.activeElement;
  const part = before?.closest("section");
  dialog.addEventListener("close", () => {
    dialog.remove();
    const again = before?.dataset?.key ? part?.querySelector(`[data-key="${CSS.escape(before.dataset.key)}"]`) : null;
    const place = [before, again].find((each) => each?.isConnected && each !== document.body && !each.disabled);
    if (place) place.focus(); else if (part?.isConnected) goTo(part);
  });
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

// Brings a part of the page into view, and its title into focus.
export function goTo(part) {
  part.scrollIntoView({ block: "start" });
  const title = part.querySelector("h2");
  title.tabIndex = -1;
  title.focus({ preventScroll: true });
}

// Arrow keys, Home and End go through the elements of a container, which is one stop of Tab.
// `pick(key, current, all)` may choose the next one otherwise.
export function roving(container, selector, pick = along) {
  container.addEventListener("keydown", (event) => {
    const all = [...container.querySelectorAll(selector)];
    const current = all.find((each) => each === document.activeElement);
    if (!current || event.ctrlKey || event.metaKey || event.altKey) return;
    const next = { Home: all[0], End: all.at(-1) }[event.key] ?? pick(event.key, current, all);
    if (!next) return;
    event.preventDefault();
    current.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
}

export function along(key, current, all) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[key];
  return step ? all[all.indexOf(current) + step] : null;
}

// Draws a container's content anew. The element with the same data-key keeps the focus, and one
// element can be reached by Tab.
export function redraw(container, selector, draw) {
  if (container.querySelector(`${selector}:hover`) && matchMedia("(hover: hover)").matches) return; // it is pointed at
  const had = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const stop = container.querySelector(`${selector}[tabindex="0"]`)?.dataset.key;
  draw();
  const all = [...container.querySelectorAll(selector)];
  const next = all.find((each) => each.dataset.key === (had ?? stop)) ?? all.at(-1);
  next?.setAttribute("tabindex", "0");
  if (had !== undefined) (next ?? container).focus({ preventScroll: true });
}

export function askKeys(why = "They stay in this tab until it is closed.") {
  if (document.querySelector("dialog[open]")) return;
  const api = h("input", { type: "password", autocomplete: "off", value: keys.api });
  const admin = h("input", { type: "password", autocomplete: "off", value: keys.admin });
  const dialog = h("dialog", { class: "narrow", "aria-labelledby": "keys-title" },
    h("form", { onsubmit: (event) => {
      event.preventDefault();
      sessionStorage.setItem("baton.key", api.value.trim());
      sessionStorage.setItem("baton.admin", admin.value.trim());
      dialog.close();
      whenKeysChange.forEach((call) => call());
    } },
    h("h2", { id: "keys-title" }, "Keys"),
    h("p", { class: "dim" }, why),
    h("label", {}, "API key, of `baton keys add NAME --debug`", api),
    h("label", {}, "Admin key, for orders", admin),
    h("p", { class: "row" }, h("button", { class: "main" }, "Use"), h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  show(dialog);
  api.focus();
}

const whenThemeChanges = new Set();
export const onTheme = (call) => whenThemeChanges.add(call);
export const isDark = () => {
  const own = document.documentElement.dataset.theme;
  return own ? own === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export function turnTheme() {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("baton.theme", theme);
  whenThemeChanges.forEach((call) => call());
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => whenThemeChanges.forEach((call) => call()));
const kept = localStorage.getItem("baton.theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;

export const state = h("span", { class: "badge", role: "status", id: "state" }, "connecting");
export function setState(text, kind = "") {
  setText(state, text);
  state.className = `badge ${kind}`;
}

export function fillBar(current, ...more) {
  const link = (path, text) => h("a", { href: path, "aria-current": path === current ? "page" : null }, text);
  byId("bar").append(
    h("a", { class: "name", href: "/" }, h("img", { src: "/assets/icon.svg", alt: "", width: 22, height: 22 }), "Baton"),
    h("nav", { "aria-label": "Pages" }, link("/dashboard", "Dashboard"), link("/play", "Playground"), link("/docs", "API")),
    h("span", { class: "push" }, ...more,
      h("button", { type: "button", class: "small", onclick: () => askKeys(), id: "open-keys" }, "Keys"),
      h("button", { type: "button", class: "small", onclick: turnTheme }, "Light / dark")));
}

let unsay = null;
export function say(text, kind = "") {
  const notice = byId("notice");
  clearTimeout(unsay);
  if (text && kind !== "bad") unsay = setTimeout(() => say(""), 20_000);
  notice.hidden = !text;
  notice.className = `notice ${kind}`;
  setText(notice, text);
}

// True if a key was pressed for the page, and not for a field of a form.
export function isShortcut(event) {
  return !(event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")
    || event.target.closest("input, textarea, select, [contenteditable]"));
}

// ---------------------------------------------------------------- streams of events

// Calls `take(event, data)` for each server-sent event. Ends with the response; may throw.
export async function eachEvent(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      let event = "message";
      const data = [];
      for (const line of part.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length) take(event, data.join("\n"));
    }
  }
}
