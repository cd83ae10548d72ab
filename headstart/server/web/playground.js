// The playground: conversations, the composer, and requests.
import { asMessages, asText, newAnswer, take } from "./answer.js";
import * as kept from "./conversations.js";
import { Message } from "./messages.js";
import * as server from "./server.js";
import { DEMO_MODEL } from "./parameters.js";
import { ImageButton, Images, excess, readImages } from "./images.js";
import { Settings, fields, loadSettings, problems, saveSettings } from "./settings.js";
import { Tip } from "./tip.js";
import { Bar, Fragment, KeyDialog, html, start, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const SHOWN = 60; // messages; a button shows earlier ones
const DRAW_MS = 120;
const MODES = [["on", "With"], ["off", "Without"], ["both", "Both"]];
const LEGEND = [["head", "the head"], ["ngram", "this text"], ["shared", "earlier answers"], ["forced", "the grammar"]];
const STARTERS = [
  "Why is the sky blue?",
  "Write a Python function that checks whether a word is a palindrome.",
  "Give me three tips for sleeping better.",
];
const PLAIN_STARTERS = ["Once upon a time", "The capital of France is", "def is_palindrome(word):\n"]; // without chat template
const UNKNOWN = { isPlain: false, readsImages: false, recommended: {} };
const LEFT = "This page was closed before the answer was complete.";
const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

function App() {
  const [model, setModel] = useState("");
  const [models, setModels] = useState([]);
  const [needsKey, setNeedsKey] = useState(false);
  const [trouble, setTrouble] = useState("");
  const [known, setKnown] = useState(UNKNOWN);
  const [settings, setSettings] = useState(loadSettings);
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
      const { data } = await server.json("v1/models");
      const names = data.filter(({ root }, i) => data.findIndex((each) => each.root === root) === i).map((each) => each.id); // no aliases
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

  useEffect(() => {
    const escape = (event) => event.key === "Escape" && (running ? running.abort.abort() : setPanel(""));
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, [running]);

  useEffect(() => {
    if (model) server.describe(model).then(setKnown, () => setKnown(UNKNOWN));
  }, [model]);

  const change = (next) => {
    setSettings(next);
    saveSettings(next);
  };
  const wrong = problems(settings);

  /** Redraws the growing message at intervals, since the model may run on this processor, too. */
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

  /** Requests the next message of a conversation and saves it. */
  const ask = async (base, messages, how = mode, from = messages.length - 1) => {
    const asked = asMessages(messages);
    if (settings.system) asked.unshift({ role: "system", content: settings.system });
    const seed = settings.seed === "" ? randomSeed() : Number(settings.seed);
    const isJson = settings.format !== "text";
    const answers = how === "both" ? { answer: newAnswer(true, seed, isJson), plain: newAnswer(false, seed, isJson) } : { answer: newAnswer(how === "on", seed, isJson) };
    const place = messages.length;
    const next = { ...base, messages: [...messages, { role: "assistant", mode: how, ...answers }] };
    if (!next.title) next.title = messages[0].content.slice(0, 60) || "Images";
    setTalk(next);
    const abort = new AbortController();
    setRunning({ place, abort });
    const left = Object.entries(answers).map(([name, answer]) => [name, { ...answer, error: LEFT }]);
    const sofar = { ...next, messages: [...messages, { ...next.messages[place], ...Object.fromEntries(left) }] };
    kept.save(sofar, Math.max(0, from)).then(setIndex, () => {}); // the request survives a reload
    const draw = drawer(next, place);
    for (const answer of Object.values(answers)) {
      const prompt = known.isPlain ? { prompt: asText(asked) } : { messages: asked };
      const body = { ...prompt, ...fields(settings, answer.drafting, known), seed };
      if (models.length > 1) body.model = model;
      if (how === "both") body.cache_salt = `compare-${crypto.randomUUID?.() ?? `${seed}-${performance.now()}`}-${answer.drafting}`;
      if (!abort.signal.aborted) await stream(body, answer, abort.signal, draw);
    }
    setRunning(null);
    setIndex(await kept.save(next, Math.max(0, from)).catch(() => kept.listed()));
  };

  const send = (content, images = []) => ask(talk, [...talk.messages, { role: "user", content, images }]);
  const actions = useRef({});
  Object.assign(actions.current, {
    retry: (place) => {
      if (running) return;
      const { messages } = current.current;
      ask(current.current, messages.slice(0, place), messages[place].mode, place);
    },
    edit: (place, content) => {
      if (running) return;
      const { messages } = current.current;
      ask(current.current, [...messages.slice(0, place), { ...messages[place], content }], mode, place);
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
    <main class="play" data-busy=${running ? "" : null} data-colours=${settings.colours ? "" : null}>
      <h1 class="unseen">Playground</h1>
      <${History} ...${{ index, talk, open, remove, isOpen: panel === "history", busy: !!running, system: settings.system }} />
      <section class="chat" aria-label="Conversation" onClick=${() => panel && setPanel("")}>
        <${Log} ...${{ model, talk, running, actions: actions.current, answerAt, send, isPlain: known.isPlain, colours: settings.colours, ready: !running && !Object.keys(wrong).length }} />
        ${trouble && html`<p class="wrong trouble" role="alert">${trouble} <button type="button" onClick=${connect}>Try again</button></p>`}
        ${known.isPlain && html`<p class="hint plain">No chat template: the model continues your text.${" "}
          <code>--chat-template chatml</code> makes turns of it.</p>`}
        <${Composer} ...${{ send, running, mode, setMode, wrong, isPlain: known.isPlain, readsImages: known.readsImages }} />
      </section>
      <aside id="settings" class=${panel === "settings" ? "side open" : "side"} aria-label="Settings">
        <${Settings} ...${{ settings, change, wrong, ...known }} />
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
    html`<p class="exports">Export:${" "}
      <button type="button" class="quiet" onClick=${() => kept.download(`${name}.md`, kept.asMarkdown(talk, system), "text/markdown")}>Markdown</button>
      <button type="button" class="quiet" onClick=${() => kept.download(`${name}.json`, JSON.stringify({ system, ...talk }, null, 1), "application/json")}>JSON</button>
    </p>`}
    <p class="hint">Kept in this browser only.</p>
  </aside>`;
}

function Log({ model, talk, running, actions, answerAt, send, isPlain, colours, ready }) {
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
  const state = running ? "The model answers" : last ? `The answer is complete: ${last.tokens.length} tokens in ${last.passes} passes` : "";
  return html`<${Fragment}>
    <div class="log" ref=${root} onScroll=${scrolled} tabindex="0" role="region" aria-label="Messages">
      ${messages.length === 0 && html`<${Welcome} ...${{ model, send, isPlain, ready }} />`}
      ${first > 0 &&
      html`<button type="button" class="quiet earlier" onClick=${() => setMore(more + 2 * SHOWN)}>
        Show earlier messages (${first} more)</button>`}
      ${messages.slice(first).map((message, i) => html`<${Message} key=${first + i} message=${message} place=${first + i}
        running=${running?.place === first + i} actions=${actions} />`)}
    </div>
    ${colours && messages.length > 0 && html`<p class="legend">Drafted by ${LEGEND.map(
      ([kind, title]) => html`<span class=${`t k-${kind} s3`}>${title}</span>`,
    )} <span class="muted">stronger: higher confidence; hover: rejected drafts</span></p>`}
    <p class="unseen" role="status">${state}</p>
    <${Tip} ...${{ root, answerAt }} />
  </${Fragment}>`;
}

function Welcome({ model, send, isPlain, ready }) {
  return html`<div class="welcome">
    <h2>See what is drafted</h2>
    <p>The model's own head, or a lookup, drafts the next tokens, and one pass of the model verifies them all. Accepted
      tokens are coloured by their drafter; hover over a token, or move with the arrow keys, to see the confidence and
      the rejected tokens. The text is byte for byte the same as without drafting: choose <b>Both</b> to compare.</p>
    ${model === DEMO_MODEL && html`<p><b>${model} is a tiny demo model</b>, too small to be a useful assistant.${" "}
      <code>headstart models --available</code> lists models worth running.</p>`}
    <p class="starters">${(isPlain ? PLAIN_STARTERS : STARTERS).map(
      (text) => html`<button type="button" disabled=${!ready} onClick=${() => send(text)}>${text}</button>`,
    )}</p>
  </div>`;
}

function Composer({ send, running, mode, setMode, wrong, isPlain, readsImages }) {
  const [text, setText] = useState("");
  const [images, setImages] = useState([]);
  const box = useRef(null);
  const faults = Object.values(wrong);
  const tooMuch = excess(images);
  const ready = !running && !faults.length && !tooMuch && (text.trim() !== "" || images.length > 0);
  useEffect(() => box.current.focus(), []);
  useLayoutEffect(() => {
    box.current.style.height = "auto";
    box.current.style.height = `${Math.min(box.current.scrollHeight + 2, innerHeight / 3)}px`;
  }, [text]);
  const submit = (event) => {
    event.preventDefault();
    if (!ready) return;
    setText("");
    setImages([]);
    send(text, images);
  };
  const add = async (files) => {
    const more = await readImages(files);
    setImages((before) => [...new Set([...before, ...more])]);
  };
  useEffect(() => readsImages || setImages([]), [readsImages]);
  const taken = (event, { files }) => {
    if (!readsImages || !files?.length) return;
    event.preventDefault();
    add(files);
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  return html`<form class="composer" onSubmit=${submit} onDragOver=${(event) => readsImages && event.preventDefault()}
      onDrop=${(event) => taken(event, event.dataTransfer)} onPaste=${(event) => taken(event, event.clipboardData)}>
    <${Images} urls=${images} remove=${(place) => setImages(images.filter((_, i) => i !== place))} />
    <textarea ref=${box} rows="1" aria-label="Message" placeholder=${isPlain ? "Write a text to continue" : "Write a message"}
      value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${typed}></textarea>
    <div class="row">
      <fieldset class="modes"><legend>Drafting</legend>
        ${MODES.map(([name, title]) => html`<label><input type="radio" name="mode" value=${name} checked=${mode === name}
          onChange=${() => setMode(name)} /><span>${title}</span></label>`)}
      </fieldset>
      ${readsImages && html`<${ImageButton} add=${add} />`}
      <span class="hint keys">Enter sends, Escape stops</span>
      ${running
        ? html`<button key="stop" type="button" class="main" onClick=${() => running.abort.abort()}>Stop</button>`
        : html`<button key="send" class="main" disabled=${!ready}>Send</button>`}
    </div>
    ${tooMuch && html`<p class="wrong" role="alert">${tooMuch}</p>`}
    ${faults.length > 0 && html`<p class="wrong" role="alert">In the settings: ${faults.join(" ")}</p>`}
  </form>`;
}

start(html`<${App} />`);
