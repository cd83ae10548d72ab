"""Translation of other APIs' bodies to chats and of answers with reasoning to blocks."""

from types import SimpleNamespace
from typing import Any

import pytest

from headstart.server import prepare
from headstart.server.apis import messages, ollama, responses
from headstart.server.apis.blocks import BlockBuilder
from headstart.server.errors import BodyError
from headstart.server.schema import ChatRequest
from headstart.text.parsers import make_parser, merge_events

ANSWER = (
    "<think>\nIt is late.\n</think>\n\n \nI look.\n<tool_call>\n"
    '{"name": "get_time", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
)
TOOLS = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]


def blocks_of(text: str, size: int) -> tuple[BlockBuilder, list[Any]]:
    """Blocks and changes of a text in pieces of `size` characters."""
    parser, blocks, changes = make_parser("hermes", TOOLS, "think"), BlockBuilder(lambda: "id"), list[Any]()
    choice = SimpleNamespace(parser=parser)
    for start in range(0, len(text), size):
        step = SimpleNamespace(choice=choice, text="", events=parser.push(text[start : start + size]))
        changes += blocks.push(step)  # type: ignore[arg-type]
    changes += blocks.push(SimpleNamespace(choice=choice, text="", events=merge_events(parser.finish())))  # type: ignore[arg-type]
    return blocks, [*changes, *blocks.finish()]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_blocks_are_independent_of_the_piece_size(size: int) -> None:
    blocks, changes = blocks_of(ANSWER, size)
    assert [(block.kind, block.text.strip()) for block in blocks.blocks] == [
        ("reasoning", "It is late."), ("text", "I look."), ("call", '{"zone": "UTC"}'),
    ]  # fmt: skip
    assert [change.what for change in changes if change.what != "more"] == ["open", "close"] * 3
    assert [change.is_last for change in changes if change.what == "close"] == [False, False, True]
    for block in blocks.blocks:
        assert block.text == "".join(each.text for each in changes if each.block is block and each.what == "more")
    said = [messages._content(block) for block in blocks.blocks]
    assert said[0] | {"signature": ""} == {"type": "thinking", "thinking": "It is late.", "signature": ""}
    assert (said[2]["name"], said[2]["input"]) == ("get_time", {"zone": "UTC"})
    items = [responses._item(block, "completed") for block in blocks.blocks]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "It is late."}]


def test_white_space_answer_is_kept() -> None:
    assert [block.text for block in blocks_of("\n \n", 1)[0].blocks] == ["\n \n"]


def turn(**members: Any) -> dict[str, Any]:
    return {"role": "assistant", **members}


def test_reasoning_text_and_calls_of_a_turn_become_one_message() -> None:
    call = {"type": "function", "function": {"name": "get_time", "arguments": {"zone": "UTC"}}}
    parts = [
        {"type": "thinking", "thinking": "Late.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "1", "name": "get_time", "input": {"zone": "UTC"}},
    ]
    result = [{"type": "tool_result", "tool_use_id": "1", "content": "12:30"}, {"type": "text", "text": "So?"}]
    body = {"model": "m", "max_tokens": 1, "thinking": {"type": "disabled"}}
    body["messages"] = [turn(content=parts), {"role": "user", "content": result}]
    chat = messages.chat_of(messages.MessagesRequest.model_validate(body)).model_dump(exclude_none=True)
    said = {"content": "I look.", "reasoning_content": "Late."}
    assert chat["messages"] == [
        turn(**said, tool_calls=[{"id": "1", **call}]),
        {"role": "tool", "tool_call_id": "1", "content": "12:30"},
        {"role": "user", "content": "So?"},
    ]
    assert chat["chat_template_kwargs"] == {"enable_thinking": False}
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Late."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "get_time", "arguments": '{"zone": "UTC"}'},
        {"type": "function_call_output", "call_id": "1", "output": "12:30"},
    ]
    found = responses.chat_of(responses.ResponsesRequest.model_validate({"input": items}))
    first, second = found.model_dump(exclude_none=True)["messages"]
    assert (first["content"], first["reasoning_content"]) == ("I look.", "Late.")
    assert first["tool_calls"][0]["function"] == {"name": "get_time", "arguments": '{"zone": "UTC"}'}
    assert second == {"role": "tool", "tool_call_id": "1", "content": "12:30"}


def test_billing_header_of_claude_code_is_left_out() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: cch=5e2;", "Be brief.")]
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}], "system": system}
    chat = messages.chat_of(messages.MessagesRequest.model_validate(body)).model_dump(exclude_none=True)
    assert [each["content"] for each in chat["messages"]] == ["Be brief.", "Hi"]


def test_empty_lists_of_tool_calls_do_not_reach_the_template() -> None:
    said = {"messages": [{"role": "assistant", "content": "Hi", "tool_calls": []}]}
    assert prepare._message(ChatRequest.model_validate(said).messages[0]) == {"role": "assistant", "content": "Hi"}


def test_reasoning_effort_none_switches_thinking_off() -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "none"}
    off = {"reasoning_effort": "none", "enable_thinking": False}
    item = responses.ResponsesRequest.model_validate({"input": "x", "reasoning": {"effort": "none"}})
    for chat in (ChatRequest.model_validate(asked), responses.chat_of(item)):
        assert prepare._variables(chat) == off
    on = ChatRequest.model_validate(asked | {"chat_template_kwargs": {"enable_thinking": True}})
    assert prepare._variables(on)["enable_thinking"] is True


def test_ollama_options_are_translated() -> None:
    asked = {"num_ctx": 4096, "num_predict": -1, "seed": 7, "repeat_penalty": 1.1, "stop": ["x"], "mirostat": 0}
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "options": asked, "think": "high"}
    chat = ollama.chat_of(ollama.OllamaChatRequest.model_validate(body))
    assert (chat.seed, chat.max_tokens, chat.repetition_penalty, chat.stop) == (7, None, 1.1, ["x"])
    assert (chat.reasoning_effort, chat.chat_template_kwargs, chat.stream) == ("high", {"enable_thinking": True}, True)
    endless = body | {"options": {"num_predict": 0}}  # no limit, as in Ollama
    assert ollama.chat_of(ollama.OllamaChatRequest.model_validate(endless)).max_tokens is None
    assert ollama.ShowRequest.model_validate({"name": "m"}).model == "m"
    raw = ollama.GenerateRequest.model_validate({"model": "m", "prompt": "x", "raw": True, "system": "y"})
    with pytest.raises(BodyError, match="system"):
        ollama.prompt_of(raw)
