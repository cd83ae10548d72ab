"""`headstart data`: text folders, prompts, shards, resumed runs, and data for `headstart train`."""

import json
import math
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import write_tiny

from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import CapacityError, UsageError
from headstart.text.chat import ChatTemplate
from headstart.train import generate, self_distillation
from headstart.train.generate import is_usable
from headstart.train.plain_text import cut_text, detect_language, foreign_passages, passages, read_tree
from headstart.train.records import (
    ChatTokenizer,
    Shards,
    SkippedRecords,
    encode_records,
    parse_record,
    read_records,
)
from headstart.train.self_distillation import DataOptions, run


def test_text_folders_are_read_by_kind(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    (docs / ".git").mkdir(parents=True)
    (docs / ".git" / "notes.txt").write_text("hidden " * 100)
    (docs / "a.py").write_text("x = 1\n" * 100)
    (docs / "guide.md").write_text("\n\n".join("A sentence of a guide about towns. " * 30 for _ in range(9)))
    (docs / "tiny.txt").write_text("too short")
    (docs / "binary.txt").write_bytes(b"\xff\xfe\x00" * 500)
    pieces = list(read_tree(docs))
    assert {piece.kind for piece in pieces} == {"code", "prose"} and all(piece.source == "docs" for piece in pieces)
    assert all(120 <= len(text.split()) <= 350 for text, _ in passages(pieces))
    assert [piece.source for piece in read_tree(docs / ".git")] == [".git"]  # hidden folders are read if named
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="no text"):
        list(read_tree(tmp_path / "empty"))
    with pytest.raises(UsageError, match="does not exist"):
        list(read_tree(tmp_path / "nothing"))


GERMAN = "Der Zug nach Wien hat heute eine halbe Stunde Verspätung. Die Leute warten auf dem Bahnsteig und lesen. "
FRENCH = "Le train pour Lyon est en retard de dix minutes. Les gens attendent sur le quai et ne sont pas contents. "


def test_foreign_text_is_used_for_translation_only(tmp_path: Path) -> None:
    for name, text in (("de", GERMAN), ("fr", FRENCH), ("en", "The train to Bristol is late and people wait for it. ")):
        (tmp_path / f"{name}.txt").write_text("\n\n".join([text * 5] * 9))
    (tmp_path / "table.md").write_text("| 1 | alpha | beta | gamma | delta |\n" * 50)  # text of no language
    pieces = list(read_tree(tmp_path))
    foreign = [given for given, _ in foreign_passages(pieces)]
    assert {each.language for each in foreign} == {"German", "French"}
    assert all(5 <= len(each.text.split()) <= 60 and detect_language(each.text) == each.language for each in foreign)
    assert not any("Zug" in text or "quai" in text for text, _ in passages(pieces))


def test_long_files_are_split_at_line_ends() -> None:
    text = "".join(f"line {i} of a long file\n" for i in range(2000))
    pieces = list(cut_text(text))
    assert "".join(pieces) == text and len(pieces) > 5 and all(piece.endswith("\n") for piece in pieces)


@pytest.mark.parametrize(("text", "good"), [
    ("Write a short story about a lighthouse keeper.", True),
    ("What is the capital of France?", True),
    ("Hi", False),
    ("again and again " * 60, False),
    ("日本の歴史について短い文章を書いてください。", False),
    ("broken \ufffd character in the middle of this", False),
    ("xkcd qwfp zxcv arst neio", False),
])  # fmt: skip
def test_usable_prompts(text: str, good: bool) -> None:
    assert is_usable(text, "en") is good


def test_shards_repair_a_cut_line_and_keep_keys(tmp_path: Path) -> None:
    with Shards(tmp_path, "x", per_shard=3) as shards:
        assert all(shards.append({"key": str(i), "text": "ä"}) for i in range(7)) and not shards.append({"key": "3"})
    files = sorted(tmp_path.glob("*.jsonl"))
    assert [len(file.read_text().splitlines()) for file in files] == [3, 3, 1]
    with files[-1].open("a") as file:
        file.write('{"key": "half')
    with Shards(tmp_path, "x", per_shard=3) as shards:
        assert len(shards) == 7
        shards.append({"key": "7"})
    assert [len(file.read_text().splitlines()) for file in sorted(tmp_path.glob("*.jsonl"))] == [3, 3, 2]
    for damage in ("{", "[]", "{}"):
        files[1].write_text(f'{{"key": "3"}}\n{damage}\n')
        with pytest.raises(UsageError, match=r"x-00001\.jsonl:2 is no record"):
            Shards(tmp_path, "x")


def test_other_record_layouts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [("system", "s"), ("human", "q"), ("gpt", "a")]
    lines: list[dict[str, Any]] = [
        {"conversations": [{"from": name, "value": text} for name, text in turns]},
        {"messages": [{"role": each, "content": [{"type": "text", "text": each}]} for each in ("user", "assistant")]},
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "input": "i", "output": "a"},
    ]
    path.write_text("\r\n".join(map(json.dumps, lines)), "utf-8-sig")
    found = read_records([path], skipped := SkippedRecords())
    assert not skipped.count
    assert [[(each["role"], each["content"]) for each in record.messages] for record in found] == [
        [("system", "s"), ("user", "q"), ("assistant", "a")], [("user", "user"), ("assistant", "assistant")],
        [("user", "q"), ("assistant", "a")], [("user", "q"), ("assistant", "a")],
        [("user", "q\n\ni"), ("assistant", "a")],
    ]  # fmt: skip
    prompts = generate.read_prompts([path])
    assert [prompt.messages[-1]["content"] for prompt in prompts] == ["q", "user", "q", "q", "q\n\ni"]
    path.write_text(json.dumps(lines, indent=2))
    for read in (lambda: read_records([path], SkippedRecords()), lambda: generate.read_prompts([path])):
        with pytest.raises(UsageError) as refused:
            read()
        assert refused.value.hint.endswith(f"jq -c '.[]' {path} > records.jsonl")


def test_tool_calls_carry_loss(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny("qwen3", tmp_path / "m")), EngineConfig(threads=1))
    template = ChatTemplate(
        "{{ tools[0].name }}:{% for m in messages %}{{ m.role }} {{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }} {{ c.function.arguments.city }}{% endfor %};{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "the thing"}'}}
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "an ant"}, {"role": "assistant", "content": "the end"},
    ]  # fmt: skip
    record = parse_record({"messages": messages, "tools": [{"name": "f"}]}, "x")
    text = ChatTokenizer(llm.tokenizer, template, llm.model.config.vocab_size)
    (example,) = encode_records([record], text, SkippedRecords())
    assert llm.tokenizer.decode(example.tokens.tolist()).startswith("f:user q;assistant f the thing;tool an ant;")
    answers = llm.tokenizer.decode(example.tokens[1:][example.loss[:-1]].tolist())
    assert answers == "f the thing;the end;"
    plain = parse_record({"prompt": "q", "response": "an ant"}, "x")
    loop = "{% for m in messages %}{{ m.content }};{% endfor %}"
    refusing = ChatTemplate("{{ raise_exception('no tools') if tools }}" + loop)
    for other, reason in ((llm.chat_template, "does not write tool calls"), (refusing, "no tools")):
        encode_records([record, plain], replace(text, template=other), skipped := SkippedRecords())
        assert skipped.count == 1 and reason in skipped.first[0]
    call["function"]["arguments"] = "{"
    with pytest.raises(ValueError, match="arguments of a tool call are not JSON"):
        parse_record({"messages": messages}, "x")


MALFORMED = ('{"a":' * 20_000, '"x"', '{"messages": [{"role": "user", "content": "\\ud800"}]}', "{")


def test_malformed_lines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(('{"prompt": "q", "response": "a"}', *MALFORMED)))
    read_records([path], skipped := SkippedRecords())
    generate.read_prompts([path])
    reasons = ["nested too deeply", "not a JSON object", "half of a surrogate pair", "not JSON (Expecting property"]
    for shown in ("\n".join(skipped.lines()), capsys.readouterr().err):
        assert all(f"{path}:{number}: {reason}" in shown for number, reason in enumerate(reasons, 2))
    path.write_text('\n{"messages": [{"role": "user", "content": "q"}]}')
    with pytest.raises(UsageError, match=r"holds no training records \(line 2: no answer of an assistant\)"):
        read_records([path], SkippedRecords())
    path.write_text('{"text": "t"}')
    with pytest.raises(UsageError, match=r"holds no prompts \(line 1: has no question\)"):
        generate.read_prompts([path])


def test_prompts_refused_by_template_or_context_are_skipped_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny("qwen3", tmp_path / "m")
    refuses = "{{ raise_exception('no system') if messages[0].role == 'system' }}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(refuses)
    llm = LLM(str(folder), EngineConfig(threads=1, max_model_len=64))
    (path := tmp_path / "x.jsonl").write_text(
        '{"history": [{"role": "system", "content": "s"}], "prompt": "q"}\n{"prompt": "an ant"}\n'
        + json.dumps({"prompt": "the " * 99})
    )
    with Shards(tmp_path / "out", "answers") as shards:
        generate.answer_prompts(llm, generate.read_prompts([path]), shards, max_tokens=4)
        assert [record["messages"][0]["content"] for record in shards] == ["an ant"]
    shown = capsys.readouterr().err
    assert "skipped a prompt (x): the chat template refuses the messages: no system" in shown
    assert "skipped a prompt (x): it has no place in the context of 64 tokens" in shown


def test_token_ids_of_another_model_are_refused(tmp_path: Path) -> None:
    llm = LLM(str(write_tiny("qwen3", tmp_path / "m")), EngineConfig(threads=1))
    text = ChatTokenizer(llm.tokenizer, llm.chat_template, llm.model.config.vocab_size)
    asked, answer, cut = map(llm.tokenizer.encode, ("the", "an ant", "an ant\u20ac"))
    line = {"prompt": "the", "response": "an ant", "prompt_ids": asked, "response_ids": [*answer, 2]}
    inside_a_character = {**line, "response_ids": cut[:-1]}  # as at the time limit of a run
    others = [{**line, "response_ids": asked}, {"prompt_ids": asked, "response_ids": [5, 10**12, 5, 5]}]
    given = [parse_record(each, "x") for each in (line, inside_a_character, *others)]
    examples = encode_records(given, text, skipped := SkippedRecords())
    assert [each.tokens.tolist() for each in examples] == [[*asked, *answer, 2], [*asked, *cut[:-1]]]
    assert [line.partition(": ")[2] for line in skipped.lines()] == [
        "its token ids are not those of its text: another model's?", "token 1000000000000 is not in the vocabulary",
    ]  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_full_disk_is_reported_and_keeps_the_records(tmp_path: Path) -> None:
    with Shards(tmp_path, "x") as shards:
        shards.append({"key": "a"})
        shards.close()
        (tmp_path / "x-00000.jsonl").rename(tmp_path / "kept")
        (tmp_path / "x-00000.jsonl").symlink_to("/dev/full")
        with pytest.raises(CapacityError, match="No space left"):
            shards.append({"key": "b"})
    (tmp_path / "kept").replace(tmp_path / "x-00000.jsonl")
    with Shards(tmp_path, "x") as shards:
        assert shards.keys == {"a"}


@pytest.mark.parametrize(("changes", "message"), [
    ({}, "needs a bound"),
    ({"tokens": 0}, "above 0"),
    ({"minutes": math.nan}, "above 0"),
    ({"minutes": math.inf}, "above 0"),
    ({"minutes": -1.0}, "above 0"),
    ({"only_prompts": True}, "no prompts"),
])  # fmt: skip
def test_bad_options_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(DataOptions(out=tmp_path / "out", **changes))


@pytest.mark.parametrize("out", ["", ".", "here"])
def test_folder_with_other_files_is_refused(out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty --out, as from an unset variable, is the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "letter.txt").write_text("dear reader")
    with pytest.raises(UsageError, match="holds other files"):
        run(DataOptions(out=Path(out), tokens=10))
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["letter.txt"]


def test_text_of_other_models_and_missing_inputs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"model": "my-model", "lora": "./sql"}')
    with pytest.raises(UsageError, match=r"holds text of my-model with \./sql, not of my-model"):
        run(DataOptions(model="my-model", out=tmp_path, tokens=10))
    (tmp_path / "manifest.json").write_text('{"model": "models/other"}')
    with pytest.raises(UsageError, match="holds text of models/other, not of my-model"):
        run(DataOptions(out=tmp_path, tokens=10, model="my-model"))
    with pytest.raises(UsageError, match="there is no"):
        run(DataOptions(out=tmp_path / "out", tokens=10, text=(tmp_path / "nowhere",)))
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"no": 1}\n')
    with pytest.raises(UsageError, match="holds no prompts"):
        run(DataOptions(out=tmp_path / "out", tokens=10, prompts=(path,)))


@pytest.fixture
def short_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small waves of short prompts, so that runs end soon."""
    monkeypatch.setattr(self_distillation, "WAVE", 8)
    monkeypatch.setattr(self_distillation, "OWN_ATTEMPTS", 16)
    monkeypatch.setattr(generate, "PROMPT_TOKENS", 64)


@pytest.mark.slow
def test_run_is_resumed_and_its_records_are_valid(
    tmp_path: Path, short_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All output of the random model counts as usable."""
    monkeypatch.setattr(generate, "is_usable", lambda text, language: True)
    docs, out = tmp_path / "docs", tmp_path / "out"
    docs.mkdir()
    (docs / "a.md").write_text("A guide about towns and rivers. " * 22)
    model = _tiny_model(tmp_path, template=True)
    common = {"model": model, "out": out, "text": (docs,), "licence": "MIT", "max_tokens": 12}
    first = run(DataOptions(tokens=60, **common))
    (out / "own.state").write_text("")
    second = run(DataOptions(tokens=160, **common))
    assert 60 <= first.data["answer_tokens"] < 160 <= second.data["answer_tokens"]
    manifest = json.loads((out / "manifest.json").read_text())
    assert sum(row["answer_tokens"] for row in manifest["kinds"].values()) == manifest["answer_tokens"]
    assert any(name.startswith("docs (MIT)") for name in manifest["sources"])
    records = read_records([out], SkippedRecords())
    assert {record.kind for record in records} >= {"prose", "own"}
    lines = [json.loads(line) for path in out.glob("answers-*.jsonl") for line in path.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    assert {line["temperature"] > 0 for line in lines} == {True, False}
    assert all(0 < len(line["response_ids"]) <= 12 for line in lines)


def _tiny_model(folder: Path, *, template: bool) -> str:
    path = write_tiny("mimo", folder / "model")
    if not template:
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
        (path / "chat_template.jinja").unlink(missing_ok=True)
    return str(path)


def test_unfinished_answers_are_kept_at_the_time_limit(
    tmp_path: Path, short_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time suffices for some steps of 200-token answers."""
    monkeypatch.setattr(self_distillation, "time", SimpleNamespace(monotonic=count(1.0).__next__))
    report = run(
        DataOptions(model=_tiny_model(tmp_path, template=True), out=tmp_path / "out", minutes=1.0, max_tokens=200)
    )
    assert report.ok
    lines = list(map(json.loads, (tmp_path / "out" / "answers-00000.jsonl").read_text().splitlines()))
    assert any(line["finish_reason"] == "length" and len(line["response_ids"]) < 200 for line in lines)
    assert report.data["answer_tokens"] == sum(len(line["response_ids"]) for line in lines)


def test_run_without_answers_fails_with_a_reason(
    tmp_path: Path, short_work: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "is_usable", lambda text, language: False)
    model = _tiny_model(tmp_path, template=False)
    assert main(["data", model, "--out", str(tmp_path / "out"), "--tokens", "50"]) == 1
    assert "nothing was written: the model has no chat template" in capsys.readouterr().out
    assert main(["train", model, "--out", str(tmp_path / "head"), "--tokens", "50"]) == 2
    assert "has no chat template" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [
    "--kind magic", "--depth 99", "--modules 9", "--draft-vocab 0", "--seed -1", "--threads 0", "--threads -3",
    "--device tpu", "--head x",
])  # fmt: skip
def test_wrong_options_of_train_write_no_files(wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "some text to learn from, again and again and again"}\n')
    arguments = [
        _tiny_model(tmp_path, template=True),
        "--data",
        str(data),
        "--out",
        str(tmp_path / "head"),
        "--tokens",
        "99",
    ]
    assert main(["train", *arguments, *wrong.split()]) == 2 and not (tmp_path / "head.training").exists()
    assert "headstart: error: " in capsys.readouterr().err


def test_data_without_records_is_refused_before_torch_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "headstart.train.run", None)  # makes its import fail
    (tmp_path / "data").mkdir()
    words = ["train", _tiny_model(tmp_path, template=True), "--out", str(tmp_path / "head"), "--tokens", "99", "--data"]
    assert main([*words, str(tmp_path / "data")]) == 2
    assert "data holds no .jsonl file" in capsys.readouterr().err


def test_training_without_torch_names_the_missing_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for more in ([], ["--from-scratch", "mimo"]):
        assert main(["train", "--out", str(tmp_path / "head"), "--minutes", "1", *more]) == 2
        assert "pip install torch==2.13" in capsys.readouterr().err


@pytest.mark.slow
def test_training_without_text_generates_text(
    tmp_path: Path, short_work: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All output of the random model counts as usable."""
    monkeypatch.setattr(generate, "is_usable", lambda text, language: True)
    out = tmp_path / "head"
    model = _tiny_model(tmp_path, template=True)
    code = main(["train", model, "--out", str(out), "--tokens", "500", "--threads", "1", "--json"])
    assert code in (0, 1)  # the head of so short a run may not pay
    assert json.loads(capsys.readouterr().out)["tokens"] >= 500
    assert json.loads((tmp_path / "head.training" / "text" / "manifest.json").read_text())["answer_tokens"] >= 500
