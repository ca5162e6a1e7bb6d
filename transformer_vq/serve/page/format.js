/** How numbers and tokens are shown. */

const UNITS = ["bytes", "kB", "MB", "GB", "TB"];
const BYTE_TOKEN = /^bytes:((?:\\x[0-9a-f]{2})+)$/;
const encoder = new TextEncoder();

/** Return a number with separators and at most this many decimals. */
export function number(x, decimals = 0) {
  return x.toLocaleString("en", { maximumFractionDigits: decimals });
}

/** Return "1 token", "2 tokens". */
export function count(n, noun) {
  return `${number(n)} ${noun}${n === 1 ? "" : "s"}`;
}

/** Return a size with three digits: "2.15 MB". */
export function bytes(n) {
  let unit = 0;
  while (n >= 999.5 && unit < UNITS.length - 1) {
    n /= 1000;
    unit += 1;
  }
  return `${n.toLocaleString("en", { maximumSignificantDigits: 3 })} ${UNITS[unit]}`;
}

export function bits(x) {
  return `${x.toFixed(2)} bits`;
}

export function percent(share) {
  return `${(100 * share).toFixed(1)}%`;
}

/** Return the bytes of a token as hex digits if they are not text by themselves, else null. */
function hexBytes(text) {
  const found = BYTE_TOKEN.exec(text);
  return found && found[1].slice(2).split("\\x");
}

/** Return the number of UTF-8 bytes of a token. */
export function byteLength(text) {
  return hexBytes(text)?.length ?? encoder.encode(text).length;
}

/** Return the text of a token as part of a running text: control characters are visible. */
export function running(text) {
  const hex = hexBytes(text);
  if (hex) return hex.map((x) => `‹${x}›`).join("");
  const escape = (x) => `‹${x.charCodeAt(0).toString(16).padStart(2, "0")}›`;
  return text.replaceAll("\r\n", "\n").replace(/[\0-\x08\x0b-\x1f\x7f]/g, escape);
}

/** Return the text of a token by itself: spaces and line breaks are visible too. null: the start. */
export function quoted(text) {
  if (text === null) return "start of text";
  if (text === "") return "end of document";
  const marks = { " ": "␣", "\n": "↵", "\t": "⇥" };
  return `“${running(text).replace(/[ \n\t]/g, (x) => marks[x])}”`;
}
