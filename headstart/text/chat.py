"""Chat templates: Hugging Face's Jinja templates, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from datetime import datetime
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.errors import ModelError, UsageError
from headstart.files import read_text
from headstart.text import _gguf_tokenizer
from headstart.text.call_form import CALLING_PROBES, PROBE, PROBE_TOOLS, CallForm
from headstart.text.tokenizer import read_config, special_tokens

Message = Mapping[str, Any]

TEMPLATES: Mapping[str, tuple[str, str]] = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "gemma": (
        "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
        "{{ m.content }}<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
    ),
    "llama3": (
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "vicuna": (
        "{% for m in messages %}{{ {'user': 'USER: ', 'assistant': 'ASSISTANT: '}[m.role] }}{{ m.content }}\n"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}",
        "\nUSER:",
    ),
}
"""llama.cpp's names of chat templates -> Jinja source, and the text that ends an answer."""


Result = TypeVar("Result")
_FAILURES = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    SyntaxError, MemoryError, AssertionError,
)  # fmt: skip
"""Errors that a template may raise: it is a program that comes with the model."""


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by `raise_exception(...)` in a template, with the template's own message."""


class _Generation(jinja2.ext.Extension):
    """Renders the body of `{% generation %}`, which marks the assistant's part for training."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders messages as one text. `tokens`: bos_token, eos_token, ... -> their texts."""

    def __init__(
        self, source: str | Mapping[str, str], tokens: Mapping[str, str] | None = None,
        where: str = "the chat template", turn_end: str = "",
    ) -> None:  # fmt: skip
        """`source`: a template, or several by name (`default`, `tool_use`). `turn_end`: the text that ends an answer;
        empty: the model's own end tokens do. Raises ModelError if a template does not compile."""
        self.tokens = dict(tokens or {})
        self.turn_end = turn_end
        self._where = where
        named = {"default": source} if isinstance(source, str) else dict(source)
        if not named:
            raise ModelError(f"{where}: no template")
        self.sources = named
        compiled = _environment().from_string
        self._compiled = {
            name: self._guard("does not compile", partial(compiled, text)) for name, text in named.items()
        }

    def with_tokens(self, tokens: Mapping[str, str]) -> ChatTemplate:
        return ChatTemplate(self.sources, tokens, self._where, self.turn_end)

    @classmethod
    def from_name(cls, name: str) -> ChatTemplate:
        """One of TEMPLATES, or a Jinja file. Raises UsageError if it is neither, ModelError if it does not compile."""
        source, turn_end = TEMPLATES.get(name, ("", ""))
        hint = f"give a Jinja file, or a name: {', '.join(TEMPLATES)}"
        source = source or read_text(name, hint, "--chat-template")
        return cls("{{ bos_token }}" + source if turn_end else source, None, name, turn_end)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "the GGUF file") -> ChatTemplate | None:
        """The templates of GGUF metadata; None without any."""
        key = "tokenizer.chat_template"
        sources = {"default": metadata.get(key)}
        sources |= {each.removeprefix(f"{key}."): metadata[each] for each in metadata if each.startswith(f"{key}.")}
        named = {name: source for name, source in sources.items() if isinstance(source, str)}
        if not named:
            return None
        texts = metadata.get("tokenizer.ggml.tokens") or []
        keys = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
        tokens = {name: _gguf_tokenizer.special_token(metadata, key, texts) for key, name in keys.items()}
        return cls(named, {name: text for name, text in tokens.items() if text is not None}, where)

    @classmethod
    def from_directory(cls, path: Path) -> ChatTemplate | None:
        """The template of chat_template.jinja (with additional_chat_templates/), chat_template.json or
        tokenizer_config.json; None without one."""
        config = read_config(path / "tokenizer_config.json")
        named = _named(config.get("chat_template") or read_config(path / "chat_template.json").get("chat_template"))
        file = path / "chat_template.jinja"
        if file.exists():
            named["default"] = _text(file)
        for extra in sorted((path / "additional_chat_templates").glob("*.jinja")):
            named[extra.stem] = _text(extra)
        return cls(named, special_tokens(config), str(path)) if named else None

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None, variables: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation, with special tokens as text. `variables`: further variables of the template.
        Raises UsageError with the template's message if it refuses the messages, ModelError if the template fails."""
        if any(each.get("tool_calls") or each.get("role") == "tool" for each in messages):
            messages = (self._call_form or CallForm()).applied(messages)
        values = {"documents": None, **(variables or {}), "add_generation_prompt": add_generation_prompt}
        return self._guard("cannot be rendered", lambda: self._text_of(self._fitting(messages), tools, values))

    def _text_of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, values: Mapping[str, Any]
    ) -> str:
        name = "tool_use" if tools and "tool_use" in self._compiled else "default"
        template = self._compiled.get(name) or next(iter(self._compiled.values()))
        return template.render({**self.tokens, **values, "messages": list(messages), "tools": tools})

    def _fitting(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with contents of the type that the template writes."""
        return messages if self._takes_texts else [_with_parts(each) for each in messages]

    def _shows(self, messages: Sequence[Message], texts: Sequence[str], tools: Any = None) -> bool:
        """Whether the template accepts the messages and writes all `texts`."""
        with suppress(*_FAILURES):
            written = self._text_of(messages, tools, {"documents": None, "add_generation_prompt": True})
            return all(each in written for each in texts)
        return False

    @cached_property
    def _takes_texts(self) -> bool:
        """False if the template writes content only if it is a list of parts, as templates of some models with vision
        do."""
        message = {"role": "user", "content": PROBE}
        return self._shows([message], [PROBE]) or not self._shows([_with_parts(message)], [PROBE])

    @cached_property
    def takes_developer(self) -> bool:
        """Whether the template knows the role developer, and writes such messages."""
        messages = self._fitting([{"role": "developer", "content": PROBE}, {"role": "user", "content": "Hi"}])
        return any("developer" in source for source in self.sources.values()) and self._shows(messages, [PROBE])

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the template writes a system message after other messages."""
        contents = ("system", "Be brief."), ("user", "Hi"), ("system", PROBE)
        return self._shows(self._fitting([{"role": role, "content": each} for role, each in contents]), [PROBE])

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls and their results."""
        return self._call_form is not None

    @cached_property
    def _call_form(self) -> CallForm | None:
        """The form in which the template writes tool calls, if possible with a message of the user after their results;
        None if it does not."""
        forms = [CallForm(*each) for each in product((False, True), repeat=len(fields(CallForm)))]
        for messages, texts in CALLING_PROBES:
            fits = (each for each in forms if self._shows(self._fitting(each.applied(messages)), texts, PROBE_TOOLS))
            if form := next(fits, None):
                return form
        return None

    def _guard(self, what: str, action: Callable[[], Result]) -> Result:
        try:
            return action()
        except _TemplateRefusal as error:
            hint = "the model's chat template says so; change the messages"
            raise UsageError(f"the chat template refuses the messages: {error}", hint) from error
        except _FAILURES as error:
            kind = type(error).__name__
            hint = "check roles and contents of the messages, or use raw prompts"
            raise ModelError(f"{self._where}: the chat template {what}: {kind}: {error}", hint) from error


def _with_parts(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _environment() -> jinja2.Environment:
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:  # fmt: skip
    # Jinja's own filter escapes HTML and non-ASCII, unlike transformers
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _named(value: object) -> dict[str, str]:
    """Name -> template, from a template string or a list of {name, template}."""
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        items = [item for item in value if isinstance(item, dict) and {"name", "template"} <= item.keys()]
        return {item["name"]: item["template"] for item in items}
    return {}


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
