// One small box beside what is pointed at or has the focus. Esc hides it.

import { h } from "./common.js";

const box = h("div", { id: "tip", role: "tooltip", hidden: true });
document.body.append(box);
let owner = null;
let silenced; // the key of what Esc was pressed at: drawn anew, it gets the focus again and no box

function open(element, read) {
  const parent = element.closest("dialog") ?? document.body; // above a dialog only if inside
  if (box.parentElement !== parent) parent.append(box);
  box.replaceChildren(...[read()].flat());
  box.hidden = false;
  owner = element;
  put();
}

function put() {
  const place = owner.getBoundingClientRect();
  const fits = place.bottom + 6 + box.offsetHeight <= innerHeight;
  box.style.left = `${Math.max(4, Math.min(place.left, document.documentElement.clientWidth - box.offsetWidth - 8))}px`;
  box.style.top = `${fits ? place.bottom + 6 : Math.max(4, place.top - box.offsetHeight - 6)}px`;
}

export function hideTip() {
  box.hidden = true;
  owner = null;
}

// `read()` gives the text or the elements to show.
export function withTip(element, read) {
  const show = ({ type }) => {
    const { key } = element.dataset;
    if (type === "focus" && key !== undefined && key === silenced) return;
    silenced = undefined;
    open(element, read);
  };
  const hide = () => { if (owner === element) hideTip(); };
  element.addEventListener("pointerenter", show);
  element.addEventListener("focus", show);
  element.addEventListener("pointerleave", hide);
  element.addEventListener("blur", hide);
  return element;
}

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || box.hidden) return;
  silenced = owner?.dataset.key;
  hideTip();
  if (document.querySelector("dialog[open]")) event.preventDefault(); // it closes by the next one
});
addEventListener("resize", () => { if (owner) put(); });
setInterval(() => { if (owner && !owner.isConnected) hideTip(); }, 500);
// What has the focus is scrolled into view, with its tip.
document.addEventListener("scroll", () => { if (owner && owner === document.activeElement) put(); else hideTip(); }, { capture: true, passive: true });
