// The playground: conversations, the composer, and what is sent.
import { asMessages, newAnswer, take } from "./answer.js";
import * as kept from "./conversations.js";
import { Message } from "./messages.js";
import * as server from "./server.js";
import { Settings, fields, keep, kept as keptSettings, problems } from "./settings.js";
import { Tip } from "./tip.js";
import { Bar, Fragment, KeyDialog, html, start, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const SHOWN = 60; // messages; earlier ones are drawn when somebody asks for them
const DRAW_MS = 120;
const MODES = [["on", "With"], ["off", "Without"], ["both", "Both"]];
const LEGEND = [["head", "the head"], ["ngram", "this text"], ["shared", "earlier answers"], ["forced", "the format"]];
const STARTERS = [
  "Explain what a prefix cache is, in three sentences.",
  "Write a Python function that checks whether a word is a palindrome.",
  "Make a table of the planets with their order from the sun.",
];
const LEFT = "This page was left before the answer had come.";
const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

function App() {
  const [model, setModel] = useState("");
  const [models, setModels] = useState([]);
  const [needsKey, setNeedsKey] = useState(false);
  const [trouble, setTrouble] = useState("");
  const [settings, setSettings] = useState(keptSettings);
  const [mode, setMode] = useState("on");
  const [index, setIndex] = useState([]);
  const [talk, setTalk] = useState(kept.fresh);
  const [panel, setPanel] = useState("");
  const [running, setRunning] = useState(null); // {place, abort}
  const [, redraw] = useState(0);
  const current = useRef(talk);
  current.current = talk;

  const connect = async () => {
    try {
      const names = (await server.json("v1/models")).data.map((each) => each.id);
      setModels(names);
      setModel((chosen) => (names.includes(chosen) ? chosen : names[0]));
      setTrouble("");
    } catch (error) {
      if (error.status === 401) setNeedsKey(true);
      else setTrouble(error.message);
    }
  };
  useEffect(() => {
    connect();
    kept.listed().then(setIndex);
  }, []);

  const change = (next) => {
    setSettings(next);
    keep(next);
  };
  const wrong = problems(settings);

  /** Draws the growing message again, now and then: the model may want this processor, too. */
  const drawer = (talk, place) => {
    let timer = 0;
    return () => {
      timer ||= setTimeout(() => {
        timer = 0;
        talk.messages[place] = { ...talk.messages[place] };
        redraw((count) => count + 1);
      }, DRAW_MS);
    };
  };

  const stream = async (body, answer, signal, draw) => {
    try {
      for await (const chunk of server.stream(body, signal)) {
        take(answer, chunk);
        draw();
      }
    } catch (error) {
      if (error.status === 401) setNeedsKey(true);
      answer.error = error.name === "AbortError" ? "Stopped." : error.message;
    }
    draw();
  };

  /** Ask for the message behind those of `talk`, and keep it. */
  const ask = async (base, messages, how = mode, from = messages.length - 1) => {
    const asked = asMessages(messages);
    if (settings.system) asked.unshift({ role: "system", content: settings.system });
    const seed = settings.seed === "" ? randomSeed() : Number(settings.seed);
    const isJson = settings.format !== "text";
    const answers = how === "both" ? { answer: newAnswer(true, seed, isJson), plain: newAnswer(false, seed, isJson) } : { answer: newAnswer(how === "on", seed, isJson) };
    const place = messages.length;
    const next = { ...base, messages: [...messages, { role: "assistant", mode: how, ...answers }] };
    if (!next.title) next.title = messages[0].content.slice(0, 60);
    setTalk(next);
    const abort = new AbortController();
    setRunning({ place, abort });
    const left = Object.entries(answers).map(([name, answer]) => [name, { ...answer, error: LEFT }]);
    const sofar = { ...next, messages: [...messages, { ...next.messages[place], ...Object.fromEntries(left) }] };
    kept.save(sofar, Math.max(0, from)).then(setIndex, () => {}); // what was asked outlives a reload
    const draw = drawer(next, place);
    for (const answer of Object.values(answers)) {
      const body = { messages: asked, ...fields(settings, answer.drafting), seed };
      if (models.length > 1) body.model = model;
      if (how === "both") body.cache_salt = `compare-${crypto.randomUUID?.() ?? `${seed}-${performance.now()}`}-${answer.drafting}`;
      if (!abort.signal.aborted) await stream(body, answer, abort.signal, draw);
    }
    setRunning(null);
    setIndex(await kept.save(next, Math.max(0, from)).catch(() => kept.listed()));
  };

  const send = (text) => ask(talk, [...talk.messages, { role: "user", content: text }]);
  const actions = useRef({});
  Object.assign(actions.current, {
    retry: (place) => {
      if (running) return;
      const { messages } = current.current;
      ask(current.current, messages.slice(0, place), messages[place].mode, place);
    },
    answerCalls: (place, results) => {
      const messages = [...current.current.messages];
      messages[place] = { ...messages[place], answered: true };
      ask(current.current, [...messages, ...results], mode, place);
    },
  });
  const answerAt = (place, plain) => current.current.messages[place]?.[plain ? "plain" : "answer"];
  const open = async (entry) => {
    setTalk(entry ? await kept.load(entry) : kept.fresh());
    setPanel("");
  };
  const remove = async (entry) => {
    setIndex(await kept.remove(entry));
    if (entry.id === talk.id) setTalk(kept.fresh());
  };
  const toggle = (name) => setPanel(panel === name ? "" : name);
  const button = (name, title, icon) => html`<button type="button" class="opens" aria-expanded=${panel === name}
    aria-controls=${name} aria-label=${title} title=${title} onClick=${() => toggle(name)}>${icon}</button>`;
  return html`<${Bar} ...${{ page: "playground", model, models, choose: setModel }}>${button("history", "History", "☰")}${button("settings", "Settings", "⚙")}</${Bar}>
    <main class="play" data-busy=${running ? "" : null} data-colours=${settings.colours ? "" : null} onKeyDown=${(event) => {
      if (event.key === "Escape") running ? running.abort.abort() : setPanel("");
    }}>
      <h1 class="unseen">Playground</h1>
      <${History} ...${{ index, talk, open, remove, isOpen: panel === "history", busy: !!running, system: settings.system }} />
      <section class="chat" aria-label="Conversation" onClick=${() => panel && setPanel("")}>
        <${Log} ...${{ talk, running, actions: actions.current, answerAt, send, colours: settings.colours, ready: !running && !Object.keys(wrong).length }} />
        ${trouble && html`<p class="wrong trouble" role="alert">${trouble} <button type="button" onClick=${connect}>Try again</button></p>`}
        <${Composer} ...${{ send, running, mode, setMode, wrong }} />
      </section>
      <aside id="settings" class=${panel === "settings" ? "side open" : "side"} aria-label="Settings">
        <${Settings} ...${{ settings, change, wrong }} />
      </aside>
    </main>
    ${needsKey && html`<${KeyDialog} onKey=${() => {
      setNeedsKey(false);
      connect();
    }} />`}`;
}

function History({ index, talk, open, remove, isOpen, busy, system }) {
  const name = (talk.title || "conversation").replace(/[^\w]+/g, "-").slice(0, 40);
  return html`<aside id="history" class=${isOpen ? "side open" : "side"} aria-label="Conversations">
    <button type="button" class="main wide" disabled=${busy} onClick=${() => open(null)}>New conversation</button>
    <ul class="talks">
      ${index.map(
        (entry) => html`<li key=${entry.id}>
          <button type="button" class="talk" disabled=${busy} aria-current=${entry.id === talk.id ? "true" : null}
            onClick=${() => open(entry)}>${entry.title}</button>
          <button type="button" class="icon" disabled=${busy} aria-label=${`Delete ${entry.title}`} title="Delete"
            onClick=${() => remove(entry)}>×</button>
        </li>`,
      )}
    </ul>
    ${talk.messages.length > 0 &&
    html`<p class="exports">Export this one:${" "}
      <button type="button" class="quiet" onClick=${() => kept.download(`${name}.md`, kept.asMarkdown(talk, system), "text/markdown")}>Markdown</button>
      <button type="button" class="quiet" onClick=${() => kept.download(`${name}.json`, JSON.stringify({ system, ...talk }, null, 1), "application/json")}>JSON</button>
    </p>`}
    <p class="hint">Kept in this browser only.</p>
  </aside>`;
}

function Log({ talk, running, actions, answerAt, send, colours, ready }) {
  const root = useRef(null);
  const follows = useRef(true);
  const [more, setMore] = useState(0);
  const { messages } = talk;
  const first = Math.max(0, messages.length - SHOWN - more);
  useEffect(() => {
    setMore(0);
    follows.current = true;
  }, [talk.id]);
  useLayoutEffect(() => {
    if (follows.current) root.current.scrollTop = root.current.scrollHeight;
  });
  useEffect(() => {
    if (running) follows.current = true;
  }, [running]);
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = root.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  const last = messages.at(-1)?.answer;
  const state = running ? "The model answers" : last ? `The answer is there: ${last.tokens.length} tokens in ${last.passes} passes` : "";
  return html`<${Fragment}>
    <div class="log" ref=${root} onScroll=${scrolled} tabindex="0" role="region" aria-label="Messages">
      ${messages.length === 0 && html`<${Welcome} ...${{ send, ready }} />`}
      ${first > 0 &&
      html`<button type="button" class="quiet earlier" onClick=${() => setMore(more + 2 * SHOWN)}>
        Show earlier messages (${first} more)</button>`}
      ${messages.slice(first).map((message, i) => html`<${Message} key=${first + i} message=${message} place=${first + i}
        running=${running?.place === first + i} actions=${actions} />`)}
    </div>
    ${colours && messages.length > 0 && html`<p class="legend">Drafted by ${LEGEND.map(
      ([kind, title]) => html`<span class=${`t k-${kind} s3`}>${title}</span>`,
    )} <span class="t r">rejected here</span> <span class="muted">stronger: surer</span></p>`}
    <p class="unseen" role="status">${state}</p>
    <${Tip} ...${{ root, answerAt }} />
  </${Fragment}>`;
}

function Welcome({ send, ready }) {
  return html`<div class="welcome">
    <h2>See what is drafted</h2>
    <p>The model's own head guesses the next tokens, one pass of the model checks them all. Guesses that were right are
      coloured by who made them; hover over a token, or walk with the arrow keys, to see how sure it was and what was
      rejected. The text is byte for byte what the model writes without: choose <b>Both</b> to see it.</p>
    <p class="starters">${STARTERS.map(
      (text) => html`<button type="button" disabled=${!ready} onClick=${() => send(text)}>${text}</button>`,
    )}</p>
  </div>`;
}

function Composer({ send, running, mode, setMode, wrong }) {
  const [text, setText] = useState("");
  const box = useRef(null);
  const faults = Object.values(wrong);
  const ready = !running && !faults.length && text.trim() !== "";
  useEffect(() => box.current.focus(), []);
  useLayoutEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(box.current.scrollHeight + 2, innerHeight / 3)}px`;
  }, [text]);
  const submit = (event) => {
    event.preventDefault();
    if (!ready) return;
    setText("");
    send(text);
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="composer" onSubmit=${submit}>
    <textarea ref=${box} rows="1" aria-label="Message" placeholder="Say something"
      value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${typed}></textarea>
    <div class="row">
      <fieldset class="modes"><legend>Drafting</legend>
        ${MODES.map(([name, title]) => html`<label><input type="radio" name="mode" value=${name} checked=${mode === name}
          onChange=${() => setMode(name)} /><span>${title}</span></label>`)}
      </fieldset>
      <span class="hint keys">Enter sends, Escape stops</span>
      ${running
        ? html`<button key="stop" type="button" class="main" onClick=${() => running.abort.abort()}>Stop</button>`
        : html`<button key="send" class="main" disabled=${!ready}>Send</button>`}
    </div>
    ${faults.length > 0 && html`<p class="wrong" role="alert">In the settings: ${faults.join(" ")}</p>`}
  </form>`;
}

start(html`<${App} />`);
