"""Chat templates: rendering, helper functions, errors, sandbox, sources of templates."""

import json
from datetime import datetime
from pathlib import Path

import pytest
from toy_tokenizers import byte_level

from headstart.errors import ModelError, UsageError
from headstart.text.chat import TEMPLATES, ChatTemplate

USER = [{"role": "user", "content": "hé <b>"}]
MESSAGES = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
SIMPLE = MESSAGES + "{% if add_generation_prompt %}[a]{% endif %}"


def test_render_with_and_without_generation_prompt() -> None:
    template = ChatTemplate(SIMPLE, {"bos_token": "<s>"})
    assert template.render(USER) == "<s>[user]hé <b>[a]"
    assert template.render(USER, add_generation_prompt=False) == "<s>[user]hé <b>"


@pytest.mark.parametrize(("source", "text"), [
    ("{{ messages | tojson }}", '[{"role": "user", "content": "hé <b>"}]'),
    ("{{ {'a': 1} | tojson(indent=1) }}", '{\n "a": 1\n}'),
    ("{% for m in messages %}{% break %}x{% endfor %}y", "y"),
    ("{% generation %}{{ messages[0].role }}{% endgeneration %}!", "user!"),
    ("  {% if true %}\nx\n  {% endif %}\ny", "x\ny"), ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
    ("{{ thinking }}{{ tools is none }}{{ documents is none }}", "onTrueTrue"),
    ("{% set ns = namespace(x=1) %}{% set ns.x = 2 %}{{ ns.x }}", "2"),
])  # fmt: skip
def test_helpers_of_templates(source: str, text: str) -> None:
    assert ChatTemplate(source).render(USER, variables={"thinking": "on"}) == text


def test_raise_exception_is_a_usage_error_and_other_failures_are_model_errors() -> None:
    with pytest.raises(UsageError, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)
    for source in ("{{ messages[0].content + 1 }}", "{{ 1 / 0 }}", "{{ messages.append(1) }}", "{{ x.y.z }}"):
        with pytest.raises(ModelError, match=r"m\.gguf: the chat template cannot be rendered"):
            ChatTemplate(source, where="m.gguf").render(USER)
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% if %}")


def test_sandbox_blocks_unsafe_access() -> None:
    for source in ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__ }}"):
        with pytest.raises(ModelError, match=r"SecurityError|unsafe"):
            ChatTemplate(source).render(USER)


def test_template_for_tools_is_chosen_by_name() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools {{ tools | length }}"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "f"}]) == "tools 1"


def test_from_directory(tmp_path: Path) -> None:
    assert ChatTemplate.from_directory(tmp_path) is None
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": SIMPLE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None and found.render(USER) == "<s>[user]hé <b>[a]"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }} new é", encoding="utf-8")
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("tools")
    found = ChatTemplate.from_directory(tmp_path)
    assert found is not None and found.render(USER) == "<s> new é"
    assert found.render(USER, tools=[{}]) == "tools"
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        ChatTemplate.from_directory(tmp_path)


def test_byte_order_mark_is_dropped(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    template = ChatTemplate.from_directory(tmp_path)
    assert template and template.render([{"role": "user", "content": "hello"}]) == "hello"


def test_from_gguf() -> None:
    assert ChatTemplate.from_gguf(byte_level()) is None
    found = ChatTemplate.from_gguf(byte_level() | {"tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}"})
    assert found is not None and found.render(USER) == "<s></s>"


@pytest.mark.parametrize("name", TEMPLATES)
def test_builtin_template_declares_its_turn_end(name: str) -> None:
    template = ChatTemplate.from_name(name).with_tokens({"bos_token": "<s>"})
    first = template.render(USER)
    assert first.startswith("<s>") and USER[0]["content"] in first
    more = template.render([*USER, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "And?"}])
    assert more.partition("Fine.")[2].startswith(template.turn_end)


def test_template_from_a_file(tmp_path: Path) -> None:
    (file := tmp_path / "t.jinja").write_text(SIMPLE)
    assert ChatTemplate.from_name(str(file)).turn_end == ""
    with pytest.raises(UsageError, match="--chat-template: cannot read none: No such file"):
        ChatTemplate.from_name("none")
    file.write_text("{% if %}")
    with pytest.raises(ModelError, match=r"t\.jinja: the chat template does not compile"):
        ChatTemplate.from_name(str(file))


@pytest.mark.parametrize(("source", "content"), [
    ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", "Hi"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "Hi"),
    ("{% for m in messages %}{{ raise_exception('no') }}{% endfor %}{{ messages[0].content }}", "refuses"),
    ("{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}", "Hi"),
])  # fmt: skip
def test_content_is_passed_as_text_or_parts_as_the_template_expects(source: str, content: str) -> None:
    if content == "refuses":
        with pytest.raises(UsageError, match=content):
            ChatTemplate(source).render([{"role": "user", "content": "Hi"}])
        return
    assert ChatTemplate(source).render([{"role": "user", "content": "Hi"}]) == content
