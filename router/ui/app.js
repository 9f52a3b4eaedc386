// The live page: asks the router for /internal/v1/overview again and again, and for a request's waterfall when one is chosen.

import { ask, Gone, KeyNeeded, Poller, setKey } from "./api.js";
import { rates, showLatency, showThroughput, takeSample } from "./charts.js";
import { showCluster } from "./cluster.js";
import { byId, count, el, empty, show } from "./dom.js";
import { showRequests } from "./requests.js";
import { showWaterfall } from "./waterfall.js";

let latest = null;
let chosen = null;
let isChosenOver = false;
let told = null; // of the chosen one

const poller = new Poller(async () => {
  try {
    latest = await ask("/internal/v1/overview");
    takeSample(latest);
    render();
    if (chosen && !isChosenOver) await fetchWaterfall();
    return "again";
  } catch (error) {
    return failed(error);
  }
});

function render() {
  byId("key-form").hidden = byId("trouble").hidden = true;
  byId("model").textContent = `${latest.model} at ${latest.router_id}`;
  setState(latest.not_ready || "ready", !latest.not_ready);
  showFigures();
  showCluster(latest);
  showThroughput();
  showLatency(byId("window").value === "recent");
  showRequests(latest, chosen, choose);
}

function showFigures() {
  const now = rates();
  const figures = [
    [latest.open_requests, "requests open"], [latest.queued_requests, "waiting for a worker"], [latest.workers.length, "workers linked"],
    [now ? count(now.generated) : "–", "tokens/s generated"], [now ? count(now.prompt) : "–", "prompt tokens/s"],
    [count(latest.requests_ended), "requests ended"], [count(latest.moves), "moves"], [count(latest.rejections), "turned away"],
  ];
  show("figures", figures.map(([value, text]) => el("div", {}, el("b", {}, String(value)), el("span", {}, text))));
}

function setState(text, isGood) {
  const state = byId("state");
  state.textContent = text;
  state.className = isGood ? "good" : "poor";
}

function failed(error) {
  if (error instanceof KeyNeeded) {
    byId("key-form").hidden = false;
    byId("key").focus();
    setState(error.message || "a key is needed", false);
    return "stop";
  }
  if (error instanceof TypeError || error.name === "TimeoutError") setState("no answer", false);
  const trouble = byId("trouble");
  trouble.textContent = `The router does not answer as it should (${error.message}); asking again in ${poller.delayS} s.${latest ? " What is shown is old." : ""}`;
  trouble.hidden = false;
  setState(latest ? "no answer" : "cannot load", false);
  return "later";
}

async function choose(id) {
  chosen = id;
  told = null;
  isChosenOver = false;
  history.replaceState(null, "", id ? `#${encodeURIComponent(id)}` : location.pathname);
  byId("waterfall-section").hidden = !id;
  if (latest) showRequests(latest, chosen, choose);
  if (!id) return;
  show("waterfall", empty("Asking the workers."));
  byId("waterfall-section").scrollIntoView({ block: "nearest" });
  try {
    await fetchWaterfall();
  } catch (error) {
    failed(error);
    show("waterfall", empty(`Not to be had: ${error.message}`));
  }
}

async function fetchWaterfall() {
  const id = chosen;
  try {
    const answer = await ask(`/internal/v1/requests/${encodeURIComponent(id)}/waterfall`);
    if (id !== chosen) return;
    told = answer;
    isChosenOver = told.outcome !== "";
    showWaterfall(told);
  } catch (error) {
    if (!(error instanceof Gone)) throw error;
    isChosenOver = true;
    show("waterfall", empty(error.message));
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  poller.now();
});
byId("window").addEventListener("change", () => latest && showLatency(byId("window").value === "recent"));
byId("waterfall-close").addEventListener("click", () => choose(null));
window.addEventListener("resize", () => {
  if (latest) render();
  if (told) showWaterfall(told);
});

await poller.now();
if (location.hash.length > 1) await choose(decodeURIComponent(location.hash.slice(1)));
