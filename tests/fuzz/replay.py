"""Mixed requests in company, then some of them alone on the idle server: the same bytes, logprobs included."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import sys
import threading
import time
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz import monitor
from tests.fuzz.client import Answer, send

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CLIENTS = 16
TEXTS = (
    "Name a colour.", "Tell me a long story about a fox.", "Write a poem.", "What is 7 + 5?", "x " * 300, "def f(",
    "Zähle auf: 1, 2,", "\u4f60\u597d", "{", "The quick brown fox jumps over the lazy dog. " * 20,
)  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 30}, "b": {"enum": [1, 2]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
VOCAB = 49152


def _either(path: str, rng: random.Random) -> dict[str, Any]:
    """Some of the options, by chance."""
    chat = path == CHAT
    options: tuple[dict[str, Any], ...] = (
        {"temperature": rng.choice([0, 0.3, 0.7, 1.0, 1.5])}, {"top_p": rng.choice([0.5, 0.9])},
        {"top_k": rng.choice([1, 20, 200])}, {"min_p": rng.choice([0.05, 0.2])},
        {"presence_penalty": rng.uniform(-2, 2), "frequency_penalty": rng.uniform(-2, 2)},
        {"repetition_penalty": rng.uniform(0.8, 1.5)},
        {"logit_bias": {str(rng.randrange(VOCAB)): rng.uniform(-100, 100) for _ in range(rng.choice((1, 50)))}},
        {"stop": rng.choice(["the", ". ", ["\n", "and"]])}, {"min_tokens": 1}, {"ignore_eos": True},
        {"stop_token_ids": [rng.randrange(VOCAB)]}, {"n": rng.randrange(1, 4)}, {"return_token_ids": True},
        {"speculation": rng.choice([{"mode": "off"}, {"depth": rng.randrange(8)}])},
        {"logprobs": True, "top_logprobs": rng.randrange(6)} if chat else {"logprobs": rng.randrange(6)},
        {"prompt_logprobs": rng.randrange(4)}, {} if chat else {"echo": True, "logprobs": rng.randrange(3)},
        rng.choice(({"guided_regex": "[a-z ]{5,40}"}, {"guided_choice": ["red", "green", "blue"]},
                    {"response_format": {"type": "json_object"}}, {"guided_json": SCHEMA})),
    )  # fmt: skip
    found: dict[str, Any] = {}
    for option in rng.sample(options, rng.randrange(5)):
        found |= option
    return found


def request(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """Right requests of every kind, streamed and whole."""
    rng = random.Random(f"{seed} replay {number}")
    path = rng.choice((CHAT, TEXT))
    text = rng.choice(TEXTS) + rng.choice(("", " Again.", str(number)))
    prompt: Any = rng.choice((text, [text, "Two."], [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 60))]))
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": prompt}
    body |= {"max_tokens": rng.choice([1, 4, 16, 40]), "seed": rng.getrandbits(40), "stream": rng.random() < 0.5}
    return path, body | _either(path, rng)


def comparable(answer: Answer) -> Any:
    """Everything of an answer that must not depend on company; the pieces of a stream joined by choice."""
    if not answer.is_stream:
        return {**json.loads(answer.body), "id": "", "created": 0, "usage": None}
    joined: dict[int, list[Any]] = {}
    for event in answer.events():
        for choice in event["choices"] if isinstance(event, dict) and "choices" in event else ():
            joined.setdefault(choice["index"], []).append(choice)
        if isinstance(event, dict) and "error" in event:
            joined.setdefault(-1, []).append(event)
    return {index: _joined(choices) for index, choices in joined.items()}


def _joined(pieces: list[Any]) -> Any:
    """Texts and lists one after the other, of other values the last that is there."""
    if all(isinstance(piece, str) for piece in pieces):
        return "".join(pieces)
    if all(isinstance(piece, list) for piece in pieces):
        return [each for piece in pieces for each in piece]
    if all(isinstance(piece, dict) for piece in pieces):
        names = dict.fromkeys(name for piece in pieces for name in piece)
        return {name: _joined([p[name] for p in pieces if p.get(name) is not None]) for name in names}
    return pieces[-1] if pieces else None


def company(seed: int, first: int, last: int, url: str, keep: set[int], pipe: Connection) -> None:
    """Requests first .. last - 1 by several clients at once; answers that are to be replayed go back."""
    numbers, lock, kept, statuses = iter(range(first, last)), threading.Lock(), dict[int, Any](), Counter[int]()

    def client() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            answer = send(url, *request(seed, number), timeout=600)
            with lock:
                statuses[answer.status] += 1
                if number in keep:
                    kept[number] = (answer.status, comparable(answer) if answer.status == 200 else answer.body)

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((dict(statuses), kept))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--replays", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="other options for `headstart serve`, after --")


def run(arguments: argparse.Namespace) -> int:
    from process import running

    options = arguments.serve or ("--max-num-seqs", "16", "--max-model-len", "2048")
    with running(*options) as server:
        spawn = multiprocessing.get_context("spawn")
        looking, eye = spawn.Pipe()
        spawn.Process(target=monitor.watch, args=(server.url, server.process.pid, eye), daemon=True).start()
        rng = random.Random(arguments.seed)
        keep = set(rng.sample(range(arguments.requests), min(arguments.replays, arguments.requests)))
        pipe, end = spawn.Pipe()
        begun = time.monotonic()
        given = (arguments.seed, 0, arguments.requests, server.url, keep, end)
        spawn.Process(target=company, args=given, daemon=True).start()
        statuses, kept = pipe.recv()
        seconds = time.monotonic() - begun
        looking.send("end")
        found, different = monitor.summary(looking.recv()), []
        for number, (status, before) in sorted(kept.items()):
            answer = send(server.url, *request(arguments.seed, number), timeout=600)
            after = comparable(answer) if answer.status == 200 else answer.body
            if (status, before) != (answer.status, after):
                different.append(number)
                print(
                    f"{number}: {request(arguments.seed, number)}\n  {before}\n  {after}", file=sys.stderr, flush=True
                )
        result = {"requests": arguments.requests, "seconds": round(seconds, 1), "statuses": statuses,
                  "replayed": len(kept), "different": different, "monitor": found}  # fmt: skip
        print(json.dumps(result, indent=1))
        return 1 if different or found["num_wrong"] else 0
