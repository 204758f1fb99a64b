// Numbers, instants and small pieces of text, and the tags that all views use.

import { h } from "preact";
import { useState } from "preact/hooks";
import htm from "htm";
import { state } from "sloop/store";

export const html = htm.bind(h);

/** A number with at most four significant digits; a dash for none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return "∞";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(digits)));
}

/** A share in per cent. Rounded down, so that 100 % means all. */
export function percent(share) {
  if (share === null || share === undefined) return "–";
  return `${Number((Math.floor(share * 1e4) / 100).toFixed(2))} %`;
}

export const ms = (value) => (value === null || value === undefined ? "–" : `${number(value)} ms`);
export const usd = (value) => (value ? `${number(value)} $/h` : "no price");
export const counted = (count, noun) => `${number(count)} ${noun}${count === 1 ? "" : "s"}`;

/** A Unix time as time of day; a simulated run, which has no date, begins at 0:00. */
export function timeOfDay(unixS) {
  const zone = state.picture.zero_unix_s ? {} : { timeZone: "UTC" };
  return new Date(unixS * 1000).toLocaleTimeString("en-GB", zone);
}

/** The time of day of an instant of the run. */
export const clock = (atS) => timeOfDay(state.picture.zero_unix_s + atS);

/** How long ago an instant of the run was. */
export function ago(atS) {
  const seconds = Math.max(0, state.picture.now_s - atS);
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 2)} h`;
}

/** Ask the server of the page; its answer, or an Error with what it says. */
export async function ask(path, body) {
  let answer;
  try {
    const what = body === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body };
    answer = await fetch(path, what);
  } catch {
    throw new Error("the page's process does not answer; is the server still there?");
  }
  const text = await answer.text();
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    if (answer.ok) return text;
  }
  if (!answer.ok || value?.error) throw new Error([value?.error ?? text, value?.help].filter(Boolean).join(" – "));
  return value;
}

/** An answer that is asked for: `put(question)` asks, and the last answer stays until the next one has come. */
export function useAnswer() {
  const [known, set] = useState({ answer: null, error: null, isAsking: false });
  const put = async (question) => {
    set((before) => ({ ...before, error: null, isAsking: true }));
    try {
      const answer = await question();
      set({ answer, error: null, isAsking: false });
    } catch (error) {
      set((before) => ({ ...before, error, isAsking: false }));
    }
  };
  return { ...known, put };
}

/** What cannot be done without a server, in a report. */
export const OFFLINE = "This is a report of a run. Open the page of a server that runs to ask this.";

/** A table: `head` are texts, `rows` lists of cells; columns in `numbers` are aligned to the right. */
export function Table({ head, rows, numbers = [], label }) {
  const kind = (place) => (numbers.includes(place) ? "n" : "");
  return html`<div class="scroll" tabindex="0" role="region" aria-label=${label}>
    <table>
      <thead><tr>${head.map((text, place) => html`<th scope="col" class=${kind(place)}>${text}</th>`)}</tr></thead>
      <tbody>${rows.map((cells) => html`<tr>${cells.map((cell, place) => html`<td class=${kind(place)}>${cell}</td>`)}</tr>`)}</tbody>
    </table>
  </div>`;
}

/** A text field or number with its label. */
export function Field({ label, children }) {
  return html`<label class="field"><span>${label}</span>${children}</label>`;
}

/** What went wrong, read out when it comes. */
export function Problem({ error }) {
  return error ? html`<p class="problem" role="alert">${error.message ?? error}</p>` : null;
}
