"""Messages to prompt ids. What people say stays text: names of special tokens in it do not become those tokens.

Such names are broken by a mark before the template is rendered; parts of the result that have a mark are encoded
without it, as plain text. Messages without such names are rendered and encoded as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from headstart.errors import CapacityError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer

_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Code points that no text should have."""


@dataclass(frozen=True)
class Conversation:
    """Messages and what goes with them. `variables`: others that the template reads. `parse_special`: trust all of it.
    `continues`: the prompt ends inside the last message. `most`: characters that it may have."""

    messages: Seq[Mapping[str, Any]]
    tools: Seq[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    parse_special: bool = False
    continues: bool = False
    most: int | None = None

    def encode(
        self, template: ChatTemplate, tokenizer: Tokenizer, *, add_special: bool = False
    ) -> tuple[list[int], str]:
        """Prompt ids, and the text they stand for. Raises what `ChatTemplate.render` raises."""
        names = tokenizer.special_names
        said = [self.messages, self.tools, self.variables.get("documents")]
        texts = [] if self.parse_special else _texts(said)
        risky = [text for text in texts if _is_risky(text, names)]
        if not risky:
            text = self._rendered(template, self.messages, self.tools, self.variables)
            return tokenizer.encode(text, add_special=add_special), text
        mark = _unused(texts)
        pattern = re.compile("|".join(map(re.escape, names)))
        messages, tools, documents = (_broken(each, pattern, names, mark) for each in said)
        text = self._rendered(template, messages, tools, {**self.variables, "documents": documents})
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # tojson may have written it so
        return _encoded(text, pattern, mark, tokenizer, add_special), text.replace(mark, "")

    def _rendered(self, template: ChatTemplate, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
        text = self._whole(template, messages, tools, variables)
        if self.most is not None and len(text) > self.most:
            raise CapacityError(f"the prompt has {len(text)} characters, which is more than the context holds")
        return text

    def _whole(self, template: ChatTemplate, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
        if not self.continues:
            return template.render(messages, self.add_generation_prompt, tools, variables)
        *before, last = messages
        content = last.get("content")
        if not isinstance(content, str):
            raise UsageError("the last message has no text to go on with", "leave continue_final_message out")
        end = _unused(_texts([messages, tools]), last=True)
        text = template.render([*before, {**last, "content": content + end}], False, tools, variables)
        if end not in text:
            raise UsageError("the chat template leaves the last message out", "leave continue_final_message out")
        return text[: text.rindex(end)]


def _texts(value: Any) -> list[str]:
    """All texts in a document, names of members included."""
    found, rest = list[str](), [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, Mapping):
            rest += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            rest += each
    return found


def _is_risky(text: str, names: tuple[str, ...]) -> bool:
    """Does it hold the name of a special token, or end with the beginning of one?"""
    return any(name in text for name in names) or _begins_name(text, names)


def _begins_name(text: str, names: tuple[str, ...]) -> bool:
    beginnings, longest = _beginnings(names)
    return any(text[-size:] in beginnings for size in range(1, min(longest, len(text)) + 1))


@lru_cache(8)
def _beginnings(names: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Proper beginnings of names, and the length of the longest."""
    found = frozenset(name[:size] for name in names for size in range(1, len(name)))
    return found, max(map(len, found), default=0)


def _broken(value: Any, pattern: re.Pattern[str], names: tuple[str, ...], mark: str) -> Any:
    """A copy with a mark inside each name of a special token, and behind the beginning of one."""
    if isinstance(value, str):
        text = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        return text + mark if _begins_name(text, names) else text
    if isinstance(value, Mapping):
        return {_broken(key, pattern, names, mark): _broken(each, pattern, names, mark) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(each, pattern, names, mark) for each in value]
    return value


def _unused(texts: Seq[str], *, last: bool = False) -> str:
    free = [char for char in _NONCHARACTERS if not any(char in text for text in texts)]
    if len(free) < 2:
        raise UsageError("the messages hold too many noncharacters (U+FDD0 to U+FDEF)", "leave them out")
    return free[-1 if last else 0]


def _encoded(text: str, pattern: re.Pattern[str], mark: str, tokenizer: Tokenizer, add_special: bool) -> list[int]:
    """Tokenizers cut at special tokens before all else, so parts between them can be encoded one by one."""
    ids, plain, begun = list[int](), "", False

    def flush() -> None:
        nonlocal plain, begun
        if plain or not begun:
            ids.extend(tokenizer.encode(plain, add_special=add_special and not begun))
        plain, begun = "", True

    start = 0
    for end, after in [*(found.span() for found in pattern.finditer(text)), (len(text), len(text))]:
        part = text[start:end]
        if mark in part:
            if plain or add_special:
                flush()
            begun = True
            ids.extend(tokenizer.encode(part.replace(mark, ""), parse_special=False))
        else:
            plain += part
        plain += text[end:after]
        start = after
    if plain:
        flush()
    return ids
