// Latency histograms and throughput over time, of a ring of samples that lives as long as the page.

import { byId, count, el, empty, seconds, show, svg } from "./dom.js";

const KEPT = 300; // ten minutes of samples
const RECENT_S = 300;
const NAMES = { ttft: "Time to first token", itl: "Between tokens", tpot: "Per output token", e2e: "Whole request" };

const ring = [];

export function takeSample(overview) {
  const last = ring.at(-1);
  if (last && (last.router !== overview.router_id || overview.generated_tokens < last.generated)) ring.length = 0; // it was started anew
  ring.push({
    router: overview.router_id,
    at: performance.now() / 1000,
    prompt: overview.prompt_tokens,
    generated: overview.generated_tokens,
    histograms: Object.fromEntries(Object.keys(NAMES).map((name) => [name, overview[name]])),
  });
  if (ring.length > KEPT) ring.shift();
}

// Tokens per second over the last few samples.
export function rates() {
  const [from, to] = [ring.at(-4) || ring[0], ring.at(-1)];
  if (!from || from === to) return null;
  const elapsed = to.at - from.at;
  return { prompt: (to.prompt - from.prompt) / elapsed, generated: (to.generated - from.generated) / elapsed };
}

export function showThroughput() {
  if (ring.length < 2) return;
  const [width, height, left, bottom] = [Math.max(280, byId("throughput").clientWidth), 150, 46, 18];
  const points = ring.slice(1).map((sample, index) => {
    const elapsed = Math.max(1e-3, sample.at - ring[index].at);
    return { at: sample.at, prompt: (sample.prompt - ring[index].prompt) / elapsed, generated: (sample.generated - ring[index].generated) / elapsed };
  });
  const begin = ring[0].at, end = ring.at(-1).at;
  const top = Math.max(1, ...points.map((point) => Math.max(point.prompt, point.generated)));
  const x = (at) => left + ((width - left - 8) * (at - begin)) / Math.max(1e-3, end - begin);
  const y = (value) => height - bottom - ((height - bottom - 10) * value) / top;
  const line = (name) => svg("polyline", { class: name, points: points.map((point) => `${x(point.at)},${y(point[name])}`).join(" ") });
  const axis = [0, top].map((value) => [
    svg("line", { class: "axis", x1: left, x2: width - 8, y1: y(value), y2: y(value) }),
    svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, count(value)),
  ]);
  const ago = [svg("text", { x: left, y: height - 2 }, `${seconds(end - begin)} ago`), svg("text", { x: width - 8, y: height - 2, "text-anchor": "end" }, "now")];
  const legend = el("p", { class: "legend" }, el("span", {}, el("i", { class: "decode" }), "generated"), el("span", {}, el("i", { class: "prefill" }), "prompt (when accepted)"));
  show("throughput", svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Tokens per second" }, axis, ago, line("prompt"), line("generated")), legend);
}

export function showLatency(isRecentOnly) {
  const charts = Object.entries(NAMES).map(([name, title]) => histogram(title, isRecentOnly ? recent(name) : ring.at(-1).histograms[name]));
  const shown = charts.filter((chart) => chart !== null);
  show("latency", shown.length ? el("div", { class: "charts" }, shown) : empty(isRecentOnly ? "No token has come meanwhile." : "No token has come yet."));
}

function recent(name) {
  const to = ring.at(-1);
  const from = ring.find((sample) => to.at - sample.at <= RECENT_S).histograms[name];
  const last = to.histograms[name];
  return { bounds: last.bounds, counts: last.counts.map((value, index) => value - from.counts[index]), sum: last.sum - from.sum };
}

function histogram(title, data) {
  const total = data.counts.reduce((sum, value) => sum + value, 0);
  if (!total) return null;
  const used = data.counts.map((value, index) => (value ? index : -1)).filter((index) => index >= 0);
  const first = Math.max(0, used[0] - 1), last = Math.min(data.counts.length - 1, used.at(-1) + 1);
  const [width, height, bottom] = [260, 100, 16];
  const step = width / (last - first + 1);
  const top = Math.max(...data.counts);
  const bars = [];
  for (let index = first; index <= last; index += 1) {
    const tall = ((height - bottom - 4) * data.counts[index]) / top;
    const upTo = index < data.bounds.length ? `to ${seconds(data.bounds[index])}` : "more";
    bars.push(svg("rect", { class: "bar", x: (index - first) * step + 1, y: height - bottom - tall, width: step - 2, height: Math.max(tall, data.counts[index] ? 1 : 0) },
      svg("title", {}, `${upTo}: ${data.counts[index]}`)));
  }
  const edge = (index) => (index <= 0 ? "0" : seconds(data.bounds[Math.min(index, data.bounds.length) - 1]));
  const labels = [[0, edge(first), "start"], [width / 2, edge(Math.round((first + last + 1) / 2)), "middle"],
    [width, last < data.bounds.length ? seconds(data.bounds[last]) : "∞", "end"]];
  return el("div", { "data-histogram": title }, el("h3", {}, title),
    svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title }, svg("line", { class: "axis", x1: 0, x2: width, y1: height - bottom, y2: height - bottom }), bars,
      labels.map(([x, text, anchor]) => svg("text", { x, y: height - 3, "text-anchor": anchor }, text))),
    el("p", {}, `mean ${seconds(data.sum / total)}, p50 ${quantile(data, total, 0.5)}, p95 ${quantile(data, total, 0.95)}, p99 ${quantile(data, total, 0.99)}, of ${count(total)}`));
}

// Within its bucket, linear, as Prometheus' histogram_quantile.
function quantile(data, total, share) {
  let below = 0;
  for (let index = 0; index < data.bounds.length; index += 1) {
    const here = data.counts[index];
    if (here && below + here >= share * total) {
      const low = index ? data.bounds[index - 1] : 0;
      return seconds(low + ((data.bounds[index] - low) * (share * total - below)) / here);
    }
    below += here;
  }
  return `> ${seconds(data.bounds.at(-1))}`;
}
