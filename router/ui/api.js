// Questions to the router, under the key of this tab if one is needed; and the rhythm of asking.

const KEY = "pd-serve-key";
const PERIOD_MS = 2000;
const LONGEST_MS = 30000;
const PATIENCE_MS = 10000;

export class KeyNeeded extends Error {}
export class Gone extends Error {}

export function setKey(key) {
  sessionStorage.setItem(KEY, key);
}

export async function ask(path) {
  const key = sessionStorage.getItem(KEY);
  const headers = key ? { authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { headers, cache: "no-store", credentials: "omit", signal: AbortSignal.timeout(PATIENCE_MS) });
  if (response.status === 401) throw new KeyNeeded(key ? "The router does not take this key." : "");
  const body = await response.json().catch(() => null);
  if (response.ok && body !== null) return body;
  const message = body && body.error ? body.error.message : `status ${response.status}`;
  throw response.status === 404 ? new Gone(message) : new Error(message);
}

// Calls `once` every two seconds, rarer while it fails, never while nobody looks. `now()`: at once.
export class Poller {
  #once;
  #delay = PERIOD_MS;
  #timer = null;
  #isAsking = false;

  constructor(once) {
    this.#once = once;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.now()));
  }

  stop() {
    clearTimeout(this.#timer);
    this.#timer = null;
  }

  async now() {
    this.stop();
    if (this.#isAsking) return;
    this.#isAsking = true;
    try {
      const goOn = await this.#once();
      this.#delay = goOn === "again" ? PERIOD_MS : Math.min(2 * this.#delay, LONGEST_MS);
      if (goOn !== "stop" && !document.hidden) this.#timer = setTimeout(() => this.now(), this.#delay);
    } finally {
      this.#isAsking = false;
    }
  }

  get delayS() {
    return Math.min(2 * this.#delay, LONGEST_MS) / 1000;
  }
}
