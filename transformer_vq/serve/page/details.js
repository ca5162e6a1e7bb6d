/** The panel about one token: surprisal, code, tokens with the same code, and attention. */

import { bits as bitsText, count, number, percent, quoted } from "./format.js";

const N_NEAREST = 8; // tokens with the same code to list
const N_EXAMPLES = 4; // texts to list per code of the cache
const byId = (id) => document.getElementById(id);

export class Details {
  /** list: the TokenList whose tokens are described and marked. */
  constructor(list) {
    this.list = list;
    this.position = 0;
    for (const id of ["layer", "head"]) {
      byId(id).addEventListener("change", () => this.show(this.position));
    }
    byId("same-list").addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) list.select(Number(button.dataset.target), { focus: true });
    });
    byId("top-codes").addEventListener("click", (event) => this.#toggleCode(event));
  }

  /** Use another inspection. windowLen: tokens of the window; older ones are in the cache. */
  load(inspection, windowLen) {
    this.inspection = inspection;
    this.windowLen = windowLen;
    byId("window-size").textContent = ` (${count(windowLen, "token")})`;
    fillNumbers(byId("layer"), inspection.layers.length);
    fillNumbers(byId("head"), inspection.layers[0].codes.length);
    byId("no-token").hidden = true;
    byId("token-details").hidden = false;
  }

  clear() {
    byId("no-token").hidden = false;
    byId("token-details").hidden = true;
  }

  /** Return a token that has something to show: the last word whose code occurs before it. */
  example() {
    const codes = this.inspection.layers[Number(byId("layer").value)].codes[
      Number(byId("head").value)
    ];
    const last = codes.length - 1;
    for (let i = last; i > 0; i -= 1) {
      if (/\p{L}/u.test(this.inspection.texts[i] ?? "") && codes.indexOf(codes[i]) < i) return i;
    }
    return last;
  }

  /** Describe the token at a position. */
  show(position) {
    this.position = position;
    const { texts, tokens, surprisal, layers, position: start } = this.inspection;
    const layer = layers[Number(byId("layer").value)];
    const head = Number(byId("head").value);
    byId("token-text").textContent = quoted(texts[position]);
    this.#facts([
      ["Token id", number(tokens[position])],
      ["Position", number(start + position)],
      ["Surprisal", surprisalText(surprisal[position])],
    ]);
    this.#code(layer.codes[head], position);
    this.#attention(layer, head, position);
    this.#cache(layer, head, position);
  }

  #facts(rows) {
    byId("facts").replaceChildren(
      ...rows.map(([name, value]) => {
        const row = document.createElement("div");
        row.append(element("dt", name), element("dd", value));
        return row;
      }),
    );
  }

  #code(codes, position) {
    const same = [];
    for (let i = position - 1; i >= 0; i -= 1) if (codes[i] === codes[position]) same.push(i);
    const shown = same.slice(0, N_NEAREST);
    const earlier = count(same.length, "earlier token");
    byId("code").textContent = codes[position];
    byId("same").textContent =
      same.length === 0
        ? "No earlier token of this text has this code."
        : `${earlier} ${same.length === 1 ? "has" : "have"} this code, outlined in the text.` +
          (same.length > shown.length ? " The nearest are:" : "");
    byId("same-list").replaceChildren(
      ...shown.map((i) => {
        const button = element("button", this.#nameOf(i));
        button.type = "button";
        button.dataset.target = i;
        return item(button);
      }),
    );
    this.list.mark("same", same);
    this.list.describe(position, `code ${codes[position]}, ${earlier} with this code`);
  }

  #nameOf(i) {
    return `${quoted(this.inspection.texts[i])} at ${number(this.inspection.position + i)}`;
  }

  #attention(layer, head, position) {
    const shares = {
      window: layer.window[head][position],
      cache: layer.cache[head][position],
    };
    for (const [name, share] of Object.entries(shares)) {
      byId("shares").querySelector(`.${name}`).style.width = `${100 * share}%`;
      byId(name).textContent = percent(share);
    }
  }

  #cache(layer, head, position) {
    const weights = layer.top_weights[head][position];
    const codes = layer.top_codes[head][position].filter((_, i) => weights[i] > 0);
    const cacheEnd = Math.max(0, position - this.windowLen); // tokens of this text in the cache
    byId("cache-note").textContent = this.#cacheNote(codes.length, position, cacheEnd);
    byId("top-codes").replaceChildren(
      ...codes.map((code, i) => {
        const positions = [];
        for (let j = 0; j < cacheEnd; j += 1) if (layer.codes[head][j] === code) positions.push(j);
        const button = element("button", `Code ${code}: ${percent(weights[i])}`);
        button.type = "button";
        button.ariaPressed = "false";
        button.dataset.positions = positions.join(" ");
        return item(button, element("span", this.#examples(positions)));
      }),
    );
    this.list.mark("example", []);
  }

  #cacheNote(nCodes, position, cacheEnd) {
    if (nCodes > 0 && !cacheEnd) return "All tokens of these codes are in the document.";
    if (nCodes > 0) return "Select a code to outline its tokens in the text.";
    const isUsed = this.inspection.position + position > this.windowLen;
    if (isUsed) return "No code of the cache has any weight here.";
    return `The cache is empty here. Tokens are evicted to it from position ${this.windowLen + 1} on.`;
  }

  /** Return the texts of tokens, the most frequent first. */
  #examples(positions) {
    if (!positions.length) return "in the document";
    const counts = new Map();
    for (const i of positions) {
      const text = quoted(this.inspection.texts[i]);
      counts.set(text, (counts.get(text) ?? 0) + 1);
    }
    const sorted = [...counts].sort((a, b) => b[1] - a[1]);
    const shown = sorted.slice(0, N_EXAMPLES).map(([text, n]) => (n > 1 ? `${text} ×${n}` : text));
    const nMore = sorted.length - shown.length;
    return shown.join(", ") + (nMore > 0 ? ` and ${nMore} more` : "");
  }

  #toggleCode(event) {
    const button = event.target.closest("button");
    if (!button) return;
    const isPressed = button.ariaPressed !== "true";
    for (const other of byId("top-codes").querySelectorAll("button")) other.ariaPressed = "false";
    button.ariaPressed = String(isPressed);
    const positions = button.dataset.positions.split(" ").filter(Boolean).map(Number);
    this.list.mark("example", isPressed ? positions : []);
  }
}

function surprisalText(bits) {
  if (bits === null) return "none: the first token is given";
  const probability = 100 * 2 ** -bits;
  const digits = probability >= 99.95 ? 4 : 2;
  const shown = probability < 0.001 ? "below 0.001" : Number(probability.toPrecision(digits));
  return `${bitsText(bits)} (probability ${shown}%)`;
}

/** Fill a select with the numbers below n; the chosen one is kept if it exists. */
function fillNumbers(select, n) {
  if (select.length === n) return;
  const chosen = Math.min(Number(select.value), n - 1);
  select.replaceChildren(...Array.from({ length: n }, (_, i) => element("option", i)));
  select.selectedIndex = chosen;
}

function element(name, text) {
  const found = document.createElement(name);
  found.textContent = text;
  return found;
}

function item(...children) {
  const found = document.createElement("li");
  found.append(...children);
  return found;
}
