// What the page knows of a run: the picture that the server told, kept up to date by its changes.

const SECONDS = 3600;
const MINUTES = 1440;

/** All that views show. It is changed in place; `version` counts the changes, so that views draw anew. */
export const state = {
  version: 0,
  isLive: false, // whether changes come
  connection: "connecting", // or "open", "lost", "key"
  heardMs: 0, // when the last event came, on this computer's clock
  health: { unheard_s: 0, trouble: "" },
  picture: null,
  lines: [], // of the server's log
  shadows: {}, // by label, what other systems would do now
};

const watchers = new Set();

/** Call `watcher` after each change; returns what ends that. */
export function watch(watcher) {
  watchers.add(watcher);
  return () => watchers.delete(watcher);
}

export function changed() {
  state.version += 1;
  for (const watcher of watchers) watcher();
}

/** Take lines of the server's log: all that are known, or further ones. */
export function takeLines(lines, isWhole) {
  if (isWhole) state.lines = lines;
  else state.lines.push(...lines);
  keepNewest(state.lines, 1000);
}

/** Take the whole picture. Rows of counts are kept by their second. */
export function takeWhole(picture) {
  for (const series of Object.values(picture.series ?? {})) {
    series.counts = new Map(series.counts.map((row) => [row[0], row]));
  }
  state.picture = picture;
}

function keepNewest(rows, most) {
  if (rows.length > most) rows.splice(0, rows.length - most);
}

/** Take what has changed. What is known already may come again. */
export function takeChanges(changes) {
  const picture = state.picture;
  if (!picture || changes.now_s === undefined) return;
  picture.now_s = changes.now_s;
  picture.draining = changes.draining;
  picture.totals = changes.totals;
  Object.assign(picture.applications, changes.applications);
  for (const name of changes.gone) delete picture.applications[name];
  if (changes.nodes) picture.nodes = changes.nodes;
  for (const [name, rows] of Object.entries(changes.counts)) {
    const counts = seriesOf(name).counts;
    for (const row of Object.values(rows)) counts.set(row[0], row);
    for (const second of counts.keys()) {
      if (counts.size <= SECONDS) break;
      counts.delete(second);
    }
  }
  for (const [name, rows] of Object.entries(changes.levels)) {
    const levels = seriesOf(name).levels;
    for (const row of rows) {
      if (!levels.length || row[0] > levels[levels.length - 1][0]) levels.push(row);
    }
    keepNewest(levels, SECONDS);
  }
  for (const [name, minutes] of Object.entries(changes.minutes)) {
    const series = seriesOf(name);
    for (const row of minutes.counts) putMinute(series.minute_counts, row);
    for (const row of minutes.levels) putMinute(series.minute_levels, row);
  }
  addNew(picture.decisions, changes.decisions, 500);
  addNew(picture.missed, changes.missed, 200);
}

function putMinute(rows, row) {
  const place = rows.findLastIndex((known) => known[0] === row[0]);
  if (place >= 0) rows[place] = row;
  else rows.push(row);
  keepNewest(rows, MINUTES);
}

function addNew(known, rows, most) {
  const keys = new Set(known.map((row) => JSON.stringify(row)));
  known.push(...rows.filter((row) => !keys.has(JSON.stringify(row))));
  keepNewest(known, most);
}

function seriesOf(name) {
  const all = state.picture.series;
  all[name] ??= { counts: new Map(), levels: [], minute_counts: [], minute_levels: [] };
  return all[name];
}

/** The columns of a row, by name. */
export function columns(kind) {
  return Object.fromEntries(state.picture.columns[kind].map((name, place) => [name, place]));
}

/** The counts of the last `seconds` of an application: by column, their sums. */
export function recent(name, seconds) {
  const names = state.picture.columns.counts;
  const sums = Object.fromEntries(names.map((column) => [column, 0]));
  const series = state.picture.series[name];
  if (!series) return sums;
  const from = state.picture.now_s - seconds;
  for (const row of series.counts.values()) {
    if (row[0] >= from) names.forEach((column, place) => (sums[column] += place ? row[place] : 0));
  }
  return sums;
}

/** The share of the ended requests that were served in time; null if none has ended. */
export function attainment(counts) {
  const ended = counts.served + counts.late + counts.dropped + counts.rejected + counts.failed;
  return ended ? counts.served / ended : null;
}

/** The last levels of an application, by column; empty without any. */
export function levels(name) {
  const rows = state.picture.series[name]?.levels ?? [];
  const row = rows[rows.length - 1];
  return row ? Object.fromEntries(state.picture.columns.levels.map((column, place) => [column, row[place]])) : {};
}

/** The largest of a level in the last `seconds`; null without any. */
export function mostOf(name, column, seconds) {
  const place = columns("levels")[column];
  const rows = state.picture.series[name]?.levels ?? [];
  const found = rows.slice(-seconds).map((row) => row[place]).filter((value) => value !== null);
  return found.length ? Math.max(...found) : null;
}

/** How the application does: "good", "late" (under its target in the last minute), "down" or "quiet". */
export function verdict(name) {
  const application = state.picture.applications[name];
  const last = recent(name, 60);
  const share = attainment(last);
  const ready = application.versions.some((version) =>
    version.stages.every((stage) => stage.replicas.some((replica) => replica.life === "ready"))
  );
  if (share !== null && share < state.picture.target) return "late";
  if (!ready && (last.arrivals || application.open)) return "down";
  return last.arrivals ? "good" : "quiet";
}
