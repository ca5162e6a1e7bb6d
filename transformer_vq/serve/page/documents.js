/** Files: small ones become the prompt, large ones are stored documents that texts continue. */

import * as api from "./api.js";
import { bytes, count } from "./format.js";

const PROMPT_BYTES = 200_000;
const byId = (id) => document.getElementById(id);

export class Documents {
  /** tasks: starts and ends work, and reports errors; see page.js. */
  constructor(tasks) {
    this.tasks = tasks;
    this.entries = [];
    this.select = byId("context");
    this.select.addEventListener("change", () => this.#choose(this.select.value));
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
    this.#choose(value);
  }

  #choose(id) {
    this.select.value = this.entries.some((entry) => entry.id === id) ? id : "";
    byId("delete").disabled = this.select.value === "";
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

  async #store(file) {
    const run = this.tasks.begin(`Prefilling ${file.name} (${bytes(file.size)})…`);
    try {
      const { id, tokens } = await api.addContext(file, run.signal);
      await this.load();
      this.#choose(id);
      byId("prompt").value = "";
      const size = count(tokens, "token");
      this.tasks.end(run, `${file.name} is stored (${size}). Press Generate to continue it.`);
    } catch (error) {
      this.tasks.fail(run, error);
    }
  }

  async #delete() {
    try {
      await api.deleteContext(this.select.value);
      await this.load();
      this.tasks.setStatus("The document is deleted.");
      byId("prompt").focus();
    } catch (error) {
      this.tasks.report(error);
    }
  }
}
