// The page: its tabs, its state at a glance, and its connection to the server.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { Decisions } from "sloop/decisions";
import { Log } from "sloop/log";
import { Glance, Now } from "sloop/now";
import { Plan } from "sloop/plan";
import { Request } from "sloop/request";
import { changed, state, takeChanges, takeLines, takeWhole, watch } from "sloop/store";
import { Summary } from "sloop/summary";
import { TryIt } from "sloop/tryit";
import { WhatIf } from "sloop/whatif";
import { ask, clock, Field, html, Problem } from "sloop/words";

const RUN_VIEWS = { now: ["Now", Now], decisions: ["Decisions", Decisions], request: ["Requests", Request] };
const LIVE_VIEWS = { plan: ["Plan and cost", Plan], "what-if": ["What if", WhatIf], "try-it": ["Try it", TryIt], log: ["Log", Log] };
const STALE_MS = 2500; // events come each second
const AGAIN_MS = 1000;

let last = ""; // the number of the last event that came

/** Ask for the events since the last one, again and again. */
async function connect() {
  try {
    const answer = await fetch(`/events?after=${last}`);
    if (answer.ok) {
      const { number, events } = await answer.json();
      last = number;
      events.forEach(take);
      state.connection = "open";
      state.heardMs = performance.now();
    } else {
      state.connection = answer.status === 401 ? "key" : "lost";
    }
  } catch {
    state.connection = "lost"; // the server is away
  }
  changed();
  if (state.connection === "open") connect();
  else if (state.connection === "lost") setTimeout(connect, AGAIN_MS);
}

function take(event) {
  state.health = event.health;
  if (event.kind === "whole" && event.picture.applications) takeWhole(event.picture);
  else if (event.kind === "changes") takeChanges(event.picture);
  state.shadows = event.shadows;
  takeLines(event.lines, event.kind === "whole");
}

function KeyForm() {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const submit = async (event) => {
    event.preventDefault();
    try {
      await ask("/key", key);
      state.connection = "connecting";
      connect();
      changed();
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<main><h1>sloop</h1><form class="ask" onSubmit=${submit}>
    <${Field} label="This server asks for an API key"><input type="password" value=${key} autocomplete="current-password" onInput=${(event) => setKey(event.target.value)} /></${Field}>
    <button>Open the page</button></form><${Problem} error=${error} /></main>`;
}

/** The views that there is something for: a report of several runs has its summary alone. */
function views() {
  const { report, applications } = state.picture;
  const summary = report ? { summary: ["Summary", Summary] } : {};
  return { ...summary, ...(applications ? RUN_VIEWS : {}), ...(state.isLive ? LIVE_VIEWS : {}) };
}

/** Why what is shown may not be so any more; empty if it is. */
function staleness() {
  if (!state.isLive) return "";
  if (state.connection === "lost") return "The server is away. What you see is from before; the page goes on by itself.";
  if (performance.now() - state.heardMs > STALE_MS) return "The page hears nothing from the server.";
  if (state.health.unheard_s) return `The server has not answered for ${state.health.unheard_s} s.`;
  return state.health.trouble;
}

function Page() {
  const [view, setView] = useState(location.hash.slice(1));
  const [, setTick] = useState(0);
  useEffect(() => {
    const again = () => setTick((tick) => tick + 1);
    const timer = setInterval(again, 1000);
    const end = watch(again);
    const moved = () => setView(location.hash.slice(1));
    addEventListener("hashchange", moved);
    return () => {
      clearInterval(timer);
      end();
      removeEventListener("hashchange", moved);
    };
  }, []);
  if (state.connection === "key") return html`<${KeyForm} />`;
  const picture = state.picture;
  if (!picture) return html`<main><p role="status">${state.connection === "lost" ? "The server is away; this page goes on when it is back." : staleness() || "Waiting for the first numbers …"}</p></main>`;
  const known = views();
  const chosen = known[view] ? view : Object.keys(known)[0];
  const View = known[chosen][1];
  const stale = staleness();
  document.title = picture.report?.title ?? `${picture.name}: sloop`;
  return html`
    <header>
      <h1>${picture.report?.title ?? picture.name}</h1>
      ${picture.report ? null : html`<p class="soft">${picture.origin === "live" ? "" : "simulated, "}system ${picture.system}, ${state.isLive ? "at" : "up to"} ${clock(picture.now_s)}${picture.sample < 1 ? `; only ${picture.sample * 100} % of the requests in time are in the log` : ""}</p>`}
      <nav aria-label="views">${Object.entries(known).map(([name, [label]]) =>
        html`<a href=${`#${name}`} aria-current=${name === chosen ? "page" : undefined}>${label}</a>`)}</nav>
    </header>
    <main class=${stale ? "stale" : ""}>
      ${stale ? html`<p class="glance bad" role="alert">${stale}</p>` : chosen === "summary" ? null : html`<${Glance} />`}
      <${View} />
    </main>`;
}

const given = document.getElementById("picture");
if (given) {
  takeWhole(JSON.parse(given.textContent));
} else {
  state.isLive = true;
  connect();
}
render(html`<${Page} />`, document.getElementById("page"));
