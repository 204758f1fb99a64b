// How the applications do: one line says whether all is well, a table compares them, charts and replicas show one.

import { useState } from "preact/hooks";
import { Chart } from "sloop/chart";
import { attainment, columns, levels, mostOf, recent, state, verdict } from "sloop/store";
import { ago, clock, counted, html, ms, number, percent, Table, usd } from "sloop/words";

const MEANING = {
  good: "in time",
  late: "misses its target",
  down: "no replica is ready",
  quiet: "no requests",
};
const SPANS = { "5 min": 300, "1 h": 3600, "24 h": 86400 };

/** One sentence for a glance. */
export function Glance() {
  const picture = state.picture;
  const names = Object.keys(picture.applications);
  const bad = names.filter((name) => ["late", "down"].includes(verdict(name)));
  const said = bad.map((name) => {
    if (verdict(name) === "down") return `${name}: no replica is ready`;
    return `${name}: ${percent(attainment(recent(name, 60)))} in time in the last minute, target ${percent(picture.target)}`;
  });
  if (picture.draining) said.unshift("the server is shutting down");
  const kind = said.length ? "bad" : "good";
  const all = names.length === 1 ? `${names[0]} keeps its target` : `all ${counted(names.length, "application")} keep their targets`;
  return html`<p class="glance ${kind}" role="status">${said.length ? said.join("; ") : `All is well: ${all}.`}</p>`;
}

function budget(name) {
  const share = attainment(recent(name, 3600));
  return share === null ? "–" : `${number((100 * (1 - share)) / (1 - state.picture.target))} %`;
}

function Overview({ chosen, choose }) {
  const head = ["application", "state", "requests/s", "in time, 1 min", "1 h", "p50", "p99", "deadline", "waiting",
    "replicas", "cores", "cost", "budget burnt, 1 h"];
  const rows = Object.values(state.picture.applications).map((application) => {
    const { name } = application;
    const last = recent(name, 60);
    const level = levels(name);
    const kind = verdict(name);
    const planned = application.versions.reduce((sum, version) => sum + (version.plan?.replicas ?? 0), 0);
    return [
      html`<button class="link" aria-pressed=${name === chosen} onClick=${() => choose(name)}>${name}</button>`,
      html`<span class="state ${kind}">${MEANING[kind]}</span>`,
      number(recent(name, 10).arrivals / 10),
      percent(attainment(last)),
      percent(attainment(recent(name, 3600))),
      ms(mostOf(name, "p50_ms", 10)),
      ms(mostOf(name, "p99_ms", 60)),
      ms(application.slo_ms),
      number(level.waiting),
      `${level.ready ?? 0} of ${planned}`,
      number(level.cores),
      usd(application.usd_per_h),
      budget(name),
    ];
  });
  return html`<${Table} label="applications" head=${head} rows=${rows} numbers=${[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]} />`;
}

/** The rows of a span: seconds, or minutes if it is long. The newest seconds are not whole yet. */
function rowsOf(series, span) {
  const from = state.picture.now_s - span;
  const until = state.picture.now_s - (state.isLive ? 3 : 0);
  const minutes = span > 3600;
  const counts = minutes ? series.minute_counts : [...series.counts.values()];
  const level = minutes ? series.minute_levels : series.levels;
  const step = minutes ? 60 : 1;
  return { counts: counts.filter((row) => row[0] >= from && row[0] < until), levels: level.filter((row) => row[0] >= from), step };
}

function Charts({ application, span }) {
  const series = state.picture.series[application.name];
  if (!series) return html`<p>There have been no requests yet.</p>`;
  const { counts, levels: rows, step } = rowsOf(series, span);
  const count = columns("counts");
  const level = columns("levels");
  const rate = (name) => counts.map((row) => row[count[name]] / step);
  const of = (name) => rows.map((row) => row[level[name]]);
  const missed = counts.map((row) => ["late", "dropped", "rejected", "failed"].reduce((sum, name) => sum + row[count[name]], 0) / step);
  const at = rows.map((row) => row[0]);
  const deadline = { label: "deadline", color: "--bad", dash: true, values: rows.map(() => application.slo_ms) };
  return html`<div class="charts">
    <figure><figcaption>Requests per second</figcaption>
      <${Chart} times=${counts.map((row) => row[0])} summary=${`requests per second of ${application.name} over time`}
        lines=${[{ label: "came", values: rate("arrivals") }, { label: "in time", values: rate("served") },
          { label: "not in time", color: "--bad", values: missed }]} /></figure>
    <figure><figcaption>Latency, ms</figcaption>
      <${Chart} times=${at} summary=${`latency of ${application.name} over time, and its deadline`}
        lines=${[{ label: "p50", values: of("p50_ms") }, { label: "p99", values: of("p99_ms") }, ...(application.slo_ms ? [deadline] : [])]} /></figure>
    <figure><figcaption>Replicas, cores and waiting requests</figcaption>
      <${Chart} times=${at} summary=${`replicas, cores and waiting requests of ${application.name} over time`}
        lines=${["ready", "starting", "cores", "waiting"].map((name) => ({ label: name, values: of(name) }))} /></figure>
  </div>`;
}

function Version({ version, only }) {
  const share = version.share < 1 ? `, ${percent(version.share)} of the requests` : "";
  const head = ["stage", "replica", "state", "variant", "on", "node", "rows now", "since"];
  const rows = version.stages.flatMap((stage) =>
    stage.replicas.map((replica) => [
      stage.name,
      replica.id,
      html`<span class="state ${replica.life === "ready" ? "good" : "quiet"}">${[replica.life, replica.step].filter(Boolean).join(": ")}</span>`,
      [replica.variant, replica.form === "alone" ? "" : `(${replica.form})`].filter(Boolean).join(" "),
      replica.wanted !== replica.cores ? `${replica.slot}, ordered ${number(replica.wanted)}` : replica.slot,
      replica.node || "–",
      `${replica.running} of ${stage.batch_max}${replica.size ? `, of sizes up to ${replica.size}` : ""}`,
      `${ago(replica.since_s)} ago`,
    ]));
  return html`<section>
    ${only ? null : html`<h3>Version ${version.version}: ${version.state}${share}</h3>`}
    ${version.system ? html`<p>System ${version.system}.</p>` : null}
    ${version.why ? html`<p>${version.why}</p>` : null}
    ${version.plan ? html`<p><b>Plan since ${clock(version.plan.since_s)}:</b> ${version.plan.text}. ${version.plan.feasible ? "" : html`<b class="bad">It has less than keeping every deadline needs.</b> `}<span class="soft">${version.plan.why}</span></p>` : html`<p>There is no plan yet.</p>`}
    <${Table} label="replicas" head=${head} rows=${rows} numbers=${[1]} />
    ${version.stages.filter((stage) => stage.padding).map((stage) =>
      html`<p class="soft">${percent(stage.padding)} of what ${stage.name} has computed was padding.</p>`)}
  </section>`;
}

/** What other systems would have of an application now, beside what it has. */
function Shadows({ name }) {
  if (!Object.keys(state.shadows).length) return null;
  const level = levels(name);
  const plan = state.picture.applications[name].versions[0].plan;
  const itself = [`${state.picture.system}, which serves`, percent(attainment(recent(name, 60))), ms(mostOf(name, "p99_ms", 60)),
    `${level.ready ?? 0}`, `${level.starting ?? 0}`, number(level.cores), usd(level.usd_per_h), plan?.text, plan?.why];
  const rows = Object.entries(state.shadows).map(([label, told]) => {
    const row = told.applications?.[name];
    if (told.error || !row) return [label, told.error ? html`<b class="bad">ended: ${told.error}</b>` : told.applications ? "this shadow began before it was deployed" : "starting", ...Array(7).fill("")];
    return [label, percent(row.attainment), ms(row.p99_ms), row.ready, row.starting, number(row.cores), usd(row.usd_per_h), row.plan, row.why];
  });
  return html`<section><h3>What other systems would have now</h3>
    <p class="soft">Each shadow is simulated beside the server with the same requests, from the profiles. Nothing of it is carried out.</p>
    <${Table} label="shadows" rows=${[itself, ...rows]} numbers=${[1, 2, 3, 4, 5, 6]}
      head=${["system", "in time, 1 min", "p99", "ready", "starting", "cores", "cost", "plan", "why"]} /></section>`;
}

function Nodes() {
  const names = Object.keys(state.picture.applications);
  const rows = state.picture.nodes.map((node) => {
    const used = Object.values(node.used).reduce((sum, cores) => sum + cores, 0);
    const who = names.filter((name) => node.used[name]).map((name) => `${name} ${number(node.used[name])}`).join(", ");
    return [node.name, node.hardware, node.state, `${number(used)} of ${number(node.cores)}`,
      html`<meter min="0" max=${node.cores} value=${used} aria-label=${`cores in use on ${node.name}`}></meter>`,
      who, node.devices.join(", "), usd(node.usd_per_h)];
  });
  return html`<section><h2>Nodes</h2><${Table} label="nodes" rows=${rows} numbers=${[3, 7]}
    head=${["node", "hardware", "state", "cores", "in use", "by", "devices", "cost"]} /></section>`;
}

export function Now() {
  const names = Object.keys(state.picture.applications);
  const [wanted, choose] = useState("");
  const [span, setSpan] = useState("5 min");
  const chosen = names.includes(wanted) ? wanted : names[0];
  const application = state.picture.applications[chosen];
  return html`
    <${Overview} chosen=${chosen} choose=${choose} />
    ${application ? html`<section>
      <h2>${application.name}</h2>
      <div class="spans" role="group" aria-label="time shown">${Object.keys(SPANS).map((name) =>
        html`<button aria-pressed=${name === span} onClick=${() => setSpan(name)}>${name}</button>`)}</div>
      <${Charts} key=${chosen} application=${application} span=${SPANS[span]} />
      <${Shadows} name=${chosen} />
      ${application.versions.map((version) => html`<${Version} key=${version.version} version=${version} only=${application.versions.length === 1} />`)}
    </section>` : html`<p>No application is served.</p>`}
    <${Nodes} />`;
}
