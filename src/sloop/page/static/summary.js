// The report of runs that are over: sections of text, figures and tables, with the meaning of their words.

import { state } from "sloop/store";
import { html } from "sloop/words";

function Figure({ figure }) {
  return html`<figure class="drawing"><img alt=${figure.title} src=${`data:image/svg+xml;charset=utf-8,${encodeURIComponent(figure.svg)}`} /></figure>`;
}

function ReportTable({ table, words }) {
  const kind = (place) => (table.numbers.includes(place) ? "n" : "");
  return html`<div class="scroll report" tabindex="0" role="region" aria-label=${table.title || "table"}>
    <table>
      ${table.title ? html`<caption>${table.title}</caption>` : null}
      <thead><tr>${table.columns.map((name, place) =>
        html`<th scope="col" class=${kind(place)} title=${words[table.words[place]]}>${name}</th>`)}</tr></thead>
      <tbody>${table.rows.length ? table.rows.map(([first, ...rest]) => html`<tr><th scope="row" class=${kind(0)}>${first}</th>${rest.map((cell, place) =>
        html`<td class=${kind(place + 1)}>${cell}</td>`)}</tr>`) : html`<tr><td colspan=${table.columns.length}>nothing to show</td></tr>`}</tbody>
    </table>
  </div>`;
}

function Section({ section, words }) {
  const inner = html`${section.text.map((paragraph) => html`<p>${paragraph}</p>`)}
    ${section.figures.map((figure) => html`<${Figure} figure=${figure} />`)}
    ${section.tables.map((table) => html`<${ReportTable} table=${table} words=${words} />`)}`;
  return html`<section><h2>${section.title}</h2>${section.folded ? html`<details><summary>Show</summary>${inner}</details>` : inner}</section>`;
}

export function Summary() {
  const { lead, facts, sections, words } = state.picture.report;
  const meanings = Object.entries(words);
  return html`
    ${lead ? html`<p class="soft">${lead}</p>` : null}
    <dl class="facts">${facts.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${sections.map((section) => html`<${Section} section=${section} words=${words} />`)}
    ${meanings.length ? html`<section><h2>Words on this page</h2><dl class="meanings">${meanings.map(([word, line]) =>
      html`<div><dt>${word}</dt><dd>${line}</dd></div>`)}</dl></section>` : null}`;
}
