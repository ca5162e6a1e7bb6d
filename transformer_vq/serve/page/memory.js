/** The counters: size of the state, which is constant, beside that of a KV cache, and positions. */

import { bytes, count, number } from "./format.js";

const byId = (id) => document.getElementById(id);

export class MemoryCounter {
  /** model: its entry in /v1/models. */
  constructor(model) {
    this.state = model.state_bytes;
    this.perToken = model.kv_bytes_per_token;
    byId("memory").hidden = !this.state;
    byId("kv").hidden = !this.perToken;
    byId("state-bytes").textContent = `${bytes(this.state)}, constant`;
    byId("memory-hint").textContent = this.perToken
      ? `A KV cache takes ${bytes(this.perToken)} per token, ` +
        `so it is larger from ${number(Math.floor(this.state / this.perToken) + 1)} tokens on.`
      : "The state has this size for a text of any length.";
    this.update(0);
  }

  /** Show the sizes for a document and a text. unit: which tokens of the text are counted. */
  update(nDocument, nText = 0, unit = "token") {
    const n = nDocument + nText;
    const kv = n * (this.perToken ?? 0);
    const largest = Math.max(kv, this.state, 1);
    const ratio = kv >= 2 * this.state ? ` (${number(kv / this.state)}x)` : "";
    byId("kv-bytes").textContent = `${bytes(kv)} for ${count(n, nDocument ? "token" : unit)}${ratio}`;
    byId("kv-bar").style.width = `${(100 * kv) / largest}%`;
    byId("state-bar").style.width = `${(100 * this.state) / largest}%`;
    byId("n-document").textContent = number(nDocument);
    byId("n-text").textContent = number(nText) + (unit === "token" ? "" : " generated");
    byId("n-position").textContent = number(n);
  }
}
