"""Messages for chat templates that lack tools, or take one system message only.

Functions, calls and results become texts in Hermes' format. Later system messages become texts of the user. The roles
then fit templates that take one system message, and user and assistant in turns.
"""

import json
from collections.abc import Mapping, Sequence as Seq
from typing import Any

from headstart.text.grammar_spec import CALL_PREFIX, CALL_SUFFIX

_SYSTEM = ("system", "developer")
_CALL = f'{CALL_PREFIX}{{"name": %s, "arguments": %s}}{CALL_SUFFIX}'


def with_functions(messages: Seq[dict[str, Any]], tools: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a description of the functions at the end of the system message."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = _CALL % ("<function-name>", "<args-json-object>")
    text = f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with:\n{call}"
    first = messages[0]
    if first["role"] in _SYSTEM:
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


def with_one_system(messages: Seq[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with instructions (system or developer) in the first message only.

    Instructions right after it are appended to it. Later ones become texts of the user, not of the first message: a
    changed first message would leave no cached prefix.
    """
    found: list[dict[str, Any]] = []
    follows_reminder = False
    for message in messages:
        role, content = message["role"], message["content"]
        is_reminder = role in _SYSTEM and bool(found)
        if is_reminder and len(found) == 1 and found[0]["role"] in _SYSTEM:
            found[0] = found[0] | {"content": _joined(found[0]["content"], "\n\n", content)}
            continue
        if is_reminder:
            role, content = "user", _joined("<system-reminder>\n", content, "\n</system-reminder>")
        if role == "user" and (is_reminder or follows_reminder) and found[-1]["role"] == "user":
            content = _joined(found.pop()["content"], "\n", content)
        follows_reminder = is_reminder
        found.append(message | {"role": role, "content": content})
    return found


def _joined(*contents: Any) -> Any:
    """One content: a text, or parts if there are images."""
    if all(isinstance(each, str) for each in contents):
        return "".join(contents)
    return [part for each in contents for part in ([{"type": "text", "text": each}] if isinstance(each, str) else each)]
