// One answer while it streams: plain data, which IndexedDB can store.

export function newAnswer(drafting, seed, isJson) {
  return {
    drafting, seed, isJson,
    text: "", reasoning: "", calls: [], tokens: [],
    passes: 0, drafted: 0, accepted: 0,
    first: 0, last: 0, atFirst: 0, // milliseconds; tokens of the first chunk, which came with the prompt
    usage: null, finish: null, error: null,
  };
}

/** Add a chunk of the stream. */
export function take(answer, chunk) {
  if (chunk.usage) answer.usage = chunk.usage;
  for (const choice of chunk.choices) {
    const delta = choice.delta ?? { content: choice.text };
    answer.text += delta.content ?? "";
    answer.reasoning += delta.reasoning_content ?? "";
    for (const call of delta.tool_calls ?? []) takeCall(answer.calls, call);
    const begin = answer.tokens.length;
    for (const pass of choice.speculation ?? []) takePass(answer, pass);
    (choice.logprobs?.content ?? []).forEach((entry, i) => {
      const token = answer.tokens[begin + i];
      if (!token) return;
      token.logprob = entry.logprob;
      token.top = entry.top_logprobs.map((each) => [each.token, each.logprob]);
    });
    if (answer.tokens.length > begin) {
      answer.last = performance.now();
      if (!answer.first) [answer.first, answer.atFirst] = [answer.last, answer.tokens.length];
    }
    answer.finish = choice.finish_reason ?? answer.finish;
  }
}

function takeCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", name: "", arguments: "" });
  call.id ||= piece.id ?? "";
  call.name += piece.function?.name ?? "";
  call.arguments += piece.function?.arguments ?? "";
}

function takePass(answer, pass) {
  answer.passes += 1;
  answer.drafted += pass.drafted;
  answer.accepted += pass.accepted;
  for (const { id, text, accepted, score } of pass.tokens) {
    const token = { id, text, pass: answer.passes };
    if (accepted) [token.drafter, token.score] = [pass.drafter, score];
    answer.tokens.push(token);
  }
  if (pass.rejected.length) {
    Object.assign(answer.tokens.at(-1), { rejected: pass.rejected, rejectedBy: pass.drafter });
  }
}

/** Tokens per second after the first chunk; 0 before there are any. */
export function speed(answer) {
  const seconds = (answer.last - answer.first) / 1000;
  return seconds > 0 ? (answer.tokens.length - answer.atFirst) / seconds : 0;
}

/** All content of an answer as bytes, for comparing. */
export function bytesOf(answer) {
  const calls = answer.calls.map((call) => [call.name, call.arguments]);
  return new TextEncoder().encode(answer.reasoning + answer.text + (calls.length ? JSON.stringify(calls) : ""));
}

/** Index of the first byte that differs, or -1 where all are equal. */
export function firstDifference(one, other) {
  const length = Math.max(one.length, other.length);
  for (let i = 0; i < length; i++) if (one[i] !== other[i]) return i;
  return -1;
}

/** Messages of a request. A broken or stopped answer counts as far as it came. */
export function asMessages(messages) {
  return messages.map((each) => {
    if (each.role !== "assistant") return each.role === "tool" ? toolResult(each) : { role: "user", content: contentOf(each) };
    const { text, calls } = each.answer;
    const said = { role: "assistant", content: text };
    if (calls.length) said.tool_calls = calls.map(asCall);
    return said;
  });
}

/** The prompt of a model without chat template: the conversation as one text, each question on a new line. */
export function asText(messages) {
  return messages.reduce((text, { role, content }) => {
    const isNewLine = role !== "assistant" && text && !text.endsWith("\n");
    return text + (isNewLine ? "\n" : "") + content;
  }, "");
}

const contentOf = ({ content, images }) =>
  !images?.length ? content : [...images.map((url) => ({ type: "image_url", image_url: { url } })), { type: "text", text: content }];
const toolResult = (message) => ({ role: "tool", content: message.content, tool_call_id: message.callId });
const asCall = ({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } });
