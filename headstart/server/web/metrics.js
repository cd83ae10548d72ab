// /metrics as numbers, and what the dashboard makes of them.

/** Prometheus text -> Map: name -> [[labels, value]]. */
function parsed(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries([...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]));
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push([labels, Number(match[3])]);
  }
  return found;
}

/** One look at the server: all that is charted. Times in seconds; counts since its start. */
export function sample(text, time) {
  const all = parsed(text);
  const one = (name) => all.get(name)?.[0][1] ?? 0;
  const by = (name, label) => Object.fromEntries((all.get(name) ?? []).map(([labels, value]) => [labels[label], value]));
  const sum = (values) => Object.values(values).reduce((total, value) => total + value, 0);
  const ended = by("vllm:request_success_total", "finished_reason");
  return {
    time,
    running: one("vllm:num_requests_running"),
    waiting: one("vllm:num_requests_waiting"),
    ended: sum(ended),
    failed: (ended.error ?? 0) + (ended.abort ?? 0),
    output: one("vllm:generation_tokens_total"),
    prompt: one("vllm:prompt_tokens_total"),
    drafts: one("vllm:spec_decode_num_drafts_total"),
    drafted: one("vllm:spec_decode_num_draft_tokens_total"),
    accepted: one("vllm:spec_decode_num_accepted_tokens_total"),
    positions: by("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position"),
    sources: by("headstart:accepted_tokens_total", "source"),
    depth: one("headstart:depth"),
    off: one("headstart:spec_disabled") === 1,
    draft: one("headstart:draft_seconds_total"),
    verify: one("headstart:verify_seconds_total"),
    host: one("headstart:host_seconds_total"),
    saved: one("headstart:passes_saved_total"),
    kv: one("vllm:kv_cache_usage_perc"),
    prefixAsked: one("vllm:prefix_cache_queries_total"),
    prefixFound: one("vllm:prefix_cache_hits_total"),
    firstSum: one("vllm:time_to_first_token_seconds_sum"),
    firstCount: one("vllm:time_to_first_token_seconds_count"),
    cost: all.has("headstart:cost_dollars_total") ? one("headstart:cost_dollars_total") : null,
  };
}

/** Change of a count between two samples in units a second; null where nothing is known. */
const rate = (now, then, name) => (then && now.time > then.time ? Math.max(0, now[name] - then[name]) / (now.time - then.time) : null);
const share = (part, whole) => (whole > 0 ? part / whole : null);

const POSITIONS = 4;

/** The charts: `of(now, then)` gives the series' values at a sample, `then` being one some seconds earlier. */
export const CHARTS = [
  {
    title: "Tokens a second", digits: 1,
    series: [["written", "head"], ["read", "forced"]],
    of: (now, then) => [rate(now, then, "output"), rate(now, then, "prompt")],
  },
  {
    title: "Requests", digits: 0,
    series: [["running", "head"], ["waiting", "ngram"]],
    of: (now) => [now.running, now.waiting],
  },
  {
    title: "Depth and tokens a pass", digits: 2,
    series: [["drafted a sequence", "ngram"], ["tokens a pass", "head"]],
    of: (now, then) => {
      const output = then ? now.output - then.output : 0;
      return [now.depth, output > 0 ? share(output, output - (now.saved - then.saved)) : null];
    },
  },
  {
    title: "Drafts accepted up to a place", digits: 0, unit: " %", most: 100,
    series: ["head", "forced", "shared", "ngram"].map((colour, i) => [`place ${i + 1}`, colour]),
    of: (now, then) => {
      const drafts = then ? now.drafts - then.drafts : 0;
      const at = (i) => (now.positions[i] ?? 0) - (then?.positions[i] ?? 0);
      return Array.from({ length: POSITIONS }, (_, i) => (drafts > 0 ? (100 * at(i)) / drafts : null));
    },
  },
  {
    title: "Where the time goes", digits: 0, unit: " %", most: 100, stacked: true,
    series: [["checking (the model)", "forced"], ["drafting", "head"], ["host", "ngram"]],
    of: (now, then) => ["verify", "draft", "host"].map((name) => rate(now, then, name)).map((each) => each && Math.min(100, 100 * each)),
  },
  {
    title: "Passes a second", digits: 1,
    series: [["saved by drafts", "head"], ["made", "forced"]],
    of: (now, then) => {
      const [saved, output] = [rate(now, then, "saved"), rate(now, then, "output")];
      return [saved, output === null ? null : Math.max(0, output - saved)];
    },
  },
  {
    title: "First token", digits: 2, unit: " s",
    series: [["seconds until it", "shared"]],
    of: (now, then) => [then && share(now.firstSum - then.firstSum, now.firstCount - then.firstCount)],
  },
  {
    title: "Prompts from the prefix cache", digits: 0, unit: " %", most: 100,
    series: [["of all tokens read", "shared"]],
    of: (now, then) => {
      const found = then && share(now.prefixFound - then.prefixFound, now.prefixAsked - then.prefixAsked);
      return [found === null ? null : 100 * found];
    },
  },
  {
    title: "KV cache in use", digits: 1, unit: " %", most: 100,
    series: [["of all blocks", "shared"]],
    of: (now) => [100 * now.kv],
  },
];

const DEAD = 0.05;
const ENOUGH = 20;

/** How the head does, in a word, and why. `then`: some minutes ago, or the server's start. */
export function health(now, then) {
  if (now.off) return ["bad", "Off", "It was wrong so often that drafting was switched off; see the server's log."];
  const drafts = now.drafts - then.drafts;
  if (drafts < ENOUGH) return ["idle", "Not tried yet", "Too few drafts lately to say how it does."];
  const first = share((now.positions[0] ?? 0) - (then.positions[0] ?? 0), drafts);
  const says = `${Math.round(100 * first)} % of ${drafts.toLocaleString("en")} drafts began right.`;
  return first < DEAD ? ["bad", "Failing", says] : ["good", "Healthy", says];
}

/** What drafting saved since the start: share of passes, seconds of this machine, dollars where the price is known (and
 * shows between two samples). */
export function savings(now, then) {
  const passes = now.output - now.saved;
  const seconds = share(now.saved * now.verify, passes) - now.draft;
  return { share: share(now.saved, now.output), seconds, dollars: now.cost === null || then === now ? null : rate(now, then, "cost") * seconds };
}
