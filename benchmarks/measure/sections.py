"""Sections of peers.py: decode, prefill, batch, start. Each returns the lines of its tables and its numbers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from engines.process import Engine, EngineFailed, Starter, WorkerEngine

from measure.machine import load_now, others, verdict
from measure.prompts import Prompts
from measure.start import first_token_s, peak_memory
from measure.tables import Record, rates, speed_table, start_table

Work = Callable[[Engine], Record]
Section = tuple[list[str], Record]


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def attempt(engines: list[Engine], engine: Engine, do: Work) -> Record | None:
    """Runs a turn of an engine. A failed engine is named on stderr and removed from the list."""
    try:
        before = load_now()
        with engine.turn():
            result = do(engine)
        return {**result, **load_now().others_since(before)}
    except EngineFailed as error:
        say(f"LEFT OUT: {error}")
        engines.remove(engine)
        engine.stop()
        return None


def in_turns(engines: list[Engine], work: Sequence[tuple[str, Work]], rounds: int) -> list[Record]:
    """Every unit of work by every engine in alternating order; one record each."""
    records = []
    for number in range(rounds):
        for index, (label, do) in enumerate(work):
            for engine in list(engines) if (number + index) % 2 == 0 else engines[::-1]:
                result = attempt(engines, engine, do)
                if result is not None:
                    records.append({"engine": engine.name, "round": number, "work": label, **result})
        say(f"round {number + 1}/{rounds}")
    remaining = {engine.name for engine in engines}
    return [record for record in records if record["engine"] in remaining]


def warm_up(engines: list[Engine], do: Work, *, loaded_only: bool = False) -> None:
    """Warm-up turns. llama.cpp's tools, which load each time, have their own."""
    for engine in list(engines):
        if isinstance(engine, WorkerEngine) or not loaded_only:
            attempt(engines, engine, do)


def decode(args: argparse.Namespace, engines: list[Engine], prompts: Prompts) -> Section:
    chosen = prompts.per_category(args.per_category)[: args.max_prompts]
    warm_up(engines, lambda engine: engine.decode(chosen[0][1], 8))
    work: list[tuple[str, Work]] = [
        (f"{category} {index}", lambda engine, ids=ids: engine.decode(ids, args.max_tokens))
        for index, (category, ids) in enumerate(chosen)
    ]
    records = in_turns(engines, work, args.rounds)
    speeds = rates(records, lambda record: record["num_tokens"] - 1, "decode_s")
    lines = speed_table(f"decode, {len(chosen)} prompts", engines, {"tokens/s": speeds})
    lines += ["", verdict(others(records))]
    texts = {(each["engine"], each["work"]): each["text"].strip() for each in records}
    same = {engine.name: _same_texts(texts, engine, work, engines) for engine in engines}
    lines += ["", *(f"{name}: {text}" for name, text in same.items() if text)]
    for name, length in _acceptance(records).items():
        lines.append(f"{name}: acceptance length {length:.2f}")
    return lines, {"tokens_per_s": speeds, "same_texts": same, "others_cores": others(records), "records": records}


def _same_texts(texts: Record, engine: Engine, work: Sequence[tuple[str, Work]], engines: Sequence[Engine]) -> str:
    """Number of texts equal to headstart's plain decoding with the same weights, as text."""
    plain = next((e.name for e in engines if e.weights == engine.weights and e.name.endswith(" plain")), None)
    if plain in (None, engine.name):
        return ""
    same = sum(texts[engine.name, label] == texts[plain, label] for label, _ in work)
    return f"{same}/{len(work)} texts are those of {plain}"


def _acceptance(records: Sequence[Record]) -> dict[str, float]:
    """Acceptance length of each drafting engine: 1 + accepted / drafts."""
    found: dict[str, list[int]] = {}
    for record in records:
        if record.get("drafts"):
            counts = found.setdefault(record["engine"], [0, 0])
            counts[0] += record["drafts"]
            counts[1] += record["accepted"]
    return {name: 1 + accepted / drafts for name, (drafts, accepted) in found.items()}


def prefill(args: argparse.Namespace, engines: list[Engine], prompts: Prompts) -> Section:
    prompt = prompts.of_length(args.prefill_tokens, 1)[0]
    warm_up(engines, lambda engine: engine.prefill(prompt), loaded_only=True)
    records = in_turns(engines, [("prefill", lambda engine: engine.prefill(prompt))], args.rounds)
    speeds = rates(records, lambda record: record["num_tokens"], "seconds")
    lines = speed_table(f"prefill, {args.prefill_tokens} tokens", engines, {"tokens/s": speeds})
    lines += ["", verdict(others(records))]
    return lines, {"tokens_per_s": speeds, "others_cores": others(records), "records": records}


def batch(args: argparse.Namespace, engines: list[Engine], prompts: Prompts) -> Section:
    lines: list[str] = []
    found: Record = {}
    for number in args.concurrency:
        say(f"concurrency {number}")
        chosen = prompts.of_length(args.batch_prompt, number)
        warm_up(engines, lambda engine, chosen=chosen: engine.batch(chosen, 2), loaded_only=True)
        work: list[tuple[str, Work]] = [
            (f"batch {number}", lambda engine, chosen=chosen: engine.batch(chosen, args.batch_tokens))
        ]
        records = in_turns(engines, work, args.rounds)
        speeds = {
            "with prompts": rates(records, lambda record: record["num_tokens"], "seconds"),
            "decode": rates(records, lambda record: record["decode_tokens"], "decode_s"),
        }
        lines += speed_table(f"output tokens/s, concurrency {number}", engines, speeds)
        lines += ["", verdict(others(records))]
        found[str(number)] = {"tokens_per_s": speeds, "others_cores": others(records), "records": records}
    return lines, found


def start(args: argparse.Namespace, starters: list[Starter], prompts: Prompts) -> Section:
    text = prompts.text_of_length(args.prefill_tokens)
    seconds: dict[str, list[float]] = {}
    memory: dict[str, dict[str, float]] = {}
    before = load_now()
    for number in range(args.rounds):
        for starter in list(starters) if number % 2 == 0 else list(reversed(starters)):
            try:
                if not number:
                    memory[starter.name] = peak_memory(starter, text, args.batch_tokens)  # also fills the page cache
                seconds.setdefault(starter.name, []).append(first_token_s(starter))
            except EngineFailed as error:
                say(f"LEFT OUT: {starter.name}: {error}")
                starters.remove(starter)
        say(f"round {number + 1}/{args.rounds}")
    load = load_now().others_since(before)
    lines = [*start_table([starter.name for starter in starters], seconds, memory), "", verdict(others([load]))]
    return lines, {"seconds": seconds, "memory": memory, "others_cores": others([load])}
