// What steady rates would need, by `sloop plan`: replicas, cores, price, and what binds.

import { useState } from "preact/hooks";
import { recent, state } from "sloop/store";
import { ask, counted, Field, html, ms, number, OFFLINE, Problem, Table, usd, useAnswer } from "sloop/words";

const PLACEMENT = ["application", "stage", "variant", "node", "device", "replicas", "cores", "batch"];

function startRates() {
  const rates = {};
  for (const name of Object.keys(state.picture.applications)) {
    rates[name] = Math.max(1, Math.round(recent(name, 60).arrivals / 60));
  }
  return rates;
}

function Answer({ plan }) {
  const rows = plan.stages.map((stage) => [stage.application, stage.stage, stage.variant, stage.replicas, stage.batch,
    number(stage.cores), ms(stage.predicted_ms), stage.binds, stage.one_more]);
  const places = plan.placements.map((place) => PLACEMENT.map((name) => place[name] ?? ""));
  return html`<article>
    <p class="glance ${plan.feasible ? "good" : "bad"}" role="status">${plan.system}: ${plan.feasible ? "feasible" : "not feasible"}, with ${counted(plan.cores, "core")}${plan.usd_per_h ? `, ${usd(plan.usd_per_h)}` : ""}${plan.applications.length === 1 ? `, predicted P99 ${ms(plan.predicted_ms)}` : ""}</p>
    <p>${plan.why}</p>
    ${plan.one_more ? html`<p><b>One more request per second:</b> ${plan.one_more.summary}</p>` : null}
    ${plan.shortfalls.map((one) => html`<p class="problem">${one.application ? `${one.application}: ` : ""}${one.why}</p>`)}
    <${Table} label="stages" rows=${rows} numbers=${[3, 4, 5, 6]}
      head=${["application", "stage", "variant", "replicas", "batch", "cores", "predicted P99", "what binds", "one more request/s needs"]} />
    ${places.length ? html`<h3>Where they are placed</h3><${Table} label="placement" rows=${places} numbers=${[5, 6, 7]} head=${PLACEMENT} />` : null}
    ${plan.notes.length ? html`<ul>${plan.notes.map((note) => html`<li class="soft">${note}</li>`)}</ul>` : null}
  </article>`;
}

export function Plan() {
  const [rates, setRates] = useState(startRates);
  const [system, setSystem] = useState("");
  const { answer: plan, error, isAsking, put } = useAnswer();
  const submit = (event) => {
    event.preventDefault();
    put(() => ask("/ask", JSON.stringify({ kind: "plan", rates_rps: rates, system })));
  };
  const set = (name, value) => setRates({ ...rates, [name]: Math.max(0, Number(value) || 0) });
  return html`
    <form class="ask" onSubmit=${submit}>
      ${Object.entries(rates).map(([name, rate]) => html`<div class="field"><span id=${`rate-${name}`}>${name}, requests/s</span>
        <input type="range" min="0" max=${Math.max(1000, 2 * rate)} value=${rate} aria-labelledby=${`rate-${name}`} onInput=${(event) => set(name, event.target.value)} />
        <input type="number" min="0" step="any" value=${rate} aria-labelledby=${`rate-${name}`} onInput=${(event) => set(name, event.target.value)} /></div>`)}
      <${Field} label="System (empty: as it runs)"><input value=${system} onInput=${(event) => setSystem(event.target.value.trim())} autocomplete="off" /></${Field}>
      <button disabled=${!state.isLive || isAsking}>${isAsking ? "Planning …" : "What would this need?"}</button>
    </form>
    ${state.isLive ? null : html`<p class="soft">${OFFLINE}</p>`}
    <${Problem} error=${error} />
    ${plan ? html`<${Answer} plan=${plan} />` : null}`;
}
