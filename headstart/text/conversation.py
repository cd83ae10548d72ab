"""Turns messages into prompt ids. Names of special tokens inside messages stay plain text.

Before rendering, a mark (an unused character) is inserted into such names. Parts of the rendered text that contain the
mark are encoded as plain text, without the mark. Messages without such names are rendered and encoded directly.
"""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

from headstart.errors import ContextError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.text.tokenizer import Tokenizer

_NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # marks: Unicode reserves these code points for internal use


@dataclass(frozen=True)
class Conversation:
    """The input of a chat template."""

    messages: Seq[Mapping[str, Any]]
    tools: Seq[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)  # further variables of the template
    parse_special: bool = False  # names of special tokens in messages become those tokens
    continues: bool = False  # the prompt ends with the last message's content, which the output continues
    max_tokens: int | None = None  # a rendered text that surely has more tokens is refused before it is encoded

    def encode(
        self, template: ChatTemplate, tokenizer: Tokenizer, *, add_special: bool = False
    ) -> tuple[list[int], str]:
        """Token ids and text of the prompt. Raises ContextError for a prompt above max_tokens, UsageError if the
        messages cannot be continued or marked, and as `ChatTemplate.render`."""
        names = tokenizer.special_names
        parts = [self.messages, self.tools, self.variables.get("documents")]
        texts = [] if self.parse_special else _texts(parts)
        risky = [text for text in texts if any(name in text for name in names) or _ends_with_prefix(text, names)]
        if not risky:
            text = self._render(template, tokenizer, self.messages, self.tools, self.variables)
            return tokenizer.encode(text, add_special=add_special), text
        mark = _unused_mark(texts)
        pattern = re.compile("|".join(map(re.escape, names)))
        messages, tools, documents = (_insert_marks(each, pattern, names, mark) for each in parts)
        text = self._render(template, tokenizer, messages, tools, {**self.variables, "documents": documents})
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # undo tojson's escape of the mark
        return _encode_parts(text, pattern, mark, tokenizer, add_special), text.replace(mark, "")

    def _render(
        self, template: ChatTemplate, tokenizer: Tokenizer, messages: Any, tools: Any, variables: Mapping[str, Any]
    ) -> str:
        text = self._render_all(template, messages, tools, variables)
        if self.max_tokens is not None and not tokenizer.may_fit(text, self.max_tokens):
            raise ContextError(f"it has {len(text)} characters", self.max_tokens, "shorten the messages")
        return text

    def _render_all(self, template: ChatTemplate, messages: Any, tools: Any, variables: Mapping[str, Any]) -> str:
        if not self.continues:
            return template.render(messages, self.add_generation_prompt, tools, variables)
        *before, last = messages
        content = last.get("content")
        if not isinstance(content, str):
            raise UsageError("the last message has no text to continue", "leave continue_final_message out")
        end = _unused_mark(_texts([messages, tools]), last=True)
        text = template.render([*before, {**last, "content": content + end}], False, tools, variables)
        if end not in text:
            raise UsageError("the chat template leaves the last message out", "leave continue_final_message out")
        return text[: text.rindex(end)]


def plain_text(messages: Seq[Mapping[str, Any]]) -> str:
    """Prompt of a model without chat template: all contents joined, with user messages on new lines."""
    text = ""
    for each in messages:
        is_new_line = each["role"] != "assistant" and text and not text.endswith("\n")
        text += ("\n" if is_new_line else "") + each["content"]
    return text


def _texts(value: Any) -> list[str]:
    """All texts in a document, keys included."""
    found, todo = list[str](), [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            found.append(each)
        elif isinstance(each, Mapping):
            todo += [*each, *each.values()]
        elif isinstance(each, list | tuple):
            todo += each
    return found


def _ends_with_prefix(text: str, names: tuple[str, ...]) -> bool:
    prefixes, max_length = _prefixes(names)
    return any(text[-size:] in prefixes for size in range(1, min(max_length, len(text)) + 1))


@lru_cache(8)
def _prefixes(names: tuple[str, ...]) -> tuple[frozenset[str], int]:
    """Proper prefixes of names, and the length of the longest."""
    found = frozenset(name[:size] for name in names for size in range(1, len(name)))
    return found, max(map(len, found), default=0)


def _insert_marks(value: Any, pattern: re.Pattern[str], names: tuple[str, ...], mark: str) -> Any:
    """A copy with a mark inside each name of a special token, and after a prefix of one at the end."""
    if isinstance(value, str):
        text = pattern.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        return text + mark if _ends_with_prefix(text, names) else text
    if isinstance(value, Mapping):
        insert = partial(_insert_marks, pattern=pattern, names=names, mark=mark)
        return {insert(key): insert(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_insert_marks(each, pattern, names, mark) for each in value]
    return value


def _unused_mark(texts: Seq[str], *, last: bool = False) -> str:
    free = [char for char in _NONCHARACTERS if not any(char in text for text in texts)]
    if len(free) < 2:
        raise UsageError("the messages hold too many noncharacters (U+FDD0 to U+FDEF)", "leave them out")
    return free[-1 if last else 0]


def _encode_parts(text: str, pattern: re.Pattern[str], mark: str, tokenizer: Tokenizer, add_special: bool) -> list[int]:
    """Token ids of a rendered text with marks. Parts between special tokens are encoded separately; that gives the same
    ids, since tokenizers split at special tokens first."""
    ids, plain, has_begun = list[int](), "", False

    def flush() -> None:
        nonlocal plain, has_begun
        if plain or not has_begun:
            ids.extend(tokenizer.encode(plain, add_special=add_special and not has_begun))
        plain, has_begun = "", True

    start = 0
    for end, after in [*(found.span() for found in pattern.finditer(text)), (len(text), len(text))]:
        part = text[start:end]
        if mark in part:
            if plain or add_special:
                flush()
            has_begun = True
            ids.extend(tokenizer.encode(part.replace(mark, ""), parse_special=False))
        else:
            plain += part
        plain += text[end:after]
        start = after
    if plain:
        flush()
    return ids
