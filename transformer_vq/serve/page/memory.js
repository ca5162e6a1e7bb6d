/** The counter: size of the state, which is constant, beside that of a KV cache. */

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

  /** Show the sizes for a number of tokens. unit: which tokens are counted. */
  update(nTokens, unit = "token") {
    const kv = nTokens * (this.perToken ?? 0);
    const largest = Math.max(kv, this.state, 1);
    byId("kv-bytes").textContent = `${bytes(kv)} for ${count(nTokens, unit)}`;
    byId("kv-bar").style.width = `${(100 * kv) / largest}%`;
    byId("state-bar").style.width = `${(100 * this.state) / largest}%`;
  }
}
