"""The messages of a request as a chat template wants them, and the prompt that comes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Self

from headstart.api import LLM
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.server.intake import json_of_text
from headstart.server.schema import ChatRequest, Message, TokenizeRequest
from headstart.text.conversation import Conversation

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""What chat_template_kwargs cannot set."""
DEVELOPER = "developer"
"""OpenAI's newer word for the system; few templates know it."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Names of what the model thought in an earlier turn: clients have either, templates read the first."""


@dataclass(frozen=True)
class Chat:
    """Messages and what a template is told beside them. `parse_special`: names of special tokens in messages become
    those tokens; `add_special`: the tokenizer adds its own, too."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continues: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    parse_special: bool = False
    add_special: bool = False

    @classmethod
    def of(cls, body: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]], parse_special: bool) -> Self:
        """Raises UsageError for what no template could make sense of."""
        given = dict(body.chat_template_kwargs or {})
        if reserved := given.keys() & RESERVED:
            raise UsageError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}")
        if isinstance(body, ChatRequest):
            named = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
            given |= {name: value for name, value in named.items() if value is not None}
        asked = body.model_fields_set
        if body.continue_final_message and body.add_generation_prompt and "add_generation_prompt" in asked:
            raise UsageError(
                "continue_final_message and add_generation_prompt exclude each other", "set the latter to false"
            )
        return cls(
            [_message(each) for each in body.messages or ()],
            tools,
            body.add_generation_prompt,
            body.continue_final_message,
            given,
            parse_special,
            isinstance(body, ChatRequest) and body.add_special_tokens,
        )

    def encoded(self, llm: LLM) -> tuple[list[int], str]:
        """Prompt ids, and the text they stand for. Raises UsageError in the template's words."""
        template = llm.chat_template
        if template is None:
            raise UsageError(f"{llm.model.name} has no chat template", "use /v1/completions")
        messages = self.messages
        own = any("tools" in source for source in template.sources.values())
        if self.tools and not own:
            messages = [{"role": "system", "content": _tool_prompt(self.tools)}, *messages]
        if not any(DEVELOPER in source for source in template.sources.values()):
            messages = [each | {"role": "system"} if each["role"] == DEVELOPER else each for each in messages]
        conversation = Conversation(
            messages,
            (self.tools or None) if own else None,
            self.add_generation_prompt,
            self.variables,
            self.parse_special,
            self.continues,
            most=llm.engine.max_length * llm.tokenizer.longest,
        )
        try:
            return conversation.encode(template, llm.tokenizer, add_special=self.add_special)
        except ModelError as error:  # here it is the messages that the template cannot cope with
            raise UsageError(error.message, error.hint) from error
        except CapacityError as error:
            raise CapacityError(error.message, "shorten the messages") from error


def _tool_prompt(tools: Seq[Mapping[str, Any]]) -> str:
    """For templates that have no place for tools: the words that Hermes models are trained on, in short."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    return f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with:\n{call}"


def _message(message: Message) -> dict[str, Any]:
    """As templates want it: one text, and arguments of calls as objects."""
    document = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        if other := next((part.type for part in message.content if part.type != "text"), None):
            raise UsageError(f"a message holds a part of type {other!r}", "this model reads text only")
        document["content"] = "".join(part.text or "" for part in message.content)
    document.setdefault("content", "")
    if thought := next((document[name] for name in THOUGHTS if isinstance(document.get(name), str)), None):
        document[THOUGHTS[0]] = thought
    for call in document.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            what = "the arguments of a tool call in the messages"
            function["arguments"] = json_of_text(function["arguments"] or "{}", what)
    return document
