// The dashboard: looks at /metrics now and then, and keeps what it saw while the page is open.
import { Chart } from "./chart.js";
import { CHARTS, health, sample, savings } from "./metrics.js";
import * as server from "./server.js";
import { Bar, KeyDialog, html, number, start, useEffect, useMemo, useRef, useState } from "./ui.js";

const EVERY_MS = 2000;
const SMOOTH = 5; // samples over which rates are taken
const KEPT = 1800; // samples: an hour
const WINDOWS = [[120, "2 minutes"], [900, "15 minutes"], [3600, "1 hour"]];
const LATELY = 150; // samples by which the head is judged
const NOTHING = sample("", 0);

/** The metrics of one model of several. */
const of = (text, model) =>
  text.split("\n").filter((line) => !line.includes('model_name="') || line.includes(`model_name="${model}"`)).join("\n");

function useSamples() {
  const [state, setState] = useState({ samples: [], trouble: "", needsKey: false, model: "", models: [] });
  const chosen = useRef("");
  const kept = useRef([]);
  const pause = useRef(false);
  const look = async () => {
    if (pause.current) return;
    try {
      const text = await server.text("metrics");
      const models = [...text.matchAll(/^headstart:model_loaded\{model_name="([^"]*)"/gm)].map(([, name]) => name);
      const model = chosen.current || models[0] || (/model_name="([^"]*)"/.exec(text)?.[1] ?? "");
      kept.current = [...kept.current.slice(1 - KEPT), sample(models.length ? of(text, model) : text, Date.now() / 1000)];
      setState({ samples: kept.current, trouble: "", needsKey: false, model, models });
    } catch (error) {
      pause.current = error.status === 401;
      setState((state) => ({ ...state, needsKey: error.status === 401, trouble: error.status === 401 ? "" : error.message }));
    }
  };
  useEffect(() => {
    look();
    const timer = setInterval(look, EVERY_MS);
    return () => clearInterval(timer);
  }, []);
  const goOn = () => {
    pause.current = false;
    look();
  };
  const choose = (model) => {
    chosen.current = model;
    kept.current = [];
    goOn();
  };
  return { ...state, goOn, choose };
}

function Dashboard() {
  const { samples, trouble, needsKey, model, models, goOn, choose } = useSamples();
  const [span, setSpan] = useState(120);
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((count) => count + 1);
    const system = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("themechange", changed);
    system.addEventListener("change", changed);
    return () => {
      removeEventListener("themechange", changed);
      system.removeEventListener("change", changed);
    };
  }, []);
  const data = useMemo(() => CHARTS.map((chart) => columns(chart, samples)), [samples]);
  const now = samples.at(-1);
  return html`<${Bar} ...${{ page: "dashboard", model, models, choose }}>
      <label class="span"><span class="unseen">Time shown</span>
        <select value=${span} onChange=${(event) => setSpan(Number(event.target.value))}>
          ${WINDOWS.map(([seconds, title]) => html`<option value=${seconds}>${title}</option>`)}
        </select></label>
    </${Bar}>
    <main class="board">
      <h1 class="unseen">Dashboard</h1>
      ${trouble && html`<p class="wrong" role="alert">${trouble} It is asked again every ${EVERY_MS / 1000} s.</p>`}
      ${now && html`<${Tiles} samples=${samples} />`}
      ${now && html`<div class="charts">
        ${CHARTS.map((chart, i) => html`<${Chart} key=${chart.title} ...${{ chart, theme, data: data[i], from: now.time - span, to: now.time }} />`)}
      </div>`}
      <p class="hint">Since this page was opened; nothing is kept. The numbers are those of <a href="metrics">/metrics</a>,
        for Prometheus and Grafana.</p>
    </main>
    ${needsKey && html`<${KeyDialog} onKey=${goOn} />`}`;
}

/** [times, values of the first series, ...]. */
function columns(chart, samples) {
  const rows = samples.map((now, i) => chart.of(now, samples[Math.max(0, i - SMOOTH)]));
  return [samples.map((each) => each.time), ...chart.series.map((_, at) => rows.map((row) => row[at]))];
}

function Tiles({ samples }) {
  const now = samples.at(-1);
  const then = samples.length > LATELY ? samples.at(-LATELY) : NOTHING;
  const [state, word, why] = health(now, then);
  const { share, seconds, dollars } = savings(now, samples[0]);
  const sources = Object.entries(now.sources).filter(([, count]) => count);
  const tile = (title, value, more, kind = "") => html`<div class=${`tile ${kind}`}>
    <h2>${title}</h2><p class="value">${value}</p><p class="more">${more}</p>
  </div>`;
  const percent = (part, whole) => (whole ? `${number((100 * part) / whole, 1)} %` : "–");
  return html`<section class="tiles" aria-label="Now">
    ${tile("The head", word, why, state)}
    ${tile("Saved by drafts", share === null ? "–" : `${number(100 * share, 1)} %`,
      `of passes: ${number(now.saved)} not made${seconds > 0 ? `, about ${number(seconds, 1)} s` : ""}`)}
    ${tile("Accepted", percent(now.accepted, now.drafted),
      sources.length ? sources.map(([name, count]) => `${name} ${number(count)}`).join(", ") : "nothing drafted yet")}
    ${tile("Requests", number(now.running), `${number(now.waiting)} waiting, ${number(now.ended)} ended, ${number(now.failed)} of them given up or failed`)}
    ${tile("First token", now.firstCount ? `${number((1000 * now.firstSum) / now.firstCount)} ms` : "–",
      `on average; ${percent(now.prefixFound, now.prefixAsked)} of prompts from the cache`)}
    ${tile("KV cache", `${number(100 * now.kv, 1)} %`, "of its blocks are in use")}
    ${now.cost !== null && tile("Cost", `$${number(now.cost, 4)}`,
      `${now.output ? `$${number((1e6 * now.cost) / now.output, 2)} a million tokens` : "nothing written yet"}${dollars ? `, $${number(dollars, 4)} saved` : ""}`)}
  </section>`;
}

start(html`<${Dashboard} />`);
