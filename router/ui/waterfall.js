// One request from its arrival to its end: what router and workers did, and beside prefill's compute the push of each layer.

import { byId, bytes, el, empty, seconds, short, show, svg } from "./dom.js";

const NARROWEST = 560, LEFT = 150, RIGHT = 90, ROW = 20;

export function showWaterfall(told) {
  const name = [told.request_id, told.response_id].filter(Boolean).join(", ") || `choice ${told.choice}`;
  const head = el("p", {}, `${name}: ${told.prompt_tokens} prompt tokens; ${told.outcome ? `${told.outcome} after ${seconds(told.ended_s)}` : "in progress"}`);
  const parts = told.attempts.map((attempt, index) => drawAttempt(attempt, index, told.attempts.length));
  show("waterfall", head, parts.length ? parts : empty("It has not been placed on a worker yet."), parts.length ? legend() : []);
}

function drawAttempt(attempt, index, total) {
  const place = attempt.prefill ? `${short(attempt.prefill)} → ${short(attempt.decode)}` : short(attempt.decode);
  const end = attempt.left_because ? `, left because of ${attempt.left_because}` : "";
  const transfer = attempt.overlap_ratio === null ? "" : `; ${bytes(attempt.kv_nbytes)} of KV over ${attempt.lane}, ${(100 * attempt.overlap_ratio).toFixed(1)}% before the end of compute`;
  return el("div", { "data-attempt": attempt.attempt_id },
    el("h3", {}, `${total > 1 ? `Placement ${index + 1}: ` : ""}${place}${end}`),
    el("p", {}, `attempt ${attempt.attempt_id}${transfer}`),
    attempt.legs.map((leg) => el("p", {}, clockText(leg))).filter((text) => text.textContent),
    attempt.spans.length ? spans(attempt) : empty("Nothing is known of its phases."),
    attempt.layers.length ? layers(attempt) : []);
}

function clockText(leg) {
  if (!leg.is_known) return `${short(leg.worker)}: ${leg.detail}`;
  if (leg.is_same_clock) return "";
  const by = leg.uncertainty_s === null ? "as if its first frame had taken no time" : `within ± ${seconds(leg.uncertainty_s)}`;
  return `${short(leg.worker)} has another clock: its spans are placed by the frames the router saw, ${by}.`;
}

// The first token is what one waits for: what comes after it is shown as a figure, not to scale.
function spans(attempt) {
  const width = widthHere();
  const scaled = attempt.spans.filter((span) => !span.is_tail);
  const begin = Math.min(...scaled.map((span) => span.begin_s)), end = Math.max(...scaled.map((span) => span.end_s));
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (Math.min(at, end) - begin)) / Math.max(1e-9, end - begin);
  const height = ROW * attempt.spans.length + 22;
  const rows = attempt.spans.map((span, row) => {
    const long = Math.max(2, span.is_tail ? RIGHT / 4 : x(span.end_s) - x(span.begin_s));
    const at = x(span.begin_s);
    return svg("g", { "data-span": span.name },
      svg("text", { class: "strong", x: LEFT - 8, y: row * ROW + 15, "text-anchor": "end" }, `${span.place}: ${span.name}`),
      svg("rect", { class: span.place, x: at, y: row * ROW + 4, width: long, height: ROW - 6, rx: 2, "fill-opacity": span.is_tail ? 0.5 : 1 },
        svg("title", {}, `${span.place}: ${span.name}, ${seconds(span.end_s - span.begin_s)}, from ${seconds(span.begin_s - begin)}`)),
      svg("text", { x: at + long + 5, y: row * ROW + 15 }, seconds(span.end_s - span.begin_s)));
  });
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Phases" }, rows, scale(x, begin, end, height));
}

function layers(attempt) {
  const width = widthHere();
  const begin = Math.min(...attempt.layers.map((layer) => layer.compute_begin_s));
  const end = Math.max(attempt.flushed_s, attempt.compute_end_s, ...attempt.layers.map((layer) => Math.max(layer.compute_end_s, layer.push_end_s)));
  const num = 1 + Math.max(...attempt.layers.map((layer) => layer.layer));
  const tall = num > 40 ? 8 : 12;
  const x = (at) => LEFT + ((width - LEFT - RIGHT) * (at - begin)) / Math.max(1e-9, end - begin);
  const height = tall * num + 22;
  const bar = (kind, from, to, y, text) => svg("rect", { class: kind, x: x(from), y, width: Math.max(1.5, x(to) - x(from)), height: tall / 2 - 0.5 }, svg("title", {}, text));
  const drawn = attempt.layers.map((layer) => {
    const name = `layer ${layer.layer}, chunk ${layer.chunk}`;
    const push = `${name}: push of ${bytes(layer.nbytes)} in ${seconds(layer.push_end_s - layer.push_begin_s)}`;
    return svg("g", { "data-layer": layer.layer },
      bar("prefill", layer.compute_begin_s, layer.compute_end_s, tall * layer.layer + 2, `${name}: compute ${seconds(layer.compute_end_s - layer.compute_begin_s)}`),
      bar("transfer", layer.push_begin_s, layer.push_end_s, tall * layer.layer + 2 + tall / 2, push));
  });
  const every = Math.ceil(num / 15);
  const names = [...Array(num).keys()].filter((layer) => layer % every === 0)
    .map((layer) => svg("text", { x: LEFT - 8, y: tall * layer + 10, "text-anchor": "end" }, `layer ${layer}`));
  const mark = (at, text, anchor, shift) => [svg("line", { class: "mark", x1: x(at), x2: x(at), y1: 0, y2: height - 16 }),
    svg("text", { x: x(at) + shift, y: anchor === "end" ? 10 : 22, "text-anchor": anchor }, text)];
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Layers: compute and push" }, drawn, names,
    mark(attempt.compute_end_s, "end of compute", "end", -4), mark(attempt.flushed_s, "all flushed", "start", 4), scale(x, begin, end, height));
}

const widthHere = () => Math.max(NARROWEST, byId("waterfall").clientWidth);

function scale(x, begin, end, height) {
  const y = height - 4;
  return [0, 0.25, 0.5, 0.75, 1].map((share) => svg("text", { x: x(begin + share * (end - begin)), y, "text-anchor": share === 0 ? "start" : "middle" }, seconds(share * (end - begin))));
}

function legend() {
  const names = [["router", "router and links"], ["prefill", "prefill compute"], ["transfer", "push of KV"], ["decode", "decode"]];
  return el("p", { class: "legend" }, names.map(([kind, text]) => el("span", {}, el("i", { class: kind }), text)), el("span", {}, "pale: not to scale"));
}
