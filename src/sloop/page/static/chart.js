// Lines over time, drawn by uPlot.

import { useEffect, useRef } from "preact/hooks";
import { html, timeOfDay } from "sloop/words";
import { state } from "sloop/store";

const COLORS = ["--line-1", "--line-2", "--line-3", "--line-4", "--line-5"];
const isDark = matchMedia("(prefers-color-scheme: dark)");

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function options(lines, unit, width, height, bands) {
  const text = color("--soft");
  const grid = { stroke: color("--rule"), width: 1 };
  return {
    width,
    height,
    legend: { live: true },
    cursor: { drag: { x: true, y: false } },
    scales: { y: { range: (_, low, high) => [Math.min(0, low ?? 0), high > 0 ? high * 1.05 : 1] } },
    axes: [
      { stroke: text, grid, ticks: grid, space: 80, values: (_, ticks) => ticks.map(timeOfDay) },
      { stroke: text, grid, ticks: grid, size: 56, values: (_, ticks) => ticks.map((tick) => `${tick}${unit}`) },
    ],
    series: [
      { value: (_, at) => (at === null ? "–" : timeOfDay(at)) },
      ...lines.map((line, place) => ({
        label: line.label,
        stroke: color(line.color ?? COLORS[place % COLORS.length]),
        width: 1.5,
        dash: line.dash ? [6, 4] : undefined,
        spanGaps: false,
        points: { show: false },
      })),
    ],
    bands,
  };
}

/** `lines` are `{label, values}` over the instants `times` (seconds of the run); `summary` says the same in words. */
export function Chart({ times, lines, unit = "", height = 150, summary }) {
  const place = useRef(null);
  const plot = useRef(null);
  const zero = state.picture.zero_unix_s;
  const data = [times.map((at) => at + zero), ...lines.map((line) => line.values)];
  const names = lines.map((line) => line.label).join("\n");
  useEffect(() => {
    const draw = () => {
      plot.current?.destroy();
      plot.current = new uPlot(options(lines, unit, place.current.clientWidth, height), data, place.current);
    };
    draw();
    const resized = new ResizeObserver(([entry]) => plot.current?.setSize({ width: entry.contentRect.width, height }));
    resized.observe(place.current);
    isDark.addEventListener("change", draw);
    return () => {
      resized.disconnect();
      isDark.removeEventListener("change", draw);
      plot.current?.destroy();
      plot.current = null;
    };
  }, [names, unit, height]);
  useEffect(() => plot.current?.setData(data), [state.version]);
  return html`<div class="chart" ref=${place} role="img" aria-label=${summary}></div>`;
}
