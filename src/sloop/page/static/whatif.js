// What would have become of this server's own requests under other systems, by `sloop simulate` on its log.

import { useState } from "preact/hooks";
import { state } from "sloop/store";
import { ask, clock, Field, html, ms, number, OFFLINE, percent, Problem, Table, useAnswer } from "sloop/words";

const SPANS = { "1 minute": 60, "10 minutes": 600, "1 hour": 3600 };

/** The systems in `A, {name: B, key: value}`: names, or what is in braces with values as JSON where they can be. */
export function systemsIn(text) {
  return (text.match(/\{[^}]*\}|[^,{}\s]+/g) ?? []).map((item) => {
    if (!item.startsWith("{")) return item;
    const pairs = item.slice(1, -1).split(",").map((pair) => pair.split(/:(.*)/s).slice(0, 2).map((part) => (part ?? "").trim()));
    return Object.fromEntries(pairs.filter(([key]) => key).map(([key, value]) => {
      try {
        return [key, JSON.parse(value)];
      } catch {
        return [key, value];
      }
    }));
  });
}

function labelOf(run) {
  const pairs = Object.entries(run.parameters).map(([key, value]) => `${key} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  return pairs.length ? `${run.label} (${pairs.join(", ")})` : run.label;
}

function between(low, high, show) {
  return low === null || low === undefined ? "" : `${show(low)} to ${show(high)}`;
}

function Answer({ answer, command }) {
  const total = (key) => answer.happened.reduce((sum, row) => sum + row[key], 0);
  const ended = ["served", "late", "dropped", "rejected", "failed"].reduce((sum, key) => sum + total(key), 0);
  const one = answer.happened.length === 1 ? answer.happened[0] : null;
  const happened = ["happened", percent(ended ? total("served") / ended : null), "", ms(one?.p50_ms), ms(one?.p99_ms), "",
    total("late"), total("dropped"), total("rejected"), total("failed"), "", "", ""];
  const rows = answer.runs.map((run, place) => {
    const name = place ? labelOf(run) : `${run.label}, simulated as it ran`;
    if (run.error) return [name, html`<b class="bad">cannot run</b>`, ...Array(11).fill("")];
    const isSaturated = run.open > 0 || run.dropped + run.rejected > run.requests / 2;
    return [name, percent(run.attainment), between(run.attainment_low, run.attainment_high, percent), ms(run.p50_ms), ms(run.p99_ms),
      between(run.p99_ms_low, run.p99_ms_high, ms), run.late, run.dropped, run.rejected, run.failed, number(run.core_seconds),
      run.usd ? `${number(run.usd)} $` : "", isSaturated ? html`<b class="bad">saturated</b>` : ""];
  });
  const apart = answer.runs.some((run) => run.applications?.length);
  return html`<article>
    <p>${number(total("requests"))} requests since ${clock(answer.from_s)}. Compare the first two rows first: their difference is the error of the simulation.</p>
    <${Table} label="what if" rows=${[happened, ...rows]} numbers=${[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]}
      head=${["", "in time", "range", "p50", "p99", "range", "late", "dropped", "rejected", "failed", "core-seconds", "cost", ""]} />
    ${answer.runs.filter((run) => run.error).map((run) => html`<p class="problem">${labelOf(run)}: ${run.error}</p>`)}
    ${apart ? answer.runs.filter((run) => run.applications?.length).map((run, place) => html`<h3>${place ? labelOf(run) : run.label}</h3>
      <${Table} label=${run.label} rows=${run.applications.map((row) => [row.name, percent(row.attainment), ms(row.p50_ms), ms(row.p99_ms), row.dropped, number(row.core_seconds)])}
        head=${["application", "in time", "p50", "p99", "dropped", "core-seconds"]} numbers=${[1, 2, 3, 4, 5]} />`) : null}
    <p>The same as a command: <code>${command}</code></p>
  </article>`;
}

export function WhatIf() {
  const [span, setSpan] = useState("10 minutes");
  const [text, setText] = useState("static, elastic");
  const { answer, error, isAsking, put } = useAnswer();
  const lastS = SPANS[span];
  const command = `sloop simulate ${state.picture.log ?? "LOG"} --last-s ${lastS} --system '${text}'`;
  const submit = (event) => {
    event.preventDefault();
    const question = { kind: "what-if", last_s: lastS, systems: systemsIn(text) };
    put(async () => ({ answer: await ask("/ask", JSON.stringify(question)), command }));
  };
  return html`
    <form class="ask" onSubmit=${submit}>
      <${Field} label="The requests of the last"><select value=${span} onChange=${(event) => setSpan(event.target.value)}>
        ${Object.keys(SPANS).map((name) => html`<option>${name}</option>`)}</select></${Field}>
      <${Field} label="Systems, such as: hpa, {name: sponge, margin: 0.9}"><input size="40" value=${text} onInput=${(event) => setText(event.target.value)} autocomplete="off" /></${Field}>
      <button disabled=${!state.isLive || isAsking}>${isAsking ? "Simulating …" : "What if?"}</button>
    </form>
    ${state.isLive ? null : html`<p class="soft">${OFFLINE}</p>`}
    <${Problem} error=${error} />
    ${answer ? html`<${Answer} ...${answer} />` : null}`;
}
