/** The page: reads the form, streams text, then shows the view inside. */

import * as api from "./api.js";
import { Details } from "./details.js";
import { Documents } from "./documents.js";
import { bits as bitsText, number } from "./format.js";
import { MemoryCounter } from "./memory.js";
import { Progress } from "./progress.js";
import { drawLegend, StreamedText, TokenList } from "./tokens.js";

const DEMO_TOKENS = 80; // generated on the first visit
const MAX_INSPECTED = 4096; // tokens; the limit of /v1/inspect
const VISITED = "transformer-vq-visited";

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const streamed = new StreamedText(byId("stream"));
const list = new TokenList(byId("tokens"), (position) => details.show(position));
const details = new Details(list);
const documents = new Documents({ begin, end, fail, report, setStatus });
let model = null;
let memory = null;
let fullText = ""; // prompt and generated text
let work = null; // AbortController of the generation or upload in progress
let latest = null; // the same, also after it has ended

const isWide = matchMedia("(min-width: 48rem)").matches;
byId("options").open = isWide;
drawLegend(byId("legend"));
load();

/** Load the model and the list of documents; on the first visit, generate a short text. */
async function load() {
  setStatus("Loading the model…");
  byId("error").hidden = true;
  try {
    model = await api.getModel();
    await documents.load();
  } catch (error) {
    setStatus("");
    byId("model").textContent = "";
    report(error);
    return;
  }
  const size = new Intl.NumberFormat("en", { notation: "compact", compactDisplay: "long" });
  const vocabulary = `${number(model.vocab_size)} tokens in the vocabulary`;
  byId("model").textContent =
    `Model ${model.id}: ${size.format(model.parameters)} parameters, ${vocabulary}`;
  document.title = `${model.id} – Transformer-VQ`;
  memory = new MemoryCounter(model);
  setStatus("Ready.");
  if (isFirstVisit()) generate(DEMO_TOKENS);
}

function isFirstVisit() {
  try {
    if (localStorage.getItem(VISITED)) return false;
    localStorage.setItem(VISITED, "yes");
  } catch {
    // storage is blocked: every visit is the first one
  }
  return true;
}

/** Return the body of a completion for the form. */
function bodyOf(maxTokens) {
  const body = {
    model: model.id,
    prompt: prompt.value,
    max_tokens: maxTokens,
    temperature: byId("temperature").valueAsNumber,
    top_p: byId("top-p").valueAsNumber,
    logprobs: 0,
    stream_options: { include_usage: true },
  };
  if (byId("top-k").value) body.top_k = byId("top-k").valueAsNumber;
  if (byId("seed").value) body.seed = byId("seed").valueAsNumber;
  if (byId("stop-string").value) body.stop = byId("stop-string").value.replaceAll("\\n", "\n");
  if (documents.chosen) body.context = documents.chosen.id;
  return body;
}

/** Generate text for the form, then show the view inside. */
async function generate(maxTokens) {
  const run = begin("Prefilling the prompt…");
  const body = bodyOf(maxTokens);
  const progress = new Progress(documents.chosen?.tokens ?? 0);
  fullText = body.prompt;
  list.hide();
  details.clear();
  setNote("");
  byId("average").hidden = true;
  byId("continue").disabled = true;
  streamed.start(body.prompt);
  memory.update(progress.nTokens, progress.unit);
  let ending;
  try {
    for await (const chunk of api.complete(body, run.signal)) {
      progress.add(chunk);
      memory.update(progress.nTokens, progress.unit);
      const [choice] = chunk.choices;
      if (!choice) continue;
      if (progress.isFirst) setStatus("Generating…");
      fullText += choice.text;
      streamed.add(choice.text, choice.logprobs);
      byId("progress").hidden = false;
      byId("progress").textContent = progress.rate();
    }
    ending = progress.finish();
  } catch (error) {
    if (latest !== run) return; // another generation has started
    if (!api.isAbort(error)) {
      streamed.flush();
      byId("continue").disabled = progress.nNew === 0;
      fail(run, error);
      return;
    }
    ending = "Stopped.";
  }
  streamed.flush();
  byId("continue").disabled = fullText === "";
  end(run, `${ending} ${progress.summary()}`);
  if (fullText) await look(body, progress, run);
}

/** Inspect the text and show its tokens. body: the request that the text is a response to. */
async function look(body, progress, run) {
  try {
    const { text, inspection } = await inspectEnd(fullText, progress.nShown);
    if (latest !== run) return; // another generation has started
    const nCut = fullText.length - text.length;
    const shown = `Only the last ${number(text.length)} characters are shown`;
    const cut = `${shown}, inspected by themselves.`;
    const alone = "The document is not shown. This text is inspected by itself, without it.";
    setNote([nCut > 0 && cut, body.context && alone].filter(Boolean).join(" "));
    details.load(inspection, model.block_len);
    byId("stream").hidden = true;
    list.draw(inspection, body.prompt.slice(nCut), model.block_len);
    list.select(details.example());
    showAverage(inspection.surprisal);
  } catch (error) {
    report(error);
  }
}

/** Inspect a text, or its end if it is too long. nTokens: its length if that is known. */
async function inspectEnd(text, nTokens) {
  const share = nTokens > MAX_INSPECTED ? (0.9 * MAX_INSPECTED) / nTokens : 1;
  const lengths = [Math.floor(text.length * share), 3 * MAX_INSPECTED, MAX_INSPECTED / 4 - 1];
  for (const length of lengths) {
    const end = lastCharacters(text, length);
    try {
      return { text: end, inspection: await api.inspect(end) };
    } catch (error) {
      if (error.status !== 413 || length === lengths.at(-1)) throw error;
    }
  }
}

/** Return the end of a text, which does not start in the middle of a character. */
function lastCharacters(text, length) {
  const end = text.slice(Math.max(0, text.length - length));
  return /^[\udc00-\udfff]/.test(end) ? end.slice(1) : end;
}

function showAverage(surprisal) {
  const bits = surprisal.filter((x) => x !== null);
  if (!bits.length) return;
  const average = bits.reduce((sum, x) => sum + x, 0) / bits.length;
  byId("average").hidden = false;
  byId("average").textContent = `Average surprisal: ${bitsText(average)} per token.`;
}

/** Start work that Stop can end, instead of the work in progress; return its AbortController. */
function begin(status) {
  work?.abort();
  latest = work = new AbortController();
  byId("error").hidden = true;
  byId("stop").disabled = false;
  setStatus(status);
  return work;
}

/** End work, unless other work has started. */
function end(run, status) {
  if (work !== run) return;
  work = null;
  byId("progress").hidden = true;
  if (document.activeElement === byId("stop")) byId("generate").focus();
  byId("stop").disabled = true;
  setStatus(status);
}

/** End work because of an error, unless other work has started. */
function fail(run, error) {
  if (work !== run) return;
  end(run, api.isAbort(error) ? "Stopped." : "Failed.");
  if (!api.isAbort(error)) report(error);
}

function setStatus(text) {
  byId("status").textContent = text;
}

function setNote(text) {
  byId("note").textContent = text;
  byId("note").hidden = !text;
}

/** Show an error; a missing or wrong key shows the field for it. */
function report(error) {
  if (!(error instanceof api.APIError)) console.error(error);
  if (error.status === 401) {
    byId("key-form").hidden = false;
    const reason = api.hasKey() ? "The API key is wrong." : "This server needs an API key.";
    byId("key-hint").textContent = `${reason} It is kept until this tab is closed.`;
    byId("key").focus();
    return;
  }
  byId("error").textContent = error.message;
  byId("error").hidden = false;
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!isWide) byId("inside").scrollIntoView();
  if (model) generate(byId("max-tokens").valueAsNumber);
  else load();
});
byId("form").addEventListener("invalid", () => (byId("options").open = true), true);
byId("stop").addEventListener("click", () => work?.abort());
byId("continue").addEventListener("click", () => {
  prompt.value = fullText;
  byId("form").requestSubmit();
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  if (!/^[\x21-\x7e]+$/.test(key)) {
    byId("key-hint").textContent = "An API key has only ASCII characters and no spaces.";
    return;
  }
  api.setKey(key);
  byId("key").value = "";
  byId("key-form").hidden = true;
  prompt.focus();
  load();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") work?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    byId("form").requestSubmit();
  }
});
