/** The page: reads the form, streams text, then shows its tokens. */

import * as api from "./api.js";
import { Details } from "./details.js";
import { Documents } from "./documents.js";
import { bits as bitsText, number, percent } from "./format.js";
import { MemoryCounter } from "./memory.js";
import { Progress } from "./progress.js";
import { drawLegend, StreamedText, TokenList } from "./tokens.js";

const MAX_INSPECTED = 4096; // tokens; the limit of /v1/inspect
const PREVIEW = 3000; // characters of a document that are shown while it is prefilled

const byId = (id) => document.getElementById(id);
const prompt = byId("prompt");
const streamed = new StreamedText(byId("stream"));
const list = new TokenList(byId("tokens"), (position) => details.show(position));
const details = new Details(list);
const documents = new Documents({
  begin,
  end,
  fail,
  report,
  setStatus,
  inspectPrompt,
  showCounts: (...counts) => memory.update(...counts),
  showStart,
});
let model = null;
let memory = null;
let fullText = ""; // prompt and generated text
let work = null; // AbortController of the generation or upload in progress
let latest = null; // the same, also after it has ended
let inspecting = null; // AbortController of the inspection in progress

const isWide = matchMedia("(min-width: 48rem)").matches;
byId("options").open = isWide;
drawLegend(byId("legend"));
load();

/** Load the model, the list of documents, and the example document on the first visit. */
async function load() {
  setStatus("Loading the model…");
  byId("error").hidden = true;
  try {
    model = await api.getModel();
    memory = new MemoryCounter(model);
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
  setStatus("Ready.");
  if (documents.hasExample || documents.isFirstVisit) documents.loadExample();
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

/** Generate text for the form, then show its tokens. */
async function generate(maxTokens) {
  const run = begin("Prefilling the prompt…");
  const body = bodyOf(maxTokens);
  const { chosen } = documents;
  const progress = new Progress(chosen?.tokens ?? 0);
  fullText = body.prompt;
  list.hide();
  details.clear();
  setNote("");
  byId("average").hidden = true;
  byId("continue").disabled = true;
  streamed.start(body.prompt);
  memory.update(progress.nContext);
  let ending;
  try {
    for await (const chunk of api.complete(body, run.signal)) {
      progress.add(chunk);
      memory.update(progress.nContext, progress.nShown ?? progress.nNew, progress.unit);
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
  if (fullText) await look(body.prompt, chosen, progress.nShown);
}

/** Show the tokens of the prompt; nothing is generated. */
async function inspectPrompt() {
  fullText = prompt.value;
  list.hide();
  streamed.start(fullText);
  await look(fullText, documents.chosen);
  byId("tokens").scrollTop = 0;
}

/** Show the start of a document that is being prefilled. */
function showStart(text) {
  list.hide();
  details.clear();
  byId("average").hidden = true;
  byId("stream").hidden = false;
  byId("stream").textContent = `${text.slice(0, PREVIEW)}…`;
  setNote("The document starts like this:");
}

/**
 * Inspect the text and show its tokens.
 *
 * start: the part of it that was not generated; chosen: the document that it continues, if any;
 * nTokens: its length if that is known.
 */
async function look(start, chosen, nTokens) {
  inspecting = new AbortController();
  try {
    const { text, inspection } = await inspectEnd(fullText, chosen, inspecting.signal, nTokens);
    const nCut = fullText.length - text.length;
    const cut = `Only the last ${number(text.length)} characters are shown, inspected by themselves.`;
    const follows = `This text follows the ${number(inspection.position)} tokens of the document.`;
    setNote(nCut > 0 ? cut : chosen ? follows : "");
    if (!nCut) memory.update(inspection.position, inspection.tokens.length);
    details.load(inspection, model.block_len);
    byId("stream").hidden = true;
    list.draw(inspection, start.slice(nCut));
    list.select(details.example());
    showAverages(inspection);
  } catch (error) {
    if (!api.isAbort(error)) report(error); // aborted: another generation has started
  }
}

/** Inspect a text after a document, or only the end of the text if it is too long. */
async function inspectEnd(text, chosen, signal, nTokens) {
  const share = nTokens > MAX_INSPECTED ? (0.9 * MAX_INSPECTED) / nTokens : 1;
  const lengths = [Math.floor(text.length * share), 3 * MAX_INSPECTED, MAX_INSPECTED / 4 - 1];
  for (const length of lengths) {
    const end = lastCharacters(text, length);
    try {
      const context = end === text ? chosen?.id : undefined;
      return { text: end, inspection: await api.inspect(end, context, signal) };
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

function showAverages({ surprisal, layers }) {
  const bits = surprisal.filter((x) => x !== null);
  if (!bits.length) return;
  const average = (values) => values.reduce((sum, x) => sum + x, 0) / values.length;
  const toCache = average(layers.flatMap((layer) => layer.cache.flat()));
  byId("average").hidden = false;
  byId("average").textContent =
    `Average surprisal: ${bitsText(average(bits))} per token. ` +
    `Average attention to the cache: ${percent(toCache)}.`;
}

/** Start work that Stop can end, instead of the work in progress; return its AbortController. */
function begin(status) {
  work?.abort();
  inspecting?.abort();
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
  if (byId("generate").disabled) return; // a document is being prefilled
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
