/** Files: small ones become the prompt, large ones are stored documents that texts continue. */

import * as api from "./api.js";
import { bytes, count, number } from "./format.js";

const PROMPT_BYTES = 200_000;
const EXAMPLE = "Gallegher and Other Stories"; // page/document.txt
const POLL_MILLISECONDS = 250;
const VISITED = "transformer-vq-document"; // set once this browser has stored or deleted one
const byId = (id) => document.getElementById(id);

export class Documents {
  /** tasks: starts and ends work, and shows texts and errors; see page.js. */
  constructor(tasks) {
    this.tasks = tasks;
    this.entries = [];
    this.select = byId("context");
    this.select.addEventListener("change", () => this.#choose(this.select.value));
    byId("example").addEventListener("click", () => this.loadExample());
    byId("delete").addEventListener("click", () => this.#delete());
    byId("file").addEventListener("change", () => {
      const [file] = byId("file").files;
      if (file) this.#open(file);
      byId("file").value = "";
    });
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      const [file] = event.dataTransfer.files;
      if (!file) return;
      event.preventDefault();
      this.#open(file);
    });
  }

  /** The chosen document, or undefined. */
  get chosen() {
    return this.entries.find((entry) => entry.id === this.select.value);
  }

  /** Load the list of stored documents; the chosen one stays chosen if it exists. */
  async load() {
    this.entries = await api.listContexts();
    const { value } = this.select;
    this.select.replaceChildren(new Option("None: start a new text", ""));
    for (const { id, name, tokens } of this.entries) {
      this.select.append(new Option(`${name || id} (${count(tokens, "token")})`, id));
    }
    byId("context-field").hidden = this.entries.length === 0;
    byId("example").hidden = this.hasExample;
    this.#choose(value);
  }

  get #example() {
    return this.entries.find((entry) => entry.name === EXAMPLE);
  }

  #choose(id) {
    this.select.value = this.entries.some((entry) => entry.id === id) ? id : "";
    byId("delete").disabled = this.select.value === "";
    this.tasks.showCounts(this.chosen?.tokens ?? 0);
  }

  /** Choose the example document, which is stored first if it is not; inspect what follows it. */
  async loadExample() {
    try {
      const { text, prompt } = await api.getExample();
      if (!this.#example) {
        this.tasks.showStart(text);
        if (!(await this.#store(new File([text], EXAMPLE)))) return;
      }
      this.#choose(this.#example.id);
      byId("prompt").value = prompt;
      await this.tasks.inspectPrompt();
    } catch (error) {
      this.tasks.report(error);
    }
  }

  /** Whether the example document is stored. */
  get hasExample() {
    return this.#example !== undefined;
  }

  /** Whether there is no document and this browser has never had one here. */
  get isFirstVisit() {
    return this.entries.length === 0 && !hasVisited();
  }

  async #open(file) {
    if (file.size > PROMPT_BYTES) {
      await this.#store(file);
      return;
    }
    try {
      const content = await file.arrayBuffer();
      byId("prompt").value = new TextDecoder("utf-8", { fatal: true }).decode(content);
    } catch {
      this.tasks.report(new api.APIError(`${file.name} is not a text file in UTF-8.`, 0));
      return;
    }
    this.#choose("");
    this.tasks.setStatus(`${file.name} is the prompt now. Press Generate to continue it.`);
    byId("prompt").focus();
  }

  /** Prefill and store a file; return whether this succeeded. */
  async #store(file) {
    const run = this.tasks.begin(`Prefilling ${file.name} (${bytes(file.size)})…`);
    this.latest = run;
    const timer = setInterval(() => this.#showProgress(), POLL_MILLISECONDS);
    byId("prefill-bar").removeAttribute("value");
    byId("prefill-count").textContent = "";
    byId("prefill").hidden = false;
    byId("example").hidden = true;
    byId("generate").disabled = true;
    try {
      const { id, tokens } = await api.addContext(file, run.signal);
      rememberVisit();
      await this.load();
      this.#choose(id);
      byId("prompt").value = "";
      const size = count(tokens, "token");
      this.tasks.end(run, `${file.name} is stored (${size}). Press Generate to continue it.`);
      return true;
    } catch (error) {
      if (api.isAbort(error)) rememberVisit(); // it is not wanted
      this.tasks.fail(run, error);
      return false;
    } finally {
      clearInterval(timer);
      if (this.latest === run) {
        byId("prefill").hidden = true;
        byId("generate").disabled = false;
        byId("example").hidden = this.hasExample;
        this.tasks.showCounts(this.chosen?.tokens ?? 0);
      }
    }
  }

  /** Show how much of the document is prefilled, while it is. */
  async #showProgress() {
    try {
      const { tokens, total } = await api.getPrefill();
      if (byId("prefill").hidden || !total) return;
      byId("prefill-bar").value = tokens / total;
      byId("prefill-count").textContent = `${number(tokens)} of ${count(total, "token")}`;
      this.tasks.showCounts(tokens);
    } catch {
      // the upload itself reports errors
    }
  }

  async #delete() {
    try {
      await api.deleteContext(this.select.value);
      rememberVisit();
      await this.load();
      this.tasks.setStatus("The document is deleted.");
      byId("prompt").focus();
    } catch (error) {
      this.tasks.report(error);
    }
  }
}

function hasVisited() {
  try {
    return localStorage.getItem(VISITED) !== null;
  } catch {
    return false; // the browser blocks storage
  }
}

function rememberVisit() {
  try {
    localStorage.setItem(VISITED, "yes");
  } catch {
    // every visit is the first one
  }
}
