// A chart over time, drawn by uPlot; text shows the newest values, or the values under the pointer.
import { html, number, useEffect, useRef, useState } from "./ui.js";

const HEIGHT = 158;
const syncKey = globalThis.uPlot.sync("dashboard").key;

/** A colour of the style sheet as canvas wants it. */
function colour(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const translucent = (found, alpha) => found.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);

function options(chart, width, onCursor) {
  const clock = (_, times) => times.map((time) => new Date(1000 * time).toLocaleTimeString("en", { hour12: false }));
  const axis = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const line = ([label, name]) => {
    const stroke = colour(name);
    return { label, stroke, width: 1.75, points: { show: false }, spanGaps: false, fill: translucent(stroke, 0.1) };
  };
  const series = chart.stacked ? chart.series.map(line).toReversed() : chart.series.map(line);
  // each series of a stack fills the area above the series below
  const bands = chart.stacked ? series.map(({ stroke }, i) => ({ series: [i + 1, i + 2], fill: translucent(stroke, 0.45) })) : [];
  if (chart.stacked) series.forEach((each, i) => (each.fill = i === series.length - 1 ? bands.pop().fill : null));
  return {
    width, height: HEIGHT,
    legend: { show: false },
    cursor: { y: false, sync: { key: syncKey }, points: { size: 6 } },
    scales: { y: { range: (_, least, most) => [0, chart.most ?? Math.max(1, (most ?? 1) * 1.1)] } },
    axes: [{ ...axis, space: 90, size: 26, values: clock }, { ...axis, size: 40, space: 30 }],
    series: [{}, ...series],
    bands,
    hooks: { setCursor: [(plot) => onCursor(plot.cursor.idx)] },
  };
}

/** Stacked values are sums with the series below; the highest is drawn first. */
function drawn(chart, data) {
  if (!chart.stacked) return data;
  const [times, ...values] = data;
  const sums = values.map((_, i) => times.map((_, at) => (values[0][at] === null ? null : values.slice(0, i + 1).reduce((sum, each) => sum + each[at], 0))));
  return [times, ...sums.toReversed()];
}

export function Chart({ chart, data, from, to, theme }) {
  const holder = useRef(null);
  const plot = useRef(null);
  const [at, setAt] = useState(null);
  useEffect(() => {
    const width = () => holder.current.clientWidth;
    plot.current = new globalThis.uPlot(options(chart, width(), setAt), drawn(chart, data), holder.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: width(), height: HEIGHT }));
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      plot.current.destroy();
    };
  }, [chart, theme]);
  useEffect(() => {
    plot.current.batch(() => {
      plot.current.setData(drawn(chart, data));
      plot.current.setScale("x", { min: from, max: to });
    });
  }, [data, from, to, theme]);
  const place = at ?? data[0].length - 1;
  const shown = (i) => {
    const value = data[i + 1][place];
    return value == null ? "–" : `${number(value, chart.digits)}${chart.unit ?? ""}`;
  };
  return html`<figure class="chart">
    <figcaption><h2>${chart.title}</h2>
      <ul>${chart.series.map(([name, colour], i) => html`<li><i class=${`key ${colour}`}></i>${name} <b>${shown(i)}</b></li>`)}</ul>
    </figcaption>
    <div ref=${holder} aria-hidden="true"></div>
  </figure>`;
}
