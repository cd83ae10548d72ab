"""Completions as JSON documents and as one line for people."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from headstart.cli.render import print_aside
from headstart.cli.wrap import Wrap
from headstart.stats import synthetic_note

if TYPE_CHECKING:
    from headstart.api import Completion, TextDelta


def completion_document(completion: Completion) -> dict[str, Any]:
    """What `generate --json` prints; `logprobs` and `choices` only when they were asked for."""
    document: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "usage": {name: completion.usage[name] for name in ("prompt_tokens", "completion_tokens")},
        "speculation": completion.speculation.document(completion.method),
        "timing": {name: completion.timing[name] for name in ("load_s", "ttft_s", "decode_s", "decode_tokens_per_s")},
    }
    if completion.logprobs:
        document["logprobs"] = [asdict(entry) for entry in completion.logprobs]
    if len(completion.choices) > 1:
        document["choices"] = [
            {name: getattr(choice, name) for name in ("index", "text", "token_ids", "finish_reason")}
            for choice in completion.choices
        ]
    return document


def print_stream(
    deltas: Iterator[TextDelta], stopped: Callable[[], bool] = lambda: False, wrap: Wrap | None = None
) -> str:
    """Text on stdout as it comes, until `stopped`, its lines broken by `wrap`; its summary on stderr. Returns the
    text."""
    text = ""
    for delta in deltas:
        print(wrap.push(delta.text) if wrap else delta.text, end="", flush=True)
        text += delta.text
        if delta.completion is not None:
            print(wrap.finish() if wrap else "")
            print_aside(summary(delta.completion))
        elif stopped():
            print(wrap.finish() if wrap else "", flush=True)
            print_aside("stopped")
            break
    if isinstance(deltas, Generator):
        deltas.close()  # takes the request out of the engine
    return text


def summary(completion: Completion) -> str:
    """One line: tokens, speed and what drafting did."""
    stats, tokens = completion.speculation, completion.usage["completion_tokens"]
    parts = [f"{tokens} token{'' if tokens == 1 else 's'}"]
    if tokens > 1:  # the first one belongs to the prompt
        parts.append(f"{completion.timing['decode_tokens_per_s']:.1f} tokens/s")
    if stats.drafts:
        parts.append(f"acceptance length {stats.acceptance_length:.2f} ({completion.method})")
    if stats.synthetic:
        parts.append(synthetic_note(stats.synthetic))
    return ", ".join(parts)
