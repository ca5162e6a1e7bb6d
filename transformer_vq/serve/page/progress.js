/** Counts of a streamed text. */

import { count, number } from "./format.js";

const REASONS = {
  length: "maximum number of tokens reached",
  stop: "stop string or end of the document",
};

export class Progress {
  /** nContext: tokens of the document that the text continues. */
  constructor(nContext) {
    this.nContext = nContext;
    this.nNew = 0;
    this.isFirst = false;
    this.times = [];
  }

  /** Count the tokens of an object of the stream. */
  add(chunk) {
    const n = chunk.choices[0]?.logprobs?.tokens.length ?? 0;
    this.isFirst = this.nNew === 0 && n > 0;
    this.nNew += n;
    if (n) this.times = [this.times[0] ?? performance.now(), performance.now()];
    this.reason = chunk.choices[0]?.finish_reason ?? this.reason;
    this.usage = chunk.usage ?? this.usage;
    if (chunk.usage) this.nNew = chunk.usage.completion_tokens;
  }

  /** Which tokens are counted: those of the prompt are known after the last chunk. */
  get unit() {
    return this.usage ? "token" : "generated token";
  }

  /** Tokens of prompt and text, or undefined if the stream was stopped before the last chunk. */
  get nShown() {
    return this.usage && this.usage.total_tokens - this.nContext;
  }

  /** Return the number of new tokens and their rate. */
  rate() {
    const seconds = (this.times[1] - this.times[0]) / 1000;
    const speed = seconds > 0 ? `, ${number((this.nNew - 1) / seconds, 1)} tokens per second` : "";
    return `${count(this.nNew, "token")}${speed}`;
  }

  /** Return the sentences for a text that has ended. */
  summary() {
    if (!this.usage) return `${this.rate()}.`;
    const { prompt_tokens: nPrompt, prompt_tokens_details: parts } = this.usage;
    const cached = number(parts.cached_tokens);
    return `${this.rate()}. Cached: ${cached} of ${count(nPrompt, "prompt token")}.`;
  }

  /** Return why the text has ended. */
  finish() {
    const meaning = REASONS[this.reason];
    return `Finished (${this.reason}${meaning ? `: ${meaning}` : ""}).`;
  }
}
