/** Calls of the API: requests with the key, errors as sentences, and streams of completions. */

const KEY = "transformer-vq-api-key";
let keyInMemory = ""; // where the browser blocks sessionStorage

/** Store the API key until the tab is closed. */
export function setKey(key) {
  keyInMemory = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // kept in memory
  }
}

function getKey() {
  try {
    return sessionStorage.getItem(KEY) ?? keyInMemory;
  } catch {
    return keyInMemory;
  }
}

/** Whether the user has given a key. */
export const hasKey = () => Boolean(getKey());

/** A request that failed. status: the HTTP status, or 0 without a response. */
export class APIError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Whether an error is the result of a request that the page stopped. */
export const isAbort = (error) => error.name === "AbortError";

/**
 * Send a request and return the response; throw APIError if it failed.
 *
 * body: a value for JSON, or a Blob, which is sent as plain text.
 */
async function send(method, path, body, signal) {
  const headers = {};
  const key = getKey();
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body instanceof Blob) {
    headers["Content-Type"] = "text/plain; charset=utf-8";
  } else if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    body = JSON.stringify(body);
  }
  let response;
  try {
    response = await fetch(path, { method, headers, body, signal });
  } catch (error) {
    if (isAbort(error)) throw error;
    throw new APIError("The server cannot be reached; check that tvq serve is running.", 0);
  }
  if (!response.ok) throw new APIError(await messageOf(response), response.status);
  return response;
}

async function messageOf(response) {
  try {
    const { error } = await response.json();
    return sentence(error.message);
  } catch {
    return `The server responded with status ${response.status}.`;
  }
}

/** Start a message of the API like a sentence, unless it starts with the name of a field. */
function sentence(message) {
  return /^[a-z_]+:/.test(message) ? message : message.charAt(0).toUpperCase() + message.slice(1);
}

/** Return the model of the server. */
export async function getModel() {
  const { data } = await (await send("GET", "v1/models")).json();
  return data[0];
}

/** Return all stored documents. */
export async function listContexts() {
  return (await (await send("GET", "v1/contexts")).json()).data;
}

/** Prefill a document and return its entry. */
export async function addContext(file, signal) {
  const path = `v1/contexts?name=${encodeURIComponent(file.name.slice(0, 200))}`;
  return (await send("POST", path, file, signal)).json();
}

export async function deleteContext(id) {
  await send("DELETE", `v1/contexts/${encodeURIComponent(id)}`);
}

/** Return tokens, surprisal, codes and attention of a text. context: id of what it continues. */
export async function inspect(text, context, signal) {
  const inspection = await (await send("POST", "v1/inspect", { text, context }, signal)).json();
  if (!context) inspection.texts[0] = null; // not part of the text: it marks the start
  return inspection;
}

/** Return how much of all documents and prompts is prefilled: { tokens, total }. */
export async function getPrefill() {
  return (await (await send("GET", "health")).json()).prefill;
}

/** Return the text of the example document; its last paragraph is a prompt that continues it. */
export async function getExample() {
  const text = await (await send("GET", "page/document.txt")).text();
  const end = text.lastIndexOf("\n\n") + 2;
  return { text: text.slice(0, end), prompt: text.slice(end) };
}

/** Yield the objects of a streamed completion. */
export async function* complete(body, signal) {
  const response = await send("POST", "v1/completions", { ...body, stream: true }, signal);
  const decoder = new TextDecoder();
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const part = await reader.read();
      if (part.done) throw new APIError("The server ended the text early.", 0);
      const events = (rest + decoder.decode(part.value, { stream: true })).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const value = JSON.parse(data);
        if (value.error) throw new APIError(sentence(value.error.message), 200);
        yield value;
      }
    }
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;
    throw new APIError("The connection to the server was lost.", 0); // from reader.read()
  } finally {
    reader.cancel().catch(() => {}); // ends the request if the text is not complete
  }
}
