// Markdown as models write it, made into elements. There are no images: they would tell others what was written.

import { element } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+#.-]*)/;
const HEADING = /^(#{1,6})\s+(.*)/;
const ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/;
const ROW = /^\s*\|.*\|\s*$/;
const INLINE =
  /(`+)([^`]|[^`].*?[^`])\1(?!`)|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:.*?[^\s*])?)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/;

export function markdown(text) {
  const lines = text.split("\n");
  const blocks = document.createDocumentFragment();
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    if (fence) {
      const from = ++at;
      while (at < lines.length && !lines[at].trim().startsWith(fence[1])) at++;
      blocks.append(code(lines.slice(from, at).join("\n")));
      at++;
    } else if (line.trim() === "") {
      at++;
    } else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      blocks.append(element(`h${Math.min(6, marks.length + 2)}`, {}, inline(title)));
      at++;
    } else if (RULE.test(line)) {
      blocks.append(element("hr"));
      at++;
    } else if (line.startsWith(">")) {
      const from = at;
      while (at < lines.length && lines[at].startsWith(">")) at++;
      const inner = lines.slice(from, at).map((quoted) => quoted.replace(/^>\s?/, ""));
      blocks.append(element("blockquote", {}, markdown(inner.join("\n"))));
    } else if (ITEM.test(line)) {
      at = list(lines, at, blocks);
    } else if (ROW.test(line) && /^\s*\|[\s:|-]+\|\s*$/.test(lines[at + 1] ?? "")) {
      const from = at;
      while (at < lines.length && ROW.test(lines[at])) at++;
      blocks.append(table(lines.slice(from, at)));
    } else {
      const from = at++;
      while (at < lines.length && lines[at].trim() !== "" && !starts(lines[at])) at++;
      blocks.append(element("p", {}, inline(lines.slice(from, at).join("\n"))));
    }
  }
  return blocks;
}

const starts = (line) => FENCE.test(line) || HEADING.test(line) || ITEM.test(line) || line.startsWith(">");

function code(text) {
  return element("pre", { tabIndex: 0 }, element("code", {}, text));
}

// Adds the list that begins at a line, and returns the line after it.
function list(lines, at, into) {
  const [, indent, mark] = ITEM.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const node = element(isOrdered ? "ol" : "ul");
  if (isOrdered) node.start = Math.min(parseInt(mark, 10), 2 ** 31 - 1);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered) break;
    if (item[1].length > indent.length + 1 && node.lastChild) {
      at = list(lines, at, node.lastChild);
      continue;
    }
    const from = at++;
    while (at < lines.length && lines[at].trim() !== "" && /^\s{2,}/.test(lines[at]) && !ITEM.test(lines[at])) at++;
    const text = [item[3], ...lines.slice(from + 1, at).map((more) => more.trim())].join("\n");
    node.append(element("li", {}, inline(text)));
    if (lines[at]?.trim() === "" && ITEM.test(lines[at + 1] ?? "")) at++;
  }
  into.append(node);
  return at;
}

function table(rows) {
  const cells = (row) => row.trim().slice(1, -1).split("|").map((cell) => cell.trim());
  const [head, , ...body] = rows;
  return element("div", { className: "scroll" },
    element("table", {},
      element("thead", {}, element("tr", {}, ...cells(head).map((cell) => element("th", {}, inline(cell))))),
      element("tbody", {}, ...body.map((row) =>
        element("tr", {}, ...cells(row).map((cell) => element("td", {}, inline(cell))))))));
}

function inline(text) {
  const nodes = document.createDocumentFragment();
  let rest = text;
  for (let match = INLINE.exec(rest); match; match = INLINE.exec(rest)) {
    nodes.append(rest.slice(0, match.index), span(match));
    rest = rest.slice(match.index + match[0].length);
  }
  nodes.append(rest);
  return nodes;
}

function span(match) {
  const [, ticks, quoted, strong, otherStrong, emphasis, label, href] = match;
  if (ticks) return element("code", {}, quoted.trim());
  if (strong ?? otherStrong) return element("strong", {}, inline(strong ?? otherStrong));
  if (emphasis) return element("em", {}, inline(emphasis));
  return element("a", { href, title: href, target: "_blank", rel: "noopener noreferrer" }, label);
}
