"""Commands with a fake LLM: requests, output, exit codes."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headstart.cli.main import main

Capture = pytest.CaptureFixture[str]


def error_lines(capsys: Capture) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_generate_streams_text_to_stdout_and_a_summary_to_stderr(fake_llm: Any, capsys: Capture) -> None:
    assert main(["generate", "--prompt", "Why?", "--temperature", "0.7", "--seed", "5", "--raw"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The sky is blue.\n"
    assert captured.err == "4 tokens, 30.0 tokens/s, acceptance length 2.00 (mtp)\n"
    ((prompt, params, raw, _),) = fake_llm.asked
    assert (prompt, params.temperature, params.seed, raw) == ("Why?", 0.7, 5, True)


@pytest.mark.parametrize(("command", "message"), [
    (["serve", "--keep-alive", "soon"], "--keep-alive is 'soon'"),
    (["verify", "--depths", "1,x"], "--depths is '1,x'"),
])  # fmt: skip
def test_error_of_a_wrong_value_names_its_option(command: list[str], message: str, capsys: Capture) -> None:
    assert main(command) == 2
    assert message in error_lines(capsys)[0]


def test_generate_uses_the_recommended_sampling(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_llm, "recommended", {"temperature": 0.6, "top_p": 0.9}, raising=False)
    assert main(["generate", "--prompt", "Why?", "--top-p", "1"]) == 0
    ((_, params, *_),) = fake_llm.asked
    assert (params.temperature, params.top_p) == (0.6, 1.0)


def test_generate_json_has_the_documented_shape(fake_llm: Any, capsys: Capture) -> None:
    assert main(["generate", "--prompt", "Why?", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "text": "The sky is blue.",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "stop",
        "seed": 77,
        "usage": {"prompt_tokens": 2, "completion_tokens": 4},
        "speculation": {
            "method": "mtp",
            "drafts": 1,
            "drafted": 3,
            "accepted": 1,
            "acceptance_rate": 1 / 3,
            "acceptance_length": 2.0,
            "per_position": [1, 0, 0],
            "forced": 0,
            "sources": {"": 1},
        },
        "timing": {"load_s": 0.1, "ttft_s": 0.01, "decode_s": 0.1, "decode_tokens_per_s": 30.0},
    }


def test_generate_json_with_choices_and_logprobs(fake_llm: Any, capsys: Capture) -> None:
    assert main(["generate", "-p", "Why?", "--json", "--n", "2", "--logprobs", "1"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [choice["index"] for choice in document["choices"]] == [0, 1]
    assert document["usage"]["completion_tokens"] == 8
    assert document["logprobs"][0] == {"token": 0, "logprob": -0.5, "top": [[0, -0.5]]}


def test_json_is_set_by_the_environment(fake_llm: Any, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_json in (("1", True), ("0", False)):
        monkeypatch.setenv("HEADSTART_JSON", value)
        assert main(["generate", "--prompt", "a", "--top-p", "2"]) == 2
        assert capsys.readouterr().out.startswith('{\n  "error":') == is_json


def test_errors_with_json_are_one_document(fake_llm: Any, capsys: Capture) -> None:
    for words in (["--prompt", "a", "--top-p", "2"], ["--prompt", "a", "--no-such"]):
        assert main(["generate", "--json", *words]) == 2
        captured = capsys.readouterr()
        error = json.loads(captured.out)["error"]
        assert captured.err == f"headstart: error: {error['message']}\nhint: {error['hint']}\n"


def test_engine_errors_name_the_flag(capsys: Capture) -> None:
    assert main(["generate", "qwen3_5-tiny", "--prompt", "a", "--threads", "1", "--stop-token-id", "999999"]) == 2
    assert "error: --stop-token-id names token 999999, but ids end at" in capsys.readouterr().err


def test_generate_prints_a_summary_of_each_choice(fake_llm: Any, capsys: Capture) -> None:
    assert main(["generate", "-p", "Why?", "--n", "2"]) == 0
    assert capsys.readouterr().err.count("4 tokens, 30.0 tokens/s") == 2


def test_logprobs_require_json(fake_llm: Any, capsys: Capture) -> None:
    assert main(["generate", "-p", "Why?", "--logprobs", "1"]) == 2
    assert error_lines(capsys) == [
        "headstart: error: --logprobs is given, but only the JSON document has them", "hint: add --json",
    ]  # fmt: skip
    assert not fake_llm.asked


def test_truncated_text_is_reported(fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("headstart.api.Completion.is_truncated", True)
    assert main(["generate", "-p", "Why?"]) == 0
    assert capsys.readouterr().err.endswith(", cut off by max_tokens or the context length\n")


def test_prompt_from_a_file_or_stdin(
    fake_llm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "prompt.txt").write_text("from a file")
    assert main(["generate", "--prompt-file", str(tmp_path / "prompt.txt")]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["generate"]) == 0
    assert [asked[0] for asked in fake_llm.asked] == ["from a file", "from a pipe"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"depth": "auto", "drafter": "auto"}),
        (["--depth", "auto"], {"depth": "auto"}),
        (["--depth", "4"], {"depth": 4}),
        (["--depth", "0"], {"depth": 0}),
        (["--no-mtp"], {"depth": 0}),
        (["--drafter", "ngram", "--ngram-max", "6"], {"drafter": "ngram", "ngram_max": 6}),
        (["--no-enable-prefix-caching"], {"enable_prefix_caching": False}),
        (
            ["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 5, "model": "my-head"}'],
            {"drafter": "mtp", "depth": 5, "head": "my-head"},
        ),
    ],
)
def test_engine_options_set_the_config(
    fake_llm: Any, options: list[str], expected: dict[str, Any], capsys: Capture
) -> None:
    assert main(["generate", "-p", "Why?", *options]) == 0
    (config,) = fake_llm.configs
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--prompt", " "], "the prompt is empty"),
        (["--prompt", "a", "--prompt-file", "b"], "both given"),
        (["--prompt-file", "/no/such/file"], "cannot read /no/such/file: No such file or directory"),
        (["--prompt", "a", "--temperature", "-1"], "temperature is -1.0"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "a", "--depth", "17"], "--depth is 17, but must be between 0 and 16"),
        (["--prompt", "a", "--depth", "two"], "--depth is 'two', but must be a whole number"),
        (["--prompt", "a", "--drafter", "mpt"], "--drafter is 'mpt'"),
        (["--prompt", "a", "--speculative-config", '{"metod": "mtp"}'], "unknown key 'metod'"),
        (["--prompt", "a", "--depth", "2", "--no-mtp"], "contradict"),
        (
            ["--prompt", "a", "--depth", "2", "--speculative-config", '{"num_speculative_tokens": 3}'],
            "--depth and --speculative-config both set depth",
        ),
        (["--prompt", "a", "--logit-bias", "x=1"], "--logit-bias is 'x=1'"),
        (["--prompt", "a", "--nonsense"], "No such option: --nonsense"),
        (["The sky is"], "'The sky is' is no model"),
        (["--prompt", "a", "--image", "/no/such/cat.png"], "--image: cannot read /no/such/cat.png: No such file"),
        (["--prompt", "a", "--image", __file__], "test_commands.py: the image cannot be read: it is no image"),
    ],
)
def test_invalid_input_has_a_one_line_error_and_exit_code_2(
    fake_llm: Any, options: list[str], message: str, capsys: Capture
) -> None:
    assert main(["generate", *options]) == 2
    lines = error_lines(capsys)
    assert lines[0].startswith("headstart: error: ")
    assert message in lines[0]
    assert len(lines) <= 2
    assert all(line.startswith("hint: ") for line in lines[1:])


def test_model_name_with_a_space_is_accepted_with_prompt(fake_llm: Any) -> None:
    assert main(["generate", "./my model", "--prompt", "a"]) == 0


def test_internal_error_has_one_line_and_exit_code_3(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("headstart.api.LLM", broken)
    assert main(["generate", "-p", "a"]) == 3
    lines = error_lines(capsys)
    assert lines[0].startswith("headstart: error: internal error: ZeroDivisionError: oops (test_commands.py:")
    monkeypatch.setenv("HEADSTART_TRACEBACK", "1")
    assert main(["generate", "-p", "a"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_exits_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.api.LLM", interrupted)
    assert main(["generate", "-p", "a"]) == 130
    assert error_lines(capsys) == ["headstart: error: interrupted"]


def test_chat_sends_the_whole_conversation(fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    lines = ["Hello", "", "And?", "/what", "way too long", "/reset", "New", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--system", "Be brief."]) == 0
    asked = [[message["content"] for message in prompt] for prompt, *_ in fake_llm.asked]
    answer = "The sky is blue."
    assert asked == [
        ["Be brief.", "Hello"],
        ["Be brief.", "Hello", answer, "And?"],
        ["Be brief.", "Hello", answer, "And?", answer, "way too long"],
        ["Be brief.", "New"],
    ]
    captured = capsys.readouterr()
    assert captured.out == f"{answer}\n" * 3
    assert "unknown command /what" in captured.err
    assert "the context is 2048" in captured.err


def test_chat_uses_the_recommended_sampling(fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(fake_llm, "chat_sampling", {"temperature": 0.2, "top_p": 0.9})
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main(["chat", "--top-p", "0.5"]) == 0
    ((_, params, *_),) = fake_llm.asked
    assert (params.temperature, params.top_p) == (0.2, 0.5)
    assert capsys.readouterr().err.count("is a tiny demo model; headstart models --available") == 1


@pytest.mark.parametrize("command", [
    "bench --out {file}/x.json", "bench --report {file}/x.html", "train --out {file}/head --minutes 1",
    "train --out head --minutes 1 --data none", "train --out head --minutes 1 --prompts none",
    "train --out head --minutes 1 --finetune --head none", "data --out {file}/texts --minutes 1",
    "data --out texts --prompts none", "data --out texts --text none", "export --out {file}/model",
    "graft model --strip --out {file}/model", "serve --record {file}/records", "bench --modes fast",
    "bench --workload nonsense", "tune --workload nonsense",
])  # fmt: skip
def test_long_commands_check_their_files_before_loading(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """Neither a model is loaded nor torch imported."""
    monkeypatch.chdir(tmp_path)
    for module in ("api.llm", "tools.bench.inprocess", "tools.bench.step", "tools.tune", "engine.load"):
        # engine.load last: a module that is imported here must not keep the patch.
        monkeypatch.setattr(
            f"headstart.{module}.load_model", lambda *_: pytest.fail("a model is loaded"), raising=False
        )
    (file := tmp_path / "file").write_text("")
    assert main(command.format(file=file).split()) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert any(each in error for each in ("cannot be written", "none does not exist", "is unknown", "fast", "nonsense"))


@pytest.mark.parametrize("end", ["/quit", "/bye", "/exit"])
def test_chat_without_a_template_continues_the_text(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture, end: str
) -> None:
    monkeypatch.setattr(fake_llm, "has_chat_template", False)
    assert chat(monkeypatch, "Look up:", "The grass is", end, "never") == 0
    asked = [(prompt, raw) for prompt, _, raw, _ in fake_llm.asked]
    assert asked == [("Look up:", True), ("Look up:The sky is blue.\nThe grass is", True)]
    assert capsys.readouterr().err.count("has no chat template: it continues your text") == 1


def test_chat_template_by_name(fake_llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def use(self: Any, template: Any) -> None:
        self.has_chat_template, self.turn_end = True, (template.turn_end,)

    monkeypatch.setattr(fake_llm, "has_chat_template", False)
    monkeypatch.setattr(fake_llm, "use_chat_template", use, raising=False)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))
    assert main(["chat", "--chat-template", "vicuna", "--stop", "#"]) == 0
    ((prompt, params, raw, _),) = fake_llm.asked
    assert (prompt, params.stop, raw) == ([{"role": "user", "content": "Hello"}], ("\nUSER:", "#"), False)
    assert "template" not in capsys.readouterr().err
    assert main(["chat", "--chat-template", "none"]) == 2
    assert "or a name: chatml" in capsys.readouterr().err


def chat(monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    return main(["chat", "--temperature", "0.7"])


def test_chat_saves_loads_and_regenerates(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture
) -> None:
    file = str(tmp_path / "talk.json")
    lines = ["/set system Be brief.", "/set max-tokens 9", "Hello", "/regenerate", f"/save {file}", f"/save {file}"]
    assert chat(monkeypatch, *lines, "/set", "/help") == 0
    captured = capsys.readouterr().err
    assert "is there already" in captured and "max_tokens 9" in captured and "/regenerate" in captured
    assert chat(monkeypatch, f"/load {file}", '"""And', 'now?"""') == 0
    asked = [[message["content"] for message in prompt] for prompt, *_ in fake_llm.asked]
    first = ["Be brief.", "Hello"]
    assert asked == [first, first, [*first, "The sky is blue.", "And\nnow?"]]
    assert [params.max_tokens for _, params, *_ in fake_llm.asked] == [9, 9, 9]


def test_image_arguments(fake_llm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Capture) -> None:
    """In chat, images are added by /image or a pasted path, sent with the next message, saved and loaded."""
    files = [tmp_path / "a cat.png", tmp_path / "dog.bmp"]
    for width, file in enumerate(files, 1):
        Image.new("RGB", (width, 1)).save(file)
    assert main(["generate", "-p", "What?", *(word for file in files for word in ("--image", str(file)))]) == 0
    assert [image.size for image in fake_llm.images] == [(1, 1), (2, 1)]

    assert chat(monkeypatch, f"/image {files[0]}") == 0
    assert "this model reads text only" in capsys.readouterr().err
    monkeypatch.setattr(fake_llm, "image_processor", object())
    pasted, saved = str(files[0]).replace(" ", "\\ "), tmp_path / "talk.json"
    lines = [f"/image {files[1]}", pasted, "What?", "And?", f"/image {tmp_path}", "/image", f"/save {saved}"]
    assert chat(monkeypatch, *lines) == 0
    said = capsys.readouterr().err
    assert "2 x 1 pixels" in said and "Is a directory" in said and "/image needs the name of a file" in said
    messages = fake_llm.asked[-1][0]
    assert [part["type"] for part in messages[0]["content"]] == ["image_url", "image_url", "text"]
    assert messages[2]["content"] == "And?"
    assert chat(monkeypatch, f"/load {saved}", "So?") == 0
    assert fake_llm.asked[-1][0][0] == messages[0]


@pytest.mark.parametrize(("line", "message"), [
    ("/sat", "unknown command /sat"), ("/set temprature 1", "did you mean temperature?"),
    ("/set foo 3", "/set lists the settings"),
    ("/set temperature hot", "temperature is 'hot', which is no number"),
    ("/set temperature -1", "temperature is -1.0"), ("/regenerate", "there is no answer yet"),
    ("/save", "/save needs the name of a file"),
    ("/save /none/such/talk.json", "cannot write /none/such/talk.json"),
    ("/load none.json", "cannot read none.json"), ("/load bad.json", "bad.json holds no conversation"),
    ("/load role.json", "has a role other than"),
])  # fmt: skip
def test_invalid_chat_commands_have_a_message(
    fake_llm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, message: str, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text('{"messages": 1}')
    Path("role.json").write_text('{"messages": [{"role": "tool", "content": "x"}]}')
    assert chat(monkeypatch, line, "Hello") == 0
    assert message in capsys.readouterr().err
    assert len(fake_llm.asked) == 1


def test_doctor_shows_backend_and_threads(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["backend"]["name"] in ("native", "reference")
    assert document["threads"]["usable"] >= 1
    assert main(["doctor"]) == 0
    assert "backend    " in capsys.readouterr().out


def test_serve_reads_tls_files_before_the_model(tmp_path: Path, capsys: Capture) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    assert main(["serve", "no-model", "--ssl-certfile", str(empty), "--ssl-keyfile", str(empty)]) == 2
    assert f"--ssl-keyfile {empty}: " in error_lines(capsys)[0]
    empty.write_text("-----BEGIN ENCRYPTED PRIVATE KEY-----\n")
    assert main(["serve", "no-model", "--ssl-certfile", str(empty), "--ssl-keyfile", str(empty)]) == 2
    assert f"--ssl-keyfile {empty} is encrypted" in error_lines(capsys)[0]


@pytest.mark.parametrize(
    ("command", "refused"),
    [
        ("verify", "depth drafter no-mtp seed max-num-batched-tokens"), ("tune", "depth no-mtp depth-by-batch rule"),
        ("bench run", "depth no-mtp"), ("bench step", "kv-spill lora rule seed"), ("data", "drafter depth no-mtp head"),
        ("chat", "n logprobs"),
    ],
)  # fmt: skip
def test_help_omits_unsupported_options(command: str, refused: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help-all"]) == 0
    page = capsys.readouterr().out
    assert "--threads" in page
    assert [flag for flag in refused.split() if re.search(rf"^  --{flag}\b(?!-)", page, re.MULTILINE)] == []
