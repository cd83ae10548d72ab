// Preact, htm, and components of both pages.
import { Component, Fragment, h, render } from "./vendor/preact.js";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.js";
import htm from "./vendor/htm.js";
import * as server from "./server.js";

export const html = htm.bind(h);
export { Fragment, useEffect, useLayoutEffect, useMemo, useRef, useState };

/** A component that renders only when one of its properties changes. */
export function memo(view) {
  return class extends Component {
    shouldComponentUpdate(next) {
      const names = new Set([...Object.keys(next), ...Object.keys(this.props)]);
      return [...names].some((name) => next[name] !== this.props[name]);
    }
    render(props) {
      return view(props);
    }
  };
}

/** Render the page after the first paint of the static document. */
export function start(view) {
  const app = document.getElementById("app");
  requestAnimationFrame(() => setTimeout(() => {
    app.textContent = "";
    render(view, app);
  }));
}

/** 1234567 -> "1,234,567"; `digits` behind the point. */
export const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export function ThemeButton() {
  const [dark, setDark] = useState(globalThis.theme.isDark);
  const toggle = () => {
    globalThis.theme.toggle();
    setDark(globalThis.theme.isDark);
  };
  const label = `Use the ${dark ? "light" : "dark"} theme`;
  return html`<button class="icon" type="button" aria-label=${label} title=${label} onClick=${toggle}>
    ${dark ? "☀" : "☾"}
  </button>`;
}

/** `models`: choices of the model menu, which is shown for more than one. */
export function Bar({ page, model, models = [], choose, children }) {
  const link = (name, href, title) =>
    html`<a href=${href} aria-current=${page === name ? "page" : null}>${title}</a>`;
  return html`<header class="bar">
    <strong class="brand"><img src="web/icon.svg" alt="" width="22" height="22" /><span>headstart</span></strong>
    <nav aria-label="Pages">${link("playground", "./", "Playground")}${link("dashboard", "dashboard", "Dashboard")}</nav>
    ${models.length > 1
      ? html`<select class="models" aria-label="Model" value=${model} onChange=${(event) => choose(event.target.value)}>
          ${models.map((name) => html`<option value=${name}>${name}</option>`)}
        </select>`
      : html`<span class="model" title=${model || ""}>${model || ""}</span>`}
    <span class="tools">${children}<${ThemeButton} /></span>
  </header>`;
}

/** Asks for the API key until the server accepts it. */
export function KeyDialog({ onKey }) {
  const dialog = useRef(null);
  const [wrong, setWrong] = useState(false);
  useEffect(() => dialog.current.showModal(), []);
  const submit = async (event) => {
    event.preventDefault();
    server.setKey(new FormData(event.target).get("key").trim());
    try {
      await server.json("v1/models");
    } catch (error) {
      setWrong(true);
      return;
    }
    dialog.current.close();
    onKey();
  };
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${(event) => event.preventDefault()}>
    <form onSubmit=${submit}>
      <h2 id="key-title">This server needs an API key</h2>
      <label>API key <input name="key" type="password" required autocomplete="off" autofocus /></label>
      <p class="hint">A key of <code>--api-key</code>. It is kept until this tab is closed.</p>
      ${wrong && html`<p class="wrong" role="alert">The server rejects this key.</p>`}
      <p class="actions"><button class="main">Use it</button></p>
    </form>
  </dialog>`;
}
