// One message of a conversation.
import { bytesOf, firstDifference, speed } from "./answer.js";
import { markdown } from "./markdown.js";
import { Painter } from "./paint.js";
import { Images } from "./images.js";
import { html, memo, number, useState } from "./ui.js";

export const Message = memo(({ message, place, running, actions }) => {
  if (message.role === "user") {
    return html`<${Question} ...${{ message, place, actions }} />`;
  }
  if (message.role === "tool") {
    return html`<article class="message tool" aria-label="Result of a tool">
      <h2>Result of ${message.name}</h2><pre tabindex="0">${message.content}</pre>
    </article>`;
  }
  const { answer, plain } = message;
  return html`<article class="message reply" aria-label="Model" aria-busy=${running}>
    ${plain
      ? html`<div class="pair">
            <${Answer} ...${{ answer, place, title: "With drafting", ...grown(answer) }} />
            <${Answer} ...${{ answer: plain, place, plain: true, title: "Without drafting", ...grown(plain) }} />
          </div><${Verdict} ...${{ answer, plain, running }} />`
      : html`<${Answer} ...${{ answer, place, ...grown(answer) }} />`}
    ${!running && html`<${After} ...${{ message, place, actions }} />`}
  </article>`;
});

function Question({ message, place, actions }) {
  const [text, setText] = useState(null); // being edited
  const submit = (event) => {
    event.preventDefault();
    setText(null);
    actions.edit(place, text);
  };
  if (text === null) {
    return html`<article class="message user" aria-label="You"><${Images} urls=${message.images} /><div class="said">${message.content}</div>
      <p class="edit"><button type="button" class="quiet" onClick=${() => setText(message.content)}>Edit</button></p>
    </article>`;
  }
  return html`<form class="message user" onSubmit=${submit} onKeyDown=${(event) => event.key === "Escape" && setText(null)}>
    <textarea rows="3" aria-label="Edited message" value=${text} onInput=${(event) => setText(event.target.value)}></textarea>
    <p><button class="main" disabled=${!text.trim()}>Send</button>
      <button type="button" class="quiet" onClick=${() => setText(null)}>Cancel</button></p>
  </form>`;
}

/** Properties that change while an answer grows, since the answer stays the same object. */
const grown = ({ tokens, text, finish, error, usage }) => ({ count: tokens.length, length: text.length, finish, error, usage });

const Answer = memo(({ answer, place, plain, title }) => {
  const painter = new Painter(answer.tokens);
  const thoughts = answer.reasoning && html`<details open=${!answer.text}>
    <summary>Thoughts</summary><div class="thoughts">${painter.paint(answer.reasoning)}</div>
  </details>`;
  const text = answer.isJson
    ? html`<pre tabindex="0"><code>${painter.paint(answer.text)}</code></pre>`
    : markdown(answer.text, painter.paint);
  const label = `${title ? `${title}. ` : ""}Answer. Left and right arrow keys walk through its tokens.`;
  return html`<section class="answer">
    ${title && html`<h2>${title}</h2>`}
    <div class="text" role="group" tabindex="0" aria-label=${label} data-place=${place} data-plain=${plain ? "" : null}>
      ${thoughts}${text}${answer.calls.map((call) => html`<${Call} call=${call} />`)}
    </div>
    ${answer.error && html`<p class="wrong" role="alert">${answer.error}</p>`}
    <${Counts} answer=${answer} />
  </section>`;
});

function Call({ call }) {
  let shown = call.arguments;
  try {
    shown = JSON.stringify(JSON.parse(shown), null, 2);
  } catch {
    // incomplete JSON
  }
  return html`<figure class="code call"><figcaption><span>Calls ${call.name}</span></figcaption>
    <pre tabindex="0"><code>${shown}</code></pre></figure>`;
}

function Counts({ answer }) {
  const { tokens, passes, drafted, accepted } = answer;
  if (!passes) return answer.error ? null : html`<p class="counts"><span>Reading the prompt…</span></p>`;
  const rate = speed(answer);
  const seed = answer.usage?.seed ?? answer.seed;
  return html`<p class="counts">
    <span><b>${number(tokens.length)}</b> tokens</span>
    <span><b>${number(passes)}</b> passes</span>
    ${drafted > 0 && html`<span><b>${number(accepted)}</b> of ${number(drafted)} drafted tokens accepted</span>`}
    ${rate > 0 && html`<span><b>${number(rate, 1)}</b> tokens/s</span>`}
    ${seed != null && html`<span>seed ${seed}</span>`}
    ${answer.finish === "length" && html`<span>cut at max tokens</span>`}
  </p>`;
}

function Verdict({ answer, plain, running }) {
  if (running) return html`<p class="verdict" role="status">The same prompt and seed, first with drafting, then without…</p>`;
  if (answer.error || plain.error || !answer.finish || !plain.finish) {
    return html`<p class="verdict bad" role="status">One of the two answers is incomplete, so there is nothing to compare.</p>`;
  }
  const [one, other] = [bytesOf(answer), bytesOf(plain)];
  const place = firstDifference(one, other);
  if (place >= 0) {
    return html`<p class="verdict bad" role="status"><b>Not equal</b>: the texts differ at byte ${number(place)}.</p>`;
  }
  const times = speed(answer) / speed(plain);
  return html`<p class="verdict good" role="status">
    <b>Equal, byte for byte</b>: ${number(one.length)} bytes.${" "}
    ${times > 0 && Number.isFinite(times) && html`<b>${number(times, 2)}×</b> the speed: `}
    ${number(answer.passes)} passes instead of ${number(plain.passes)}.
  </p>`;
}

function After({ message, place, actions }) {
  const copy = () => navigator.clipboard?.writeText(message.answer.text);
  return html`<p class="after">
      <button type="button" class="quiet" onClick=${copy}>Copy</button>
      <button type="button" class="quiet" onClick=${() => actions.retry(place)}>Retry</button>
    </p>
    ${message.answer.finish === "tool_calls" && !message.answered && html`<${Results} ...${{ message, place, actions }} />`}`;
}

function Results({ message, place, actions }) {
  const [results, setResults] = useState({});
  const { calls } = message.answer;
  const submit = (event) => {
    event.preventDefault();
    actions.answerCalls(place, calls.map((call, i) => ({ role: "tool", name: call.name, callId: call.id, content: results[i] ?? "" })));
  };
  return html`<form class="results" onSubmit=${submit}>
    ${calls.map(
      (call, i) => html`<label>What ${call.name} returned
        <textarea rows="2" required onInput=${(event) => setResults({ ...results, [i]: event.target.value })}></textarea>
      </label>`,
    )}
    <button class="main">Send</button>
  </form>`;
}
