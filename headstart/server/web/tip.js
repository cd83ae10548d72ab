// Details of the token under the pointer, or of the token that the arrow keys have reached.
import { html, number, useEffect, useLayoutEffect, useRef, useState } from "./ui.js";

const NAMES = {
  ngram: "n-gram lookup in this text",
  shared: "an earlier answer",
  forced: "the grammar, which allows no other token",
  draft_model: "a draft model",
};
const nameOf = (drafter) => NAMES[drafter] ?? `the head (${drafter})`;
const quoted = (text) => JSON.stringify(text);
const percent = (logprob) => `${number(100 * Math.exp(logprob), 1)} %`;

/** Watches the answers inside `root`; `answerAt(place, plain)` finds the one of an element. */
export function Tip({ root, answerAt }) {
  const [shown, setShown] = useState(null);
  const own = useRef(null);
  useEffect(() => {
    const element = root.current;
    const found = (span) => {
      const holder = span?.closest("[data-place]");
      const answer = holder && answerAt(Number(holder.dataset.place), holder.dataset.plain != null);
      const token = answer?.tokens[Number(span.dataset.i)];
      return token ? { token, at: span.getClientRects()[0] } : null;
    };
    const over = (event) => setShown(found(event.target.closest("span.t")));
    const walk = (event) => {
      const holder = event.target.closest(".text[data-place]");
      if (!holder || holder !== event.target) return;
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (event.key === "Escape") leave();
      if (!step) return;
      event.preventDefault();
      const spans = [...holder.querySelectorAll("span.t")];
      const next = spans[spans.findIndex((each) => each.classList.contains("at")) + step] ?? spans[step > 0 ? spans.length - 1 : 0];
      leave();
      next?.classList.add("at");
      next?.scrollIntoView({ block: "nearest" });
      setShown(found(next));
    };
    const leave = () => {
      element.querySelector("span.at")?.classList.remove("at");
      setShown(null);
    };
    const events = { mouseover: over, mouseleave: leave, keydown: walk, focusout: leave, scroll: leave };
    for (const [name, handler] of Object.entries(events)) element.addEventListener(name, handler);
    return () => {
      for (const [name, handler] of Object.entries(events)) element.removeEventListener(name, handler);
    };
  }, []);
  useLayoutEffect(() => {
    if (!shown) return;
    const { width, height } = own.current.getBoundingClientRect();
    const below = shown.at.bottom + 6 + height < innerHeight;
    own.current.style.left = `${Math.max(8, Math.min(shown.at.left, innerWidth - width - 8))}px`;
    own.current.style.top = `${below ? shown.at.bottom + 6 : Math.max(8, shown.at.top - height - 6)}px`;
  }, [shown]);
  return html`<div class="tip" role="status" ref=${own} hidden=${!shown}>${shown && html`<${Token} token=${shown.token} />`}</div>`;
}

function Token({ token }) {
  return html`<p><code>${quoted(token.text)}</code> <span class="muted">token ${token.id}, pass ${token.pass}</span></p>
    <p>${token.drafter
      ? html`Drafted by ${nameOf(token.drafter)}${token.score != null && html`, ${number(100 * token.score)} % confidence`}: accepted.`
      : "Not drafted: sampled by the model itself."}</p>
    ${token.rejected && html`<p class="rejected">Rejected here: ${token.rejected.map(
      (each, i) => html`${i > 0 && " "}<del>${quoted(each.text)}</del>${each.score != null && ` ${number(100 * each.score)} %`}`,
    )} <span class="muted">by ${nameOf(token.rejectedBy)}</span></p>`}
    ${token.logprob != null && html`<p>Probability <b>${percent(token.logprob)}</b> <span class="muted">(log ${number(token.logprob, 3)})</span></p>`}
    ${token.top?.length > 0 && html`<table><tbody>${token.top.map(
      ([text, logprob]) => html`<tr><td><code>${quoted(text)}</code></td>
        <td><meter min="0" max="1" value=${Math.exp(logprob)} aria-label=${text}></meter></td><td class="right">${percent(logprob)}</td></tr>`,
    )}</tbody></table>`}`;
}
