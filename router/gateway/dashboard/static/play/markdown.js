// Markdown as a tree of [tag, attributes, children]: headings, lists, quotes, code, emphasis and
// links. Pure. What a model writes becomes text in elements of this list, and nothing else: HTML
// stays text, and only http and https are links. The time is linear in the length of the text.

const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})(.*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*)$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const LINK = /^https?:\/\/[^\s<>"]+$/i;
const MOST_DEEP = 8; // nested lists, quotes and emphasis
const LONGEST_LINK = 2048;

// The tree of a text. Code whose end has not come yet goes to the end.
export const treeOf = (text) => blocksOf(text.replaceAll("\r\n", "\n").split("\n"), 0);

function blocksOf(lines, depth) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const [found, next] = !line.trim() ? [null, at + 1] : fence(lines, at) ?? heading(line, at) ?? (depth < MOST_DEEP ? quote(lines, at, depth) ?? list(lines, at, depth) : null) ?? paragraph(lines, at);
    if (found) blocks.push(found);
    at = next;
  }
  return blocks;
}

function fence(lines, at) {
  const [, mark, rest] = FENCE.exec(lines[at]) ?? [];
  if (!mark) return null;
  const [language] = rest.trim().split(/\s/);
  const isEnd = (line) => line.trim().length >= mark.length && [...line.trim()].every((each) => each === mark[0]);
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const attributes = { tabindex: 0, role: "region", "aria-label": language ? `Code, ${language}` : "Code" };
  return [["pre", attributes, [["code", {}, [lines.slice(at + 1, end).join("\n")]]]], end + 1];
}

function heading(line, at) {
  if (RULE.test(line)) return [["hr", {}, []], at + 1];
  const [, marks, text] = HEADING.exec(line) ?? [];
  return marks ? [[`h${Math.min(marks.length + 2, 6)}`, {}, inlineOf(open(text))], at + 1] : null;
}

// A heading without the marks and spaces at its end.
function open(text) {
  let end = text.length;
  while (end && " \t#".includes(text[end - 1])) end -= 1;
  return text.slice(0, end);
}

function quote(lines, at, depth) {
  if (!QUOTE.test(lines[at])) return null;
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [["blockquote", {}, blocksOf(lines.slice(at, end).map((line) => QUOTE.exec(line)[1]), depth + 1)], end];
}

// Lines that are indented more than the mark of an item belong to the item.
function list(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const indent = first[1].length;
  const isOrdered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const item = ITEM.exec(lines[end]);
    if (item && item[1].length <= indent) {
      if (/\d/.test(item[2]) !== isOrdered || item[1].length < indent) break;
      items.push([item[3]]);
    } else if (lines[end].trim() && lines[end].search(/\S/) <= indent) break;
    else items.at(-1).push(lines[end].slice(Math.min(lines[end].search(/\S|$/), indent + first[2].length + 1)));
    end += 1;
  }
  const attributes = isOrdered ? { start: String(parseInt(first[2], 10)) } : {};
  return [[isOrdered ? "ol" : "ul", attributes, items.map((each) => ["li", {}, tight(blocksOf(each, depth + 1))])], end];
}

// The text of an item is no paragraph of its own.
const tight = ([first, ...others]) => (first?.[0] === "p" ? [...first[2], ...others] : first ? [first, ...others] : []);

function paragraph(lines, at) {
  const isOther = (line) => !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
  let end = at + 1;
  while (end < lines.length && !isOther(lines[end])) end += 1;
  return [["p", {}, inlineOf(lines.slice(at, end).join("\n"))], end];
}

// ---------------------------------------------------------------- within a line

const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

function inlineOf(text, depth = 0) {
  const found = [];
  let plain = "";
  const ends = new Map(); // the next place of each mark: the text is searched once for each mark
  const endOf = (mark, from) => {
    const known = ends.get(mark);
    if (known === undefined || (known >= 0 && known < from)) ends.set(mark, text.indexOf(mark, from));
    return ends.get(mark);
  };
  const put = (node) => { if (plain) found.push(plain); plain = ""; found.push(node); };
  for (let at = 0; at < text.length;) {
    const [node, next] = code(text, at, endOf) ?? (depth < MOST_DEEP ? emphasis(text, at, endOf, depth) ?? link(text, at, endOf, depth) : null) ?? [null, at + 1];
    const isEscape = text[at] === "\\" && /[\\`*_[\](){}#+.!~>-]/.test(text[at + 1] ?? "");
    if (node) put(node);
    else plain += isEscape ? text[at + 1] : text.slice(at, next);
    at = isEscape ? at + 2 : next;
  }
  if (plain) found.push(plain);
  return found;
}

function code(text, at, endOf) {
  if (text[at] !== "`") return null;
  let from = at;
  while (text[from] === "`") from += 1;
  const end = endOf(text.slice(at, from), from);
  if (end < 0) return [null, from];
  const inner = text.slice(from, end);
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  return [["code", {}, [isPadded ? inner.slice(1, -1) : inner]], end + from - at];
}

function emphasis(text, at, endOf, depth) {
  const mark = ["**", "__", "*", "_"].find((each) => text.startsWith(each, at));
  const from = at + (mark?.length ?? 0);
  if (!mark || /\s/.test(text[from] ?? " ") || (mark[0] === "_" && isWord(text[at - 1]))) return null;
  const end = endOf(mark, from + 1);
  if (end < 0 || /\s/.test(text[end - 1]) || (mark[0] === "_" && isWord(text[end + mark.length]))) return [null, from];
  return [[mark.length > 1 ? "strong" : "em", {}, inlineOf(text.slice(from, end), depth + 1)], end + mark.length];
}

function link(text, at, endOf, depth) {
  if (text[at] !== "[") return null;
  const middle = endOf("](", at + 1);
  const end = middle < 0 ? -1 : endOf(")", middle + 2);
  if (end < 0 || end - middle > LONGEST_LINK) return null;
  const url = text.slice(middle + 2, end).trim();
  if (!LINK.test(url)) return null;
  return [["a", { href: url, rel: "noopener noreferrer nofollow", target: "_blank" }, inlineOf(text.slice(at + 1, middle), depth + 1)], end + 1];
}
