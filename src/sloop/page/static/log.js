// The last lines that the server has written to stderr, by level and text.

import { useState } from "preact/hooks";
import { state } from "sloop/store";
import { Field, html, OFFLINE } from "sloop/words";

const LEVELS = ["all", "WARNING", "ERROR"];
const RANKS = { DEBUG: 0, INFO: 0, WARNING: 1, ERROR: 2, CRITICAL: 2 };
const LINE = /^(\S+ \S+) (\S+) (DEBUG|INFO|WARNING|ERROR|CRITICAL) /;

/** Each line with its level; what has none, such as a traceback, has that of the line before. */
function withLevels(lines) {
  let level = "INFO";
  return lines.map((text) => {
    level = LINE.exec(text)?.[3] ?? level;
    return { level, text };
  });
}

export function Log() {
  const [least, setLeast] = useState("all");
  const [wanted, setWanted] = useState("");
  if (!state.isLive) return html`<p class="soft">${OFFLINE}</p>`;
  const rank = LEVELS.indexOf(least);
  const text = wanted.toLowerCase();
  const shown = withLevels(state.lines).filter((line) => RANKS[line.level] >= rank && line.text.toLowerCase().includes(text));
  return html`
    <div class="ask">
      <${Field} label="Level"><select value=${least} onChange=${(event) => setLeast(event.target.value)}>${LEVELS.map((name) => html`<option>${name}</option>`)}</select></${Field}>
      <${Field} label="Lines with"><input value=${wanted} onInput=${(event) => setWanted(event.target.value)} autocomplete="off" /></${Field}>
    </div>
    <pre class="lines" tabindex="0" aria-label="lines of the log">${shown.map((line) => html`<span class=${line.level}>${line.text}\n</span>`)}</pre>
    ${shown.length ? null : html`<p>There are no such lines since the page began.</p>`}`;
}
