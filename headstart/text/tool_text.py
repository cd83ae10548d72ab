"""Tools for chat templates without tools: functions, calls and results become texts, in Hermes' format.

Such templates may take one system message, and then user and assistant in turns.
"""

import json
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from headstart.text.grammar_spec import CALL_PREFIX, CALL_SUFFIX

_CALL = f'{CALL_PREFIX}{{"name": %s, "arguments": %s}}{CALL_SUFFIX}'


def with_functions(messages: Seq[dict[str, Any]], tools: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a description of the functions at the end of the system message."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = _CALL % ("<function-name>", "<args-json-object>")
    text = f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with:\n{call}"
    first = messages[0]
    if first["role"] in ("system", "developer"):
        return [first | {"content": _joined(first["content"], "\n\n", text)}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_plain_calls(messages: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls in the assistant's texts. Results, and what the user says behind them, become one message
    of the user."""
    found: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        if functions := [call["function"] for call in message.get("tool_calls", ())]:
            calls = [_CALL % (json.dumps(each["name"]), json.dumps(each["arguments"])) for each in functions]
            content = _joined(content, "\n" if content else "", "\n".join(calls))
        elif role == "tool":
            role, content = "user", _joined("<tool_response>\n", content, "\n</tool_response>")
        if follows_result and role == "user":
            content = _joined(found.pop()["content"], "\n", content)
        follows_result = role == "user" and (follows_result or message["role"] == "tool")
        found.append(message | {"role": role, "content": content})
    return found


def _joined(*contents: Any) -> Any:
    """One content: a text, or parts if there are images."""
    if all(isinstance(each, str) for each in contents):
        return "".join(contents)
    return [part for each in contents for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)]
