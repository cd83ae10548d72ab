// Conversations in IndexedDB. Each message has its own entry, so a long history is not rewritten for a new message.
import { createStore, delMany, get, getMany, set, setMany } from "./vendor/idb-keyval.js";

const store = createStore("headstart", "conversations");
const INDEX = "index";
const keys = (id, from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => [id, from + i]);

export const fresh = () => ({ id: crypto.getRandomValues(new Uint32Array(2)).join(""), title: "", messages: [] });

/** Newest first: [{id, title, count}]. */
export const listed = async () => (await get(INDEX, store).catch(() => [])) ?? [];

export async function load(entry) {
  const messages = (await getMany(keys(entry.id, 0, entry.count), store)).filter(Boolean);
  return { id: entry.id, title: entry.title, messages };
}

/** Save messages from number `from` on; returns the new index. */
export async function save({ id, title, messages }, from) {
  const index = await listed();
  const before = index.find((each) => each.id === id)?.count ?? 0;
  const next = [{ id, title, count: messages.length }, ...index.filter((each) => each.id !== id)];
  await setMany(keys(id, from, messages.length).map((key, i) => [key, messages[from + i]]), store);
  await set(INDEX, next, store);
  await delMany(keys(id, messages.length, before), store);
  return next;
}

export async function remove(entry) {
  const next = (await listed()).filter((each) => each.id !== entry.id);
  await set(INDEX, next, store);
  await delMany(keys(entry.id, 0, entry.count), store);
  return next;
}

/** A conversation as Markdown. */
export function asMarkdown({ title, messages }, system) {
  const parts = [`# ${title || "Conversation"}`];
  if (system) parts.push(`**System**\n\n${system}`);
  for (const each of messages) {
    if (each.role !== "assistant") {
      const images = (each.images ?? []).map((url, i) => `![Image ${i + 1}](${url})`);
      parts.push([`**${each.role === "tool" ? "Tool" : "You"}**`, ...images, each.content].join("\n\n"));
    } else {
      const calls = each.answer.calls.map((call) => `\`${call.name}(${call.arguments})\``);
      parts.push(["**Model**", each.answer.text, ...calls].filter(Boolean).join("\n\n"));
    }
  }
  return `${parts.join("\n\n")}\n`;
}

export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
