"""Forms in which chat templates read tool calls, and a conversation that shows which form a template writes."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Any

PROBE = "a probe"
PROBE_TOOLS = [{"type": "function", "function": {
    "name": "known", "description": "", "parameters": {"type": "object", "properties": {}}
}}]  # fmt: skip
CALLING: tuple[Mapping[str, Any], ...] = (
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call_0", "type": "function", "function": {"name": "called", "arguments": {"argument": PROBE}}},
        {"id": "call_1", "type": "function", "function": {"name": "too", "arguments": {}}},
    ]},
    {"role": "tool", "tool_call_id": "call_0", "content": "its result"},
    {"role": "tool", "tool_call_id": "call_1", "content": "another"},
)  # fmt: skip
"""A conversation with two calls."""
CALLING_TEXTS = ("called", PROBE, "its result", "another")
CALLING_PROBES = (
    ((*CALLING, {"role": "user", "content": "what follows"}), (*CALLING_TEXTS, "what follows")),
    (CALLING, CALLING_TEXTS),
)
"""Conversations with calls, and the texts that a template must write. In the first the user speaks right after results:
Claude Code sends texts beside results, and users interrupt agents. Templates that refuse it get the second."""
BRIDGE: Mapping[str, Any] = {"role": "assistant", "content": "OK."}
"""Message between results and the user, for templates that demand one of the assistant there."""


@dataclass(frozen=True)
class CallForm:
    """How a template reads messages with calls. Most read an empty text beside them, and arguments as an object."""

    is_null: bool = False  # the content of a message with calls alone is null (DeepSeek V3)
    is_text: bool = False  # arguments are JSON texts (DeepSeek V3, Functionary)
    is_short: bool = False  # ids are nine letters or digits (Mistral)
    is_single: bool = False  # a message has one call, and its result follows (Llama 3)
    is_bridged: bool = False  # BRIDGE stands between results and a message of the user (Mistral)

    def applied(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """The messages in this form. Calls and results without ids get them in their order."""
        num_calls, num_results, found = count(), count(), list[Mapping[str, Any]]()
        for message in _one_by_one(messages) if self.is_single else messages:
            if message.get("tool_calls"):
                calls = [self._call(each, num_calls) for each in message["tool_calls"]]
                content = message.get("content")
                content = None if self.is_null and not content else content
                message = {**message, "content": content, "tool_calls": calls}
            elif self.is_short and message["role"] == "tool":
                message = {**message, "tool_call_id": _short(message.get("tool_call_id") or next(num_results))}
            elif self.is_bridged and message["role"] == "user" and found and found[-1]["role"] == "tool":
                found.append(BRIDGE)
            found.append(message)
        return found

    def _call(self, call: Mapping[str, Any], number: "count[int]") -> Mapping[str, Any]:
        if self.is_short:
            call = {**call, "id": _short(call.get("id") or next(number))}
        if self.is_text:
            function = call["function"]
            text = json.dumps(function.get("arguments", {}), ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        return call


def _one_by_one(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The messages with one call each, which its result follows. Results without ids are in the order of the calls."""
    place = 0
    while place < len(messages):
        message, place = messages[place], place + 1
        if not (calls := message.get("tool_calls")):
            yield message
            continue
        results = list(takewhile(lambda each: each["role"] == "tool", messages[place:]))
        place += len(results)
        for number, call in enumerate(calls):
            yield {**({"role": message["role"], "content": ""} if number else message), "tool_calls": [call]}
            names = (None, call.get("id"))
            own = next((i for i, each in enumerate(results) if each.get("tool_call_id") in names), None)
            if own is not None:
                yield results.pop(own)
        yield from results


def _short(name: object) -> str:
    return hashlib.sha256(str(name).encode()).hexdigest()[:9]
