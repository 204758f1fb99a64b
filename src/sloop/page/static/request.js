// The story of one request: where its time went, as bars against its deadline, and step by step.

import { useState } from "preact/hooks";
import { state } from "sloop/store";
import { ask, clock, Field, html, ms, OFFLINE, Problem, Table, useAnswer } from "sloop/words";

const SHOWN = 50;
const PARTS = [
  ["network_ms", "network", "--line-5"],
  ["edge_ms", "edge", "--line-4"],
  ["wait_ms", "queue", "--line-3"],
  ["service_ms", "service", "--line-1"],
  ["transport_ms", "transport", "--line-2"],
  ["lost_ms", "lost batches", "--bad"],
];

/** Bars of `parts` (`[ms, label, color]`) from `startMs` on, on an axis of `wholeMs`. */
function Bars({ parts, startMs, wholeMs, label }) {
  let at = startMs;
  const drawn = parts.filter(([length]) => length > 0).map(([length, name, paint]) => {
    const bar = html`<rect x=${(100 * at) / wholeMs} y="0" width=${Math.max((100 * length) / wholeMs, 0.2)} height="10"
      fill=${`var(${paint})`}><title>${name}: ${ms(length)}</title></rect>`;
    at += length;
    return bar;
  });
  const said = parts.filter(([length]) => length > 0).map(([length, name]) => `${name} ${ms(length)}`).join(", ");
  return html`<svg class="bars" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${`${label}: ${said}`}>${drawn}</svg>`;
}

function Story({ story }) {
  const total = story.total_ms ?? 0;
  const whole = Math.max(total, story.slo_ms, 0.001) * 1.02;
  const begun = story.steps.length ? story.steps[0].at_s : 0;
  const parts = PARTS.map(([key, name, paint]) => [story[key], name, paint]);
  const visits = story.visits.map((visit) => {
    const start = story.network_ms + 1000 * (visit.entered_s - begun);
    const bars = [[visit.wait_ms, "queue", "--line-3"], [visit.service_ms, "service", "--line-1"],
      [visit.transport_ms, "transport", "--line-2"], [visit.lost_ms, "lost batches", "--bad"]];
    return html`<div class="row"><span>${visit.stage}${visit.critical ? "" : " (beside)"}</span>
      <${Bars} parts=${bars} startMs=${start} wholeMs=${whole} label=${visit.stage} /></div>`;
  });
  const rows = story.steps.map((step) => [`${((step.at_s - begun) * 1000).toFixed(2)} ms`, step.what, step.why]);
  return html`<article>
    <h3>Request ${story.request} of ${story.application}: ${story.outcome}</h3>
    <p>${story.summary}</p>
    <div class="timeline">
      <div class="row"><span>whole</span><${Bars} parts=${parts} startMs=${0} wholeMs=${whole} label="whole" /></div>
      ${visits}
      <svg class="deadline" viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">
        <line x1=${(100 * story.slo_ms) / whole} x2=${(100 * story.slo_ms) / whole} y1="0" y2="10" /></svg>
    </div>
    <ul class="key">${PARTS.filter(([key]) => story[key] > 0).map(([key, name, paint]) =>
      html`<li><svg viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" fill=${`var(${paint})`} /></svg>${name} ${ms(story[key])}</li>`)}
      <li>deadline ${ms(story.slo_ms)}</li></ul>
    <${Table} label="steps" head=${["after", "what", "why"]} rows=${rows} numbers=${[0]} />
    ${story.missing?.length ? html`<p class="soft">${story.missing.join("; ")}</p>` : null}
  </article>`;
}

export function Request() {
  const [name, setName] = useState("");
  const [shown, setShown] = useState(SHOWN);
  const { answer: story, error, isAsking, put } = useAnswer();
  const find = (wanted) => {
    setName(wanted);
    put(() => ask("/ask", JSON.stringify({ kind: "request", name: wanted })));
  };
  const missed = [...state.picture.missed].reverse();
  const rows = missed.slice(0, shown).map((request) => [
    clock(request.at_s),
    html`<button class="link" disabled=${!state.isLive} onClick=${() => find(String(request.id))}>${request.id}</button>`,
    request.name, request.application, request.outcome, ms(request.ms), ms(request.slo_ms), request.stage, request.why,
  ]);
  return html`
    <form class="ask" onSubmit=${(event) => { event.preventDefault(); if (name) find(name); }}>
      <${Field} label="Number, or the client's x-request-id, id or trace">
        <input value=${name} onInput=${(event) => setName(event.target.value)} autocomplete="off" /></${Field}>
      <button disabled=${!state.isLive || isAsking || !name}>${isAsking ? "Reading the log …" : "Tell its story"}</button>
    </form>
    ${state.isLive ? null : html`<p class="soft">${OFFLINE}</p>`}
    <${Problem} error=${error} />
    ${story && !isAsking && !error ? html`<${Story} story=${story} />` : null}
    <h2>Requests that were not served in time</h2>
    ${rows.length ? html`<${Table} label="missed requests" rows=${rows} numbers=${[1, 5, 6]}
      head=${["when", "request", "client's name", "application", "end", "took", "deadline", "stage", "why"]} />`
      : html`<p>There are none.</p>`}
    ${missed.length > shown ? html`<button onClick=${() => setShown(shown + SHOWN)}>Show older ones</button>` : null}`;
}
