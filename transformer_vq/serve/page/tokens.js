/** The text: plain while it streams, then one element per token, colored by surprisal. */

import { bits as bitsText, byteLength, quoted, running } from "./format.js";

const BITS_PER_LEVEL = 2;
const N_LEVEL = 6; // the classes level-0 to level-5 of the style sheet
const encoder = new TextEncoder();

/** Return the class of a surprisal; null is the first token, which has none. */
function levelOf(bits) {
  if (bits === null) return "level-0";
  return `level-${Math.max(0, Math.min(N_LEVEL - 1, Math.floor(bits / BITS_PER_LEVEL)))}`;
}

/** Fill the legend of the colors. */
export function drawLegend(list) {
  for (let level = 0; level < N_LEVEL; level += 1) {
    const item = document.createElement("li");
    const low = level * BITS_PER_LEVEL;
    item.className = `level-${level}`;
    item.textContent =
      level === N_LEVEL - 1 ? `${low} bits or more` : `${low}–${low + BITS_PER_LEVEL}`;
    list.append(item);
  }
}

/** Text that grows while it is decoded; the page is updated once per frame. */
export class StreamedText {
  constructor(box) {
    this.box = box;
    this.waiting = [];
  }

  /** Start with a prompt. */
  start(prompt) {
    const span = document.createElement("span");
    span.className = "prompt";
    span.textContent = prompt;
    this.waiting = [];
    this.box.hidden = false;
    this.box.replaceChildren(span);
    this.box.scrollTop = this.box.scrollHeight;
  }

  /** Append decoded text. logprobs: of its tokens, in the format of the API. */
  add(text, logprobs) {
    if (!text) return;
    const span = document.createElement("span");
    if (logprobs && logprobs.tokens.join("") === text) {
      const nats = -logprobs.token_logprobs.reduce((sum, x) => sum + x, 0);
      span.className = levelOf(nats / Math.LN2 / logprobs.tokens.length);
    }
    span.textContent = text;
    if (this.waiting.push(span) === 1) requestAnimationFrame(() => this.flush());
  }

  /** Show all text now; scroll with it unless the reader has scrolled up. */
  flush() {
    const { box } = this;
    const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    box.append(...this.waiting);
    this.waiting = [];
    if (isAtEnd) box.scrollTop = box.scrollHeight;
  }
}

/**
 * The tokens of an inspection, as a listbox with one tab stop.
 *
 * Pointing at a token shows it, clicking it or moving to it with the keyboard selects it.
 * onShow: called with the position of the token to describe.
 */
export class TokenList {
  constructor(box, onShow) {
    this.box = box;
    this.onShow = onShow;
    this.elements = [];
    box.addEventListener("click", (event) => this.#select(positionOf(event.target), true));
    box.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse") this.#preview(positionOf(event.target));
    });
    box.addEventListener("pointerleave", () => this.#preview(this.selected));
    box.addEventListener("focusin", (event) => this.#select(positionOf(event.target), false));
    box.addEventListener("keydown", (event) => this.#move(event));
  }

  /** Show an inspection. prompt: the text at its start that was not generated. */
  draw(inspection, prompt) {
    const nPromptBytes = encoder.encode(prompt).length;
    let nBytes = 0;
    this.elements = inspection.texts.map((text, position) => {
      const bits = inspection.surprisal[position];
      const token = document.createElement("span");
      token.role = "option";
      token.tabIndex = -1;
      token.dataset.position = position;
      token.classList.add(levelOf(bits));
      const isSpecial = !text;
      token.classList.toggle("special", isSpecial);
      token.classList.toggle("prompt", !isSpecial && nBytes < nPromptBytes);
      token.append(...contentOf(isSpecial ? quoted(text) : running(text)));
      token.ariaLabel = labelOf(text, bits);
      token.ariaSelected = "false";
      if (!isSpecial) nBytes += byteLength(text);
      return token;
    });
    this.texts = inspection.texts;
    this.surprisal = inspection.surprisal;
    this.selected = this.shown = 0;
    this.box.hidden = false;
    this.box.replaceChildren(...this.elements);
    this.box.scrollTop = this.box.scrollHeight;
  }

  hide() {
    this.box.hidden = true;
    this.box.replaceChildren();
    this.elements = [];
  }

  /** Select a token. */
  select(position, { focus = false } = {}) {
    this.#select(position, focus);
  }

  /** Mark tokens with a class, instead of those that have it now. */
  mark(className, positions) {
    for (const token of this.box.querySelectorAll(`.${className}`)) {
      token.classList.remove(className);
    }
    for (const position of positions) this.elements[position]?.classList.add(className);
  }

  /** Add a description to the name that screen readers announce for a token. */
  describe(position, description) {
    const label = labelOf(this.texts[position], this.surprisal[position]);
    this.elements[position].ariaLabel = `${label}, ${description}`;
  }

  #select(position, focus) {
    const token = this.elements[position];
    if (!token) return;
    this.elements[this.selected].tabIndex = -1;
    token.tabIndex = 0;
    this.selected = position;
    this.#show(position);
    if (focus && document.activeElement !== token) token.focus();
  }

  #preview(position) {
    if (this.elements[position] && position !== this.shown) this.#show(position);
  }

  #show(position) {
    this.elements[this.shown].ariaSelected = "false";
    this.elements[position].ariaSelected = "true";
    this.shown = position;
    this.onShow(position);
  }

  #move(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.elements.length - 1;
    const moves = {
      ArrowLeft: () => this.selected - 1,
      ArrowRight: () => this.selected + 1,
      ArrowUp: () => this.#nearestInLine(-1),
      ArrowDown: () => this.#nearestInLine(1),
      Home: () => 0,
      End: () => last,
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.#select(Math.max(0, Math.min(last, moves[event.key]())), true);
  }

  /** Return the token of the line above (-1) or below (1) that is nearest to the selected one. */
  #nearestInLine(direction) {
    const start = firstLine(this.elements[this.selected]);
    let nearest = this.selected;
    let line = null;
    let distance = Infinity;
    for (let i = this.selected + direction; this.elements[i]; i += direction) {
      const place = firstLine(this.elements[i]);
      if ((place.top - start.top) * direction < place.height / 2) continue; // the same line
      line ??= place.top;
      if (Math.abs(place.top - line) > place.height / 2) break; // one line too far
      const away = Math.abs(place.left - start.left);
      if (away < distance) [nearest, distance] = [i, away];
    }
    return nearest;
  }
}

/** Return the rectangle of the first line of a token: line breaks start another one. */
function firstLine(token) {
  return token.getClientRects()[0] ?? token.getBoundingClientRect();
}

/** Return the nodes of a text, with a visible mark before each line break. */
function contentOf(text) {
  const [first, ...lines] = text.split("\n");
  const nodes = lines.flatMap((line) => {
    const mark = document.createElement("i");
    mark.className = "break";
    return [mark, `\n${line}`];
  });
  return [first, ...nodes];
}

function positionOf(element) {
  const token = element.closest?.("[data-position]");
  return token ? Number(token.dataset.position) : -1;
}

function labelOf(text, bits) {
  return `${quoted(text)}${bits === null ? "" : `, ${bitsText(bits)}`}`;
}
