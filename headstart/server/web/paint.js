// Finds the token of each visible character. Markdown removes characters, so pieces of visible text are searched one
// after the other in the joined text of the tokens.
import { html } from "./ui.js";

const NEAR = 400; // maximum length of markup between two pieces
const KINDS = { ngram: "ngram", shared: "shared", forced: "forced" };

export const kindOf = (drafter) => KINDS[drafter] ?? "head";
const shade = (score) => (score == null ? 2 : Math.min(4, Math.floor(score * 5)));

function classOf(token) {
  let name = "t";
  if (token.drafter) name += ` k-${kindOf(token.drafter)} s${shade(token.score)}`;
  return token.rejected ? `${name} r` : name;
}

/** Wraps the visible pieces of one answer in spans of tokens, in order. */
export class Painter {
  constructor(tokens) {
    this.tokens = tokens;
    this.raw = tokens.map((token) => token.text).join("");
    this.at = 0; // characters of raw that are done
    this.index = 0; // token that holds character `at`
    this.start = 0; // where it starts
  }

  paint = (piece) => {
    const whole = this.find(piece);
    if (whole >= 0) return this.spans(piece, whole);
    return piece.split(/(\s+)/).map((word) => {
      const place = word ? this.find(word) : -1;
      return place < 0 ? word : this.spans(word, place);
    });
  };

  find(piece) {
    const place = this.raw.indexOf(piece, this.at);
    return place - this.at > NEAR ? -1 : place;
  }

  spans(piece, place) {
    const parts = [];
    const end = place + piece.length;
    this.at = place;
    while (this.at < end) {
      const token = this.tokens[this.index];
      const stop = this.start + token.text.length;
      if (stop <= this.at) {
        this.start = stop;
        this.index += 1;
        continue;
      }
      const upTo = Math.min(stop, end);
      const shown = piece.slice(this.at - place, upTo - place);
      parts.push(html`<span class=${classOf(token)} data-i=${this.index}>${shown}</span>`);
      this.at = upTo;
    }
    return parts;
  }
}
