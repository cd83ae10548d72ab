// What a request is asked with: the panel, and the fields of the body that come of it.
import { html } from "./ui.js";

const KEPT = "headstart.settings";
const DEFAULTS = {
  system: "", temperature: "0.7", top_p: "", top_k: "", min_p: "", max_tokens: "512", seed: "",
  presence_penalty: "", frequency_penalty: "", repetition_penalty: "", stop: "",
  depth: "", logprobs: false, colours: true, format: "text", schema: "", tools: "", tool_choice: "auto",
};
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1, "1"],
  ["top_p", "Top p", 0, 1, 0.05, "1"],
  ["top_k", "Top k", 0, null, 1, "off"],
  ["min_p", "Min p", 0, 1, 0.01, "0"],
  ["max_tokens", "Max tokens", 1, null, 1, "all"],
  ["seed", "Seed", 0, null, 1, "random"],
  ["presence_penalty", "Presence", -2, 2, 0.1, "0"],
  ["frequency_penalty", "Frequency", -2, 2, 0.1, "0"],
  ["repetition_penalty", "Repetition", 0.1, 2, 0.05, "1"],
];
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);
const SCHEMA = '{\n  "type": "object",\n  "properties": {\n    "name": {"type": "string"},\n    "age": {"type": "integer"}\n  },\n  "required": ["name", "age"],\n  "additionalProperties": false\n}';
const TOOLS = '[{"type": "function", "function": {\n  "name": "get_weather",\n  "description": "Weather of a city",\n  "parameters": {"type": "object",\n    "properties": {"city": {"type": "string"}},\n    "required": ["city"]}}}]';

export function kept() {
  try {
    return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(KEPT) ?? "{}") };
  } catch {
    return DEFAULTS;
  }
}

export const keep = (settings) => localStorage.setItem(KEPT, JSON.stringify(settings));

function parsed(text, kind) {
  try {
    const value = JSON.parse(text);
    return Array.isArray(value) === (kind === "list") && typeof value === "object" && value ? [value, ""] : [null, `This is not a JSON ${kind}.`];
  } catch (error) {
    return [null, `This is not JSON: ${error.message}`];
  }
}

/** What keeps a request from being sent: name of the field -> why. */
export function problems(settings) {
  const found = {};
  if (settings.format === "schema") found.schema = parsed(settings.schema, "object")[1];
  if (settings.tools.trim()) found.tools = parsed(settings.tools, "list")[1];
  for (const [name, title] of NUMBERS) {
    const value = settings[name];
    if (value !== "" && (!Number.isFinite(Number(value)) || (WHOLE.has(name) && !Number.isInteger(Number(value))))) {
      found[name] = `${title} is no ${WHOLE.has(name) ? "whole " : ""}number.`;
    }
  }
  return Object.fromEntries(Object.entries(found).filter(([, why]) => why));
}

/** Fields of a request's body. */
export function fields(settings, drafting) {
  const body = { stream_options: { include_usage: true }, speculation: { events: true, mode: drafting ? "auto" : "off" } };
  for (const [name] of NUMBERS) if (settings[name] !== "") body[name] = Number(settings[name]);
  if (settings.stop) body.stop = settings.stop.split("\n").filter(Boolean).map((each) => each.replaceAll("\\n", "\n"));
  if (drafting && settings.depth !== "") body.speculation.depth = Number(settings.depth);
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  if (settings.format === "json") body.response_format = { type: "json_object" };
  if (settings.format === "schema") {
    const schema = { name: "answer", schema: JSON.parse(settings.schema) };
    body.response_format = { type: "json_schema", json_schema: schema };
  }
  if (settings.tools.trim()) Object.assign(body, { tools: JSON.parse(settings.tools), tool_choice: settings.tool_choice });
  return body;
}

export function Settings({ settings, change, wrong }) {
  const set = (name) => (event) => {
    const { type, checked, value } = event.target;
    change({ ...settings, [name]: type === "checkbox" ? checked : value });
  };
  const fault = (name) => wrong[name] && html`<span class="wrong" id=${`wrong-${name}`} role="alert">${wrong[name]}</span>`;
  const described = (name) => ({ "aria-invalid": wrong[name] ? "true" : null, "aria-describedby": wrong[name] ? `wrong-${name}` : null });
  const area = (name, rows, placeholder) => html`<textarea id=${`set-${name}`} rows=${rows} spellcheck="false"
    placeholder=${placeholder} value=${settings[name]} onInput=${set(name)} ...${described(name)}></textarea>`;
  const check = (name, title) => html`<label class="check">
    <input type="checkbox" checked=${settings[name]} onChange=${set(name)} /> ${title}
  </label>`;
  const number = ([name, title, least, most, step, placeholder]) => html`<label>${title}
    <input type="number" inputmode="decimal" min=${least} max=${most} step=${step} placeholder=${placeholder}
      value=${settings[name]} onInput=${set(name)} ...${described(name)} />${fault(name)}
  </label>`;
  const example = (name, text) => !settings[name] && html`<button type="button" class="quiet"
    onClick=${() => change({ ...settings, [name]: text })}>Insert an example</button>`;
  return html`
    <section><h2><label for="set-system">System prompt</label></h2>${area("system", 3, "None")}</section>
    <section><h2>Sampling</h2><div class="numbers">${NUMBERS.map(number)}</div>
      <label for="set-stop">Stop texts, one a line</label>${area("stop", 2, "None")}</section>
    <section><h2>Drafts</h2>
      <label>Depth
        <select value=${settings.depth} onChange=${set("depth")}>
          <option value="">as the server has it</option>
          ${[1, 2, 3, 4, 5, 6, 8].map((depth) => html`<option value=${depth}>${depth}</option>`)}
        </select></label>
      ${check("colours", "Colour the drafts")}${check("logprobs", "Log probabilities, shown with each token")}</section>
    <section><h2>Answer</h2>
      <label>Format
        <select value=${settings.format} onChange=${set("format")}>
          <option value="text">Text</option><option value="json">A JSON object</option>
          <option value="schema">JSON by a schema</option>
        </select></label>
      ${settings.format === "schema" &&
      html`<label for="set-schema">JSON schema</label>${area("schema", 7, "{}")}${fault("schema")}${example("schema", SCHEMA)}`}
      <label for="set-tools">Tools, a JSON list</label>${area("tools", 3, "None")}${fault("tools")}${example("tools", TOOLS)}
      ${settings.tools.trim() &&
      html`<label>Calls
        <select value=${settings.tool_choice} onChange=${set("tool_choice")}>
          <option value="auto">if the model wants to</option><option value="required">required</option>
          <option value="none">none</option>
        </select></label>`}</section>
    <button type="button" class="quiet" onClick=${() => change(DEFAULTS)}>Reset all</button>`;
}
