// The table of recent requests.

import { byId, el, seconds, short, show } from "./dom.js";

const COLUMNS = [["request", "text"], ["age"], ["prompt"], ["output"], ["prefill", "text"], ["decode", "text"], ["moves"], ["queue"], ["first token"], ["total"], ["outcome", "text"]];

export function showRequests(overview, chosen, choose) {
  if (!overview.requests.length) return;
  const rows = overview.requests.map((request) => {
    const name = request.request_id || request.response_id || `choice ${request.choice}`;
    const cells = [
      el("button", { type: "button", title: `waterfall of ${name}`, onclick: () => choose(request.id) }, name.length > 26 ? `${name.slice(0, 12)}…${name.slice(-8)}` : name),
      seconds(request.age_s), request.prompt_tokens, request.outcome ? request.output_tokens : "…", short(request.prefill) || (request.decode ? "as decode" : "–"),
      short(request.decode) || "–", request.moves, seconds(request.queue_s), seconds(request.ttft_s), seconds(request.total_s), request.outcome || "in progress",
    ];
    return el("tr", { "data-request": request.id, class: request.id === chosen ? "chosen" : "" }, cells.map((cell, index) => el("td", { class: COLUMNS[index][1] }, cell instanceof Node ? cell : String(cell))));
  });
  const head = el("tr", {}, COLUMNS.map(([title, kind]) => el("th", { class: kind, scope: "col" }, title)));
  const before = byId("requests").querySelector(".scroll");
  const [top, focused] = [before ? before.scrollTop : 0, document.activeElement?.closest("tr")?.dataset.request];
  const box = el("div", { class: "scroll" }, el("table", {}, el("thead", {}, head), el("tbody", {}, rows)));
  show("requests", box);
  box.scrollTop = top;
  if (focused) [...box.querySelectorAll("tr[data-request]")].find((row) => row.dataset.request === focused)?.querySelector("button").focus();
}
