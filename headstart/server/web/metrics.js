// Parses /metrics and computes the values of the dashboard.

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

/** One sample of all charted values. Times in seconds; counts since the start of the server. */
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

/** Change of a count between two samples, per second; null without an earlier sample. */
const rate = (now, then, name) => (then && now.time > then.time ? Math.max(0, now[name] - then[name]) / (now.time - then.time) : null);
const share = (part, whole) => (whole > 0 ? part / whole : null);

const POSITIONS = 4;

/** The charts. `of(now, then)`: values of the series at a sample; `then`: a sample some seconds earlier. */
export const CHARTS = [
  {
    title: "Tokens per second", digits: 1,
    series: [["output", "head"], ["prompt", "forced"]],
    of: (now, then) => [rate(now, then, "output"), rate(now, then, "prompt")],
  },
  {
    title: "Requests", digits: 0,
    series: [["running", "head"], ["waiting", "ngram"]],
    of: (now) => [now.running, now.waiting],
  },
  {
    title: "Depth and tokens per pass", digits: 2,
    series: [["draft tokens per sequence", "ngram"], ["tokens per pass", "head"]],
    of: (now, then) => {
      const output = then ? now.output - then.output : 0;
      return [now.depth, output > 0 ? share(output, output - (now.saved - then.saved)) : null];
    },
  },
  {
    title: "Acceptance rate by position", digits: 0, unit: " %", most: 100,
    series: ["head", "forced", "shared", "ngram"].map((colour, i) => [`position ${i + 1}`, colour]),
    of: (now, then) => {
      const drafts = then ? now.drafts - then.drafts : 0;
      const at = (i) => (now.positions[i] ?? 0) - (then?.positions[i] ?? 0);
      return Array.from({ length: POSITIONS }, (_, i) => (drafts > 0 ? (100 * at(i)) / drafts : null));
    },
  },
  {
    title: "Time per part", digits: 0, unit: " %", most: 100, stacked: true,
    series: [["verifying (the model)", "forced"], ["drafting", "head"], ["host", "ngram"]],
    of: (now, then) => ["verify", "draft", "host"].map((name) => rate(now, then, name)).map((each) => each && Math.min(100, 100 * each)),
  },
  {
    title: "Passes per second", digits: 1,
    series: [["saved by drafts", "head"], ["run", "forced"]],
    of: (now, then) => {
      const [saved, output] = [rate(now, then, "saved"), rate(now, then, "output")];
      return [saved, output === null ? null : Math.max(0, output - saved)];
    },
  },
  {
    title: "Time to first token", digits: 2, unit: " s",
    series: [["mean", "shared"]],
    of: (now, then) => [then && share(now.firstSum - then.firstSum, now.firstCount - then.firstCount)],
  },
  {
    title: "Prompts from the prefix cache", digits: 0, unit: " %", most: 100,
    series: [["of prompt tokens", "shared"]],
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

const MIN_HEALTHY_SHARE = 0.05; // of drafts whose first token is accepted
const MIN_DRAFTS = 20;

/** State of the head: kind, word, reason. `then`: a sample some minutes ago, or the start of the server. */
export function health(now, then) {
  if (now.off) return ["bad", "Off", "Drafting is paused, since almost no drafts were accepted; see the server's log."];
  const drafts = now.drafts - then.drafts;
  if (drafts < MIN_DRAFTS) return ["idle", "Unknown", "Too few drafts in the last minutes."];
  const first = share((now.positions[0] ?? 0) - (then.positions[0] ?? 0), drafts);
  const says = `The first token of ${Math.round(100 * first)} % of ${drafts.toLocaleString("en")} drafts was accepted.`;
  return first < MIN_HEALTHY_SHARE ? ["bad", "Failing", says] : ["good", "Healthy", says];
}

/** Savings by drafting since the start: share of passes, seconds, dollars (null without a price or an earlier sample). */
export function savings(now, then) {
  const passes = now.output - now.saved;
  const seconds = share(now.saved * now.verify, passes) - now.draft;
  return { share: share(now.saved, now.output), seconds, dollars: now.cost === null || then === now ? null : rate(now, then, "cost") * seconds };
}
