"""Tools and later system messages in the prompts of chat templates that lack them."""

from typing import Any

from headstart.text.message_fallbacks import with_functions, with_one_system, with_plain_calls

CALLS = [{"function": {"name": "look", "arguments": {"at": each}}} for each in ("sky", "sea")]
TOOLS = [{"type": "function", "function": {"name": "look"}}]
SESSION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS}, {"role": "tool", "content": "blue"},
    {"role": "tool", "content": [{"type": "image"}]}, {"role": "user", "content": "So?"},
    {"role": "assistant", "content": "", "tool_calls": CALLS[:1]}, {"role": "tool", "content": "grey"},
    {"role": "assistant", "content": "Grey."}, {"role": "user", "content": "Thanks."},
]  # fmt: skip


def test_session_has_one_system_message_and_then_turns_of_user_and_assistant() -> None:
    found = with_plain_calls(with_functions(SESSION, TOOLS))
    assert [each["role"] for each in found] == ["system", *["user", "assistant"] * 3, "user"]
    assert found[0]["content"].startswith("Be brief.\n\nYou may call") and '"look"' in found[0]["content"]
    sky = '<tool_call>\n{"name": "look", "arguments": {"at": "sky"}}\n</tool_call>'
    assert found[2]["content"] == f"I look.\n{sky}\n{sky.replace('sky', 'sea')}"
    assert found[4]["content"] == sky
    texts = "".join(part.get("text", "|") for part in found[3]["content"])
    assert texts == "<tool_response>\nblue\n</tool_response>\n<tool_response>\n|\n</tool_response>\nSo?"
    assert found[5]["content"] == "<tool_response>\ngrey\n</tool_response>"
    assert with_functions(SESSION[1:2], TOOLS)[0]["role"] == "system"
    assert with_plain_calls(SESSION[:2]) == SESSION[:2]


def test_later_system_messages_become_texts_of_the_user() -> None:
    """Claude Code sends system messages within a conversation, Codex a developer message after its instructions."""
    image = [{"type": "image"}]
    session = [
        *({"role": role, "content": content} for role, content in (
            ("system", "A"), ("developer", "B"), ("user", image), ("system", "C"), ("user", "Go."), ("assistant", "D"),
            ("system", "E"), ("user", "F"), ("assistant", "G"), ("user", "H"),
        )),
    ]  # fmt: skip
    found = with_one_system(session)
    assert [each["role"] for each in found] == ["system", *["user", "assistant"] * 2, "user"]
    assert found[0]["content"] == "A\n\nB"
    assert "".join(part.get("text", "|") for part in found[1]["content"]) == (
        "|\n<system-reminder>\nC\n</system-reminder>\nGo."
    )
    assert found[3]["content"] == "<system-reminder>\nE\n</system-reminder>\nF"
    assert with_one_system(session[5:])[1:2] == [{"role": "user", "content": found[3]["content"]}]
    assert with_one_system(SESSION) == SESSION
