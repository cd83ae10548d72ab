// Markdown as elements, without a detour through HTML text: nothing that a model writes becomes markup of this page.
import { lexer } from "./vendor/marked.js";
import { pieces } from "./syntax.js";
import { html } from "./ui.js";

const LINKS = /^(https?:|mailto:)/i;
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function decoded(text) {
  return text.replace(/&(#\d{1,7}|#x[\da-f]{1,6}|\w{2,6});/gi, (whole, name) => {
    if (name[0] !== "#") return ENTITIES[name.toLowerCase()] ?? whole;
    const code = name[1].toLowerCase() === "x" ? parseInt(name.slice(2), 16) : parseInt(name.slice(1), 10);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

/** `paint` makes what is shown of each visible piece of text; pieces come in order. */
export function markdown(text, paint) {
  return blocks(lexer(text), paint);
}

const blocks = (tokens, paint) => tokens.map((token) => block(token, paint));

function block(token, paint) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return html`<p class=${`heading h${token.depth}`} role="heading" aria-level=${Math.min(6, token.depth + 2)}>
        ${inline(token.tokens, paint)}
      </p>`;
    case "code":
      return codeBlock(token, paint);
    case "blockquote":
      return html`<blockquote>${blocks(token.tokens, paint)}</blockquote>`;
    case "hr":
      return html`<hr />`;
    case "list":
      return list(token, paint);
    case "table":
      return table(token, paint);
    case "paragraph":
      return html`<p>${inline(token.tokens, paint)}</p>`;
    case "text":
      return token.tokens ? inline(token.tokens, paint) : paint(token.text);
    default:
      return html`<p>${paint(token.raw.trimEnd())}</p>`; // markup of HTML, shown as it is written
  }
}

function codeBlock(token, paint) {
  const copy = (event) => navigator.clipboard?.writeText(token.text).then(() => flash(event.target));
  return html`<figure class="code">
    <figcaption><span>${token.lang || "code"}</span><button type="button" onClick=${copy}>Copy</button></figcaption>
    <pre tabindex="0"><code>${pieces(token.text, token.lang).map(
      ([kind, text]) => (kind ? html`<span class=${`code-${kind}`}>${paint(text)}</span>` : paint(text)),
    )}</code></pre>
  </figure>`;
}

function flash(button) {
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1200);
}

function list(token, paint) {
  const items = token.items.map(
    (item) => html`<li>
      ${item.task && html`<input type="checkbox" disabled checked=${item.checked} aria-label="done" /> `}
      ${blocks(item.tokens.filter((each) => each.type !== "checkbox"), paint)}
    </li>`,
  );
  return token.ordered ? html`<ol start=${token.start}>${items}</ol>` : html`<ul>${items}</ul>`;
}

function table(token, paint) {
  const cell = (each, name) => html`<${name} class=${each.align || ""}>${inline(each.tokens, paint)}</${name}>`;
  return html`<div class="table" tabindex="0" role="group" aria-label="Table">
    <table>
      <thead><tr>${token.header.map((each) => cell(each, "th"))}</tr></thead>
      <tbody>${token.rows.map((row) => html`<tr>${row.map((each) => cell(each, "td"))}</tr>`)}</tbody>
    </table>
  </div>`;
}

const inline = (tokens, paint) => tokens.map((token) => span(token, paint));

function span(token, paint) {
  switch (token.type) {
    case "strong":
      return html`<strong>${inline(token.tokens, paint)}</strong>`;
    case "em":
      return html`<em>${inline(token.tokens, paint)}</em>`;
    case "del":
      return html`<del>${inline(token.tokens, paint)}</del>`;
    case "codespan":
      return html`<code>${paint(token.text)}</code>`;
    case "br":
      return html`<br />`;
    case "link":
    case "image": // images from elsewhere are not loaded
      return link(token, paint);
    case "escape":
      return paint(token.text);
    case "text":
      return token.tokens ? inline(token.tokens, paint) : paint(decoded(token.text));
    default:
      return paint(token.raw);
  }
}

function link(token, paint) {
  const shown = token.tokens?.length ? inline(token.tokens, paint) : paint(token.text || token.href);
  if (!LINKS.test(token.href)) return shown;
  return html`<a href=${token.href} target="_blank" rel="noopener noreferrer nofollow">${shown}</a>`;
}
