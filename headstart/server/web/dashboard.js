// The dashboard: reads /metrics every few seconds and keeps the samples while the page is open.
import { Chart } from "./chart.js";
import { CHARTS, health, sample, savings } from "./metrics.js";
import * as server from "./server.js";
import { Bar, KeyDialog, html, number, start, useEffect, useMemo, useRef, useState } from "./ui.js";

const EVERY_MS = 2000;
const SMOOTH = 5; // samples over which rates are taken
const KEPT = 1800; // samples: an hour
const WINDOWS = [[120, "2 minutes"], [900, "15 minutes"], [3600, "1 hour"]];
const LATELY = 150; // samples that the state of the head is based on
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
      const last = kept.current.at(-1);
      if (!pause.current && last) kept.current = [...kept.current.slice(1 - KEPT), { ...last, time: Date.now() / 1000, isLost: true }];
      const trouble = pause.current ? "" : error.message;
      setState((state) => ({ ...state, samples: kept.current, needsKey: pause.current, trouble }));
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

/** Models whose MTP head is not whole -> the reason, as /health names them at the page's start. */
function useBrokenHeads() {
  const [heads, setHeads] = useState({});
  useEffect(() => {
    server.json("health").then((health) => setHeads(health.broken_heads ?? {}), () => {});
  }, []);
  return Object.entries(heads);
}

function Dashboard() {
  const { samples, trouble, needsKey, model, models, goOn, choose } = useSamples();
  const brokenHeads = useBrokenHeads();
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
  const isUsed = now && (now.running + now.waiting > 0 || now.prompt !== samples[0].prompt || now.ended !== samples[0].ended);
  return html`<${Bar} ...${{ page: "dashboard", model, models, choose }}>
      <label class="span"><span class="unseen">Time shown</span>
        <select value=${span} onChange=${(event) => setSpan(Number(event.target.value))}>
          ${WINDOWS.map(([seconds, title]) => html`<option value=${seconds}>${title}</option>`)}
        </select></label>
    </${Bar}>
    <main class="board">
      <h1 class="unseen">Dashboard</h1>
      ${trouble && html`<p class="wrong" role="alert">${trouble} The page tries again every ${EVERY_MS / 1000} s.</p>`}
      ${brokenHeads.map(([name, why]) => html`<p key=${name} class="wrong" role="alert">${name} runs without its MTP head: ${why}</p>`)}
      ${now && html`<${Tiles} samples=${samples} />`}
      ${now && !isUsed && !trouble && html`<p class="hint">Charts appear with the next request, for example from the${" "}
        <a href="./">playground</a>.</p>`}
      ${isUsed && html`<div class="charts">
        ${CHARTS.map((chart, i) => html`<${Chart} key=${chart.title} ...${{ chart, theme, data: data[i], from: now.time - span, to: now.time }} />`)}
      </div>`}
      <p class="hint">Charts begin when this page is opened; nothing is saved. The numbers come from <a href="metrics">/metrics</a>,
        for Prometheus and Grafana.</p>
    </main>
    ${needsKey && html`<${KeyDialog} onKey=${goOn} />`}`;
}

/** [times, values of the first series, ...]. */
function columns(chart, samples) {
  const rows = samples.map((now, i) => (now.isLost ? chart.series.map(() => null) : chart.of(now, samples[Math.max(0, i - SMOOTH)])));
  return [samples.map((each) => each.time), ...chart.series.map((_, at) => rows.map((row) => row[at]))];
}

function Tiles({ samples }) {
  const now = samples.findLast((each) => !each.isLost);
  const then = samples.length > LATELY ? samples.at(-LATELY) : NOTHING;
  const lost = now !== samples.at(-1) && ["bad", "Unknown", `The server has not answered since ${new Date(1000 * now.time).toLocaleTimeString("en", { hour12: false })}. All values are from then.`];
  const [state, word, why] = lost || health(now, then);
  const { share, seconds, dollars } = savings(now, samples[0]);
  const sources = Object.entries(now.sources).filter(([, count]) => count);
  const tile = (title, value, more, kind = "") => html`<div class=${`tile ${kind}`}>
    <h2>${title}</h2><p class="value">${value}</p><p class="more">${more}</p>
  </div>`;
  const percent = (part, whole) => (whole ? `${number((100 * part) / whole, 1)} %` : "–");
  return html`<section class=${lost ? "tiles lost" : "tiles"} aria-label=${lost ? "Last known" : "Now"}>
    ${tile("Drafting", word, why, state)}
    ${tile("Saved by drafts", share === null ? "–" : `${number(100 * share, 1)} %`,
      `of all passes: ${number(now.saved)} passes${seconds > 0 ? `, about ${number(seconds, 1)} s` : ""}`)}
    ${tile("Accepted", percent(now.accepted, now.drafted),
      sources.length ? sources.map(([name, count]) => `${name} ${number(count)}`).join(", ") : "no drafts yet")}
    ${tile("Requests", number(now.running), `${number(now.waiting)} waiting, ${number(now.ended)} ended, ${number(now.failed)} of them aborted or failed`)}
    ${tile("First token", now.firstCount ? `${number((1000 * now.firstSum) / now.firstCount)} ms` : "–",
      `on average; ${percent(now.prefixFound, now.prefixAsked)} of prompt tokens from the prefix cache`)}
    ${tile("KV cache", `${number(100 * now.kv, 1)} %`, "of its blocks in use")}
    ${now.cost !== null && tile("Cost", `$${number(now.cost, 4)}`,
      `${now.output ? `$${number((1e6 * now.cost) / now.output, 2)} per million tokens` : "no tokens yet"}${dollars ? `, $${number(dollars, 4)} saved` : ""}`)}
  </section>`;
}

start(html`<${Dashboard} />`);
