// Elements and figures for the page. Every string goes in as a text node or an attribute value: nothing is ever parsed as HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== undefined && value !== false) node.setAttribute(name, String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
export const byId = (id) => document.getElementById(id);

export function show(id, ...children) {
  byId(id).replaceChildren(...children.flat(Infinity));
}

export const empty = (text) => el("p", { class: "empty" }, text);

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toFixed(1);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${Math.round(value)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.1) return `${Math.round(value * 1e3)} ms`;
  return value >= 1e-3 ? `${(value * 1e3).toFixed(1)} ms` : `${Math.round(value * 1e6)} µs`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit += 1) value /= 1024;
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

// `name@0123456789abcdef`, as workers are named between processes, without the incarnation.
export const short = (peer) => (peer ? peer.replace(/@[0-9a-f]{16}$/, "") : "");
