// What was decided, and why, with what happened afterwards.

import { useState } from "preact/hooks";
import { attainment, columns, state } from "sloop/store";
import { clock, html, ms, percent } from "sloop/words";

const SHOWN = 100;

/** What became of the requests of an application from a decision to the next one, at most five minutes. */
function afterwards(decision, next) {
  const series = state.picture.series[decision.application];
  if (!series) return "";
  const until = Math.min(next ?? Infinity, decision.at_s + 300);
  const count = columns("counts");
  const level = columns("levels");
  const sums = { served: 0, late: 0, dropped: 0, rejected: 0, failed: 0 };
  for (const row of series.counts.values()) {
    if (row[0] >= decision.at_s && row[0] < until) {
      for (const name of Object.keys(sums)) sums[name] += row[count[name]];
    }
  }
  const share = attainment(sums);
  if (share === null) return "";
  const p99 = series.levels
    .filter((row) => row[0] >= decision.at_s && row[0] < until)
    .map((row) => row[level.p99_ms])
    .filter((value) => value !== null);
  const worst = p99.length ? `, p99 up to ${ms(Math.max(...p99))}` : "";
  return `then: ${percent(share)} in time${worst}`;
}

/** Why, line by line: what an overseer has compared has a line for each system. */
function reasons({ kind, why }) {
  return kind === "overseer" ? why.replace(": ", "; ").split("; ") : [why];
}

function Decision({ decision, next }) {
  return html`<li class="decision ${decision.feasible === false ? "bad" : ""}">
    <time>${clock(decision.at_s)}</time>
    <span class="kind">${decision.kind}</span>
    ${decision.application ? html`<b>${decision.application}</b>` : null}
    <span>${decision.what}</span>
    ${decision.change ? html`<div class="change">${decision.change}</div>` : null}
    ${reasons(decision).map((line, place) => html`<div class=${decision.kind === "overseer" && !place ? "" : "soft"}>${line}</div>`)}
    ${decision.kind === "plan" ? html`<div>${afterwards(decision, next)}</div>` : null}
  </li>`;
}

export function Decisions() {
  const [application, setApplication] = useState("");
  const [kind, setKind] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const all = state.picture.decisions;
  const kinds = [...new Set(all.map((decision) => decision.kind))].sort();
  const names = [...new Set(all.map((decision) => decision.application))].filter(Boolean).sort();
  const wanted = all.filter((one) => (!application || one.application === application) && (!kind || one.kind === kind));
  const nextOf = new Map();
  const later = {};
  for (const decision of [...all].reverse()) {
    nextOf.set(decision, later[decision.application]);
    if (decision.kind === "plan") later[decision.application] = decision.at_s;
  }
  return html`
    <div class="filters">
      <label>Application <select value=${application} onChange=${(event) => setApplication(event.target.value)}>
        <option value="">all</option>${names.map((name) => html`<option>${name}</option>`)}</select></label>
      <label>Kind <select value=${kind} onChange=${(event) => setKind(event.target.value)}>
        <option value="">all</option>${kinds.map((name) => html`<option>${name}</option>`)}</select></label>
    </div>
    <ol class="decisions" reversed>${wanted.slice(-shown).reverse().map((decision) =>
      html`<${Decision} key=${JSON.stringify(decision)} decision=${decision} next=${nextOf.get(decision)} />`)}</ol>
    ${wanted.length > shown ? html`<button onClick=${() => setShown(shown + SHOWN)}>Show older decisions</button>` : null}
    ${wanted.length ? null : html`<p>Nothing has been decided.</p>`}`;
}
