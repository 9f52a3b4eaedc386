// The map: workers by role with their load and KV blocks, and the lanes over which prefill writes to decode.

import { bytes, count, el, empty, short, show, svg } from "./dom.js";

const STATES = ["used", "leased", "quarantined", "cached", "free"];
const known = new Map(); // id -> the last that was heard of it, and whether it is linked now

export function showCluster(overview) {
  const lost = remember(overview.workers);
  if (!overview.workers.length && !lost.length) {
    show("cluster", empty("No worker is linked. Workers register by themselves once they run and can reach this router."));
    return;
  }
  const cards = new Map();
  const card = (worker, isLost = false) => {
    const made = workerCard(worker, isLost, overview.pairs);
    if (!isLost) cards.set(worker.id, made);
    return made;
  };
  const all = [...overview.workers.map((worker) => [worker, false]), ...lost.map((worker) => [worker, true])];
  const of = (...roles) => all.filter(([worker]) => roles.includes(worker.role)).map(([worker, isLost]) => card(worker, isLost));
  const prefill = of("prefill"), decode = of("decode"), both = of("both");
  const lines = svg("svg", { "aria-hidden": "true" });
  const map = el("div", { class: "map" }, lines);
  if (prefill.length || decode.length) {
    map.append(el("div", { class: "column" }, prefill), el("div", { class: "column" }, decode));
  }
  if (both.length) map.append(el("div", { class: "wide" }, both));
  show("cluster", map, legend());
  drawLanes(lines, map, cards, overview.pairs);
}

function remember(workers) {
  for (const entry of known.values()) entry.isLinked = false;
  for (const worker of workers) known.set(worker.id, { worker, isLinked: true });
  return [...known.values()].filter((entry) => !entry.isLinked).map((entry) => entry.worker);
}

function workerCard(worker, isLost, pairs) {
  const blocks = { ...worker.blocks, used: 0 };
  blocks.used = Math.max(0, blocks.total - blocks.free - blocks.cached - blocks.leased - blocks.quarantined);
  const bar = el("div", { class: "blocks", role: "img", "aria-label": STATES.map((state) => `${state} ${blocks[state]}`).join(", ") });
  for (const state of STATES) {
    const part = el("i", { class: state, title: `${state}: ${blocks[state]} blocks` });
    part.style.width = blocks.total ? `${(100 * blocks[state]) / blocks.total}%` : "0";
    bar.append(part);
  }
  const busy = blocks.total ? Math.round((100 * (blocks.total - blocks.free - blocks.cached)) / blocks.total) : 0;
  const state = isLost ? "lost" : worker.draining ? "draining" : worker.ready ? worker.role : "not ready";
  const lanes = isLost ? [] : pairs.filter((pair) => short(pair.prefill) === worker.id);
  return el(
    "article",
    { class: `worker ${worker.role}${isLost ? " lost" : ""}`, "data-worker": worker.id },
    el("h3", {}, worker.id, el("span", {}, state)),
    isLost ? el("p", { class: "bad" }, "No link: its requests were moved. Below is what it last said.") : null,
    el("p", {}, `${worker.running} running, ${worker.waiting} waiting, ${count(worker.prefill_queue_tokens)} prompt tokens queued, ${worker.leases} leases`),
    bar,
    el("p", {}, `KV ${busy}% in use: ${STATES.filter((name) => blocks[name]).map((name) => `${count(blocks[name])} ${name}`).join(", ") || "no blocks"}`),
    lanes.map((pair) => el("p", { class: pair.joined ? "" : "bad" }, `→ ${short(pair.decode)}: ${laneText(worker, pair)}`)),
  );
}

function laneText(worker, pair) {
  if (!pair.compatible) return `cannot work together: ${pair.reason}`;
  if (!pair.joined) return "not joined";
  const state = worker.peers.find((peer) => short(peer.peer) === pair.decode);
  const path = state ? `, ${state.one_sided ? "one-sided writes" : "checked messages"}` : "";
  const speed = state && state.bandwidth_bytes_per_s ? `, ${bytes(state.bandwidth_bytes_per_s)}/s at join` : "";
  return `${pair.lane || "no lane"}${path}${speed}${pair.conversion && pair.conversion !== "none" ? `, ${pair.conversion}` : ""}`;
}

function drawLanes(lines, map, cards, pairs) {
  const frame = map.getBoundingClientRect();
  lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
  for (const pair of pairs) {
    const from = cards.get(short(pair.prefill)), to = cards.get(short(pair.decode));
    if (!from || !to || !from.classList.contains("prefill") || !to.classList.contains("decode")) continue;
    const a = from.getBoundingClientRect(), b = to.getBoundingClientRect();
    const [x1, y1, x2, y2] = [a.right - frame.left, a.top + a.height / 2 - frame.top, b.left - frame.left, b.top + b.height / 2 - frame.top];
    const middle = (x1 + x2) / 2;
    lines.append(svg("path", { class: pair.joined ? "lane" : "lane unjoined", d: `M${x1},${y1} C${middle},${y1} ${middle},${y2} ${x2},${y2}` }));
    if (pairs.length <= 6) {
      const label = pair.joined ? pair.lane : "not joined";
      const [x, y, width] = [middle, (y1 + y2) / 2, 7 * label.length + 10];
      lines.append(svg("rect", { class: "chip", x: x - width / 2, y: y - 10, width, height: 18, rx: 4 }), svg("text", { x, y: y + 3, "text-anchor": "middle" }, label));
    }
  }
}

function legend() {
  return el("p", { class: "legend" }, STATES.map((state) => el("span", {}, el("i", { class: state }), `${state} blocks`)));
}
