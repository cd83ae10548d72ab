// Requests to the server. The API key is kept until the tab is closed.
const KEY = "headstart.key";

/** `status`: HTTP status; 0 without a response. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export const setKey = (key) => sessionStorage.setItem(KEY, key);

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  const key = sessionStorage.getItem(KEY);
  if (key) headers.Authorization = `Bearer ${key}`;
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer. Is it running?", 0);
  }
  if (answer.ok) return answer;
  const said = await answer.json().catch(() => null);
  throw new ServerError(said?.error?.message ?? `The server answered ${answer.status}.`, answer.status);
}

const posted = (path, body, signal) => ask(path, {
  method: "POST",
  headers: { "Content-Type": "application/json" },
  body: JSON.stringify(body),
  signal,
});

/** isPlain: no chat template, the model continues texts. readsImages: it has a vision tower. recommended: sampling parameters. */
export async function describe(model) {
  const { template, parameters, capabilities } = await (await posted("api/show", { model })).json();
  const recommended = Object.fromEntries(parameters.split("\n").filter(Boolean).map((line) => line.split(" ")));
  return { isPlain: !template, readsImages: capabilities.includes("vision"), recommended };
}

export const json = async (path) => (await ask(path)).json();
export const text = async (path) => (await ask(path)).text();

/** The chunks of a streamed answer. Throws ServerError for what the server says, and where the connection breaks. */
export async function* stream(body, signal) {
  const path = body.messages ? "v1/chat/completions" : "v1/completions";
  const answer = await posted(path, { ...body, stream: true }, signal);
  let done = false;
  for await (const data of events(answer.body.getReader())) {
    if (data === "[DONE]") {
      done = true; // the end of the connection follows
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message, chunk.error.code);
    yield chunk;
  }
  if (!done) throw new ServerError("The connection was lost. The text received so far is kept.", 0);
}

/** The data of server-sent events. */
async function* events(reader) {
  const decoder = new TextDecoder();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const pieces = (held + decoder.decode(value, { stream: true })).split("\n\n");
      held = pieces.pop();
      for (const piece of pieces) if (piece.startsWith("data: ")) yield piece.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection was lost. The text received so far is kept.", 0);
  } finally {
    reader.cancel().catch(() => {});
  }
}
