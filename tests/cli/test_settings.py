"""headstart.toml and HEADSTART_*: precedence, types, invalid settings, completion."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headstart.cli import bench
from headstart.cli.app import application
from headstart.cli.main import main
from headstart.cli.parser import all_commands
from headstart.cli.settings import OTHER_VARIABLES, Settings

Capture = pytest.CaptureFixture[str]
COMMANDS = all_commands(application())


@pytest.fixture(autouse=True)
def isolated_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder and an empty user configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    return tmp_path


def write(text: str, path: str = "headstart.toml") -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def generate(*words: str) -> int:
    return main(["generate", "--prompt", "Why?", *words])


def test_precedence_of_settings(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Command line before environment before file; in each, the command's own setting before the general one."""
    seen = []
    steps: list[tuple[str, str]] = [
        ("headstart.toml", "depth = 1"), ("headstart.toml", "depth = 1\n[generate]\ndepth = 2"),
        ("HEADSTART_DEPTH", "3"), ("HEADSTART_GENERATE_DEPTH", "4"), ("HEADSTART_SERVE_DEPTH", "9"),
    ]  # fmt: skip
    for place, text in steps:
        write(text) if place.endswith(".toml") else monkeypatch.setenv(place, text)
        assert generate() == 0
        seen.append(fake_llm.configs[-1].depth)
    assert generate("--depth", "5") == 0
    assert [*seen, fake_llm.configs[-1].depth] == [1, 2, 3, 4, 4, 5]


def test_locations_of_the_settings_file(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("threads = 2", "user/headstart/headstart.toml")
    generate()
    write("threads = 3")
    generate()
    write("threads = 4", "other.toml")
    monkeypatch.setenv("HEADSTART_CONFIG", "other.toml")
    generate()
    write("threads = 5", "another.toml")
    generate("--config", "another.toml")
    generate("--config=another.toml")
    assert [config.threads for config in fake_llm.configs] == [2, 3, 4, 5, 5]


def test_settings_have_the_types_of_options(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write('model = "some-model"\nstop = ["one two", "three"]\nraw = true\ntemperature = 0.5\nspeculative_config = '
          '{method = "ngram", num_speculative_tokens = 4}\n')  # fmt: skip
    monkeypatch.setenv("HEADSTART_IGNORE_EOS", "yes")
    monkeypatch.setenv("HEADSTART_NO_SHARED_LOOKUP", "0")
    assert generate() == 0
    ((_, params, raw, _),) = fake_llm.asked
    assert (params.stop, params.temperature, params.ignore_eos, raw) == (("one two", "three"), 0.5, True, True)
    (config,) = fake_llm.configs
    assert (config.drafter, config.depth, config.shared_lookup) == ("ngram", 4, True)
    monkeypatch.setenv("HEADSTART_STOP", '["a b", "c"]')
    assert generate() == 0
    assert fake_llm.asked[-1][1].stop == ("a b", "c")


def test_no_mtp_and_depth_override_each_other_by_precedence(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write("depth = 3")
    assert generate("--no-mtp") == 0
    monkeypatch.setenv("HEADSTART_NO_MTP", "1")
    assert generate() == 0
    assert generate("--depth", "2") == 0
    assert [config.depth for config in fake_llm.configs] == [0, 0, 2]


@pytest.mark.parametrize(("place", "text", "expected"), [
    ("headstart.toml", "threds = 4", ("headstart.toml: threds is no setting", "did you mean threads?")),
    ("headstart.toml", "[serve]\nprot = 1", ("headstart.toml [serve]: prot is no", "did you mean port?")),
    ("headstart.toml", "[srve]\nport = 1", ("headstart.toml: srve is no setting", "did you mean serve?")),
    ("headstart.toml", "[bench.run]\nrows = 1", ("headstart.toml [bench.run]: rows is no setting", "")),
    ("headstart.toml", "threads = true", ("headstart.toml: threads is true, but must be a text or a number", "")),
    ("headstart.toml", "raw = 1", ("headstart.toml: raw is 1, but must be true or false", "")),
    ("headstart.toml", "threads = ", ("headstart.toml is no TOML", "")),
    ("headstart.toml", 'threads = "x"', ("--threads is 'x', but must be", "--threads is set by headstart.toml)")),
    ("headstart.toml", "[generate]\ndepth = 17", ("--depth is 17", "--depth is set by headstart.toml [generate])")),
    ("HEADSTART_THREDS", "4", ("HEADSTART_THREDS is no setting", "did you mean HEADSTART_THREADS?")),
    ("HEADSTART_THREADS", "x", ("--threads is 'x', but must be", "--threads is set by HEADSTART_THREADS)")),
    ("HEADSTART_TOP_P", "2", ("--top-p is 2", "--top-p is set by HEADSTART_TOP_P)")),
    ("HEADSTART_RAW", "maybe", ("HEADSTART_RAW is 'maybe', but must be true or false", "")),
    ("HEADSTART_STOP", "[1", ("HEADSTART_STOP is '[1', which is no list", "")),
    ("HEADSTART_CONFIG", "none.toml", ("cannot read none.toml: No such file", "")),
])  # fmt: skip
def test_invalid_settings_name_their_source(
    fake_llm: Any, place: str, text: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    write(text) if place.endswith(".toml") else monkeypatch.setenv(place, text)
    assert generate() == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert all(each in captured.err for each in expected)
    assert 1 <= len(captured.err.splitlines()) <= 2


def test_help_works_with_invalid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_NONSENSE", "1")
    assert main(["generate", "--help"]) == 0
    assert generate() == 2


def test_kubernetes_service_variables_are_ignored(fake_llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes sets these variables for a service called headstart."""
    for name, value in {
        "HEADSTART_SERVICE_HOST": "10.0.0.1", "HEADSTART_SERVICE_PORT": "8000", "HEADSTART_SERVICE_PORT_HTTP": "8000",
        "HEADSTART_PORT": "tcp://10.0.0.1:8000", "HEADSTART_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "HEADSTART_PORT_8000_TCP_ADDR": "10.0.0.1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert generate() == 0


def test_every_option_has_one_variable() -> None:
    settings = Settings(COMMANDS, {})
    meanings: dict[str, set[tuple[str, str]]] = {}
    for command, options in settings.options.items():
        words = command.split()
        for scope in ["", *(" ".join(words[:count]) for count in range(1, len(words) + 1))]:
            for name in options:
                variable = "HEADSTART_" + re.sub(r"\W", "_", f"{scope} {name}".strip()).upper()
                meanings.setdefault(variable, set()).add((scope, name))
    assert {variable: found for variable, found in meanings.items() if len(found) > 1} == {}
    assert not meanings.keys() & OTHER_VARIABLES
    assert {"HEADSTART_API_KEY", "HEADSTART_SERVE_PORT", "HEADSTART_MODEL", "HEADSTART_BENCH_RUN_PAIRS"} <= set(
        meanings
    )


def test_commands_ignore_general_settings_that_they_vary() -> None:
    """verify varies depth, drafter and seed; a single pass of bench step has no queue."""
    given = {"depth": "3", "drafter": "mtp", "seed": "1", "kv_blocks": "9", "model": "m", "threads": "1"}
    environment = {f"HEADSTART_{name.upper()}": value for name, value in given.items()}
    settings = Settings(COMMANDS, environment)
    assert settings.for_command("verify").keys() == {"kv-blocks", "model", "threads"}
    used = {name.replace("_", "-") for name in bench.STEP_OPTIONS}
    assert settings.for_command("bench step").keys() <= {*used, "model"}
    assert "model" not in settings.for_command("probe")
    assert Settings(COMMANDS, {"HEADSTART_VERIFY_SEED": "1"}).for_command("verify")["seed"].value == "1"


def test_doctor_lists_settings_and_their_sources(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    write('threads = 1\n[serve]\nport = 9000\napi-key = "secret"\n[models.small]\npath = "x"\n')
    monkeypatch.setenv("HEADSTART_SERVE_PORT", "9001")
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "settings   command line > environment > headstart.toml > default" in shown
    assert "serve --port 9001: HEADSTART_SERVE_PORT" in shown
    assert "serve --port 9000: headstart.toml [serve] (HEADSTART_SERVE_PORT comes first)" in shown
    assert "serve --api-key ***: headstart.toml [serve]" in shown and "secret" not in shown
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["settings"]
    assert (document["file"], document["models"]) == ("headstart.toml", ["small"])
    options = [each["option"] for each in document["set"]]
    assert options == ["serve --port", "--threads", "serve --port", "serve --api-key"]


def test_shell_completion(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert main(["completion", shell]) == 0
        assert f'_HEADSTART_COMPLETE="{shell} ' in capsys.readouterr().out
    assert main(["completion", "csh"]) == 2
    assert "SHELL is 'csh'" in capsys.readouterr().err
    lines = {"headstart ser": "serve", "headstart serve --por": "--port", "headstart chat smol": "smollm2-135m-mtp",
             "headstart bench st": "step", "headstart bench step --ro": "--rows",
             "headstart bench --pa": "--pairs", "headstart chat --quantization i": "int8",
             "headstart chat 'smol": "smollm2-135m-mtp"}  # fmt: skip
    for typed, expected in lines.items():
        monkeypatch.setenv("_HEADSTART_COMPLETE", f"bash {typed}")
        assert main([]) == 0
        assert expected in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    ("line", "command", "flag", "value"),
    [
        ('model = "some/model"', "serve", "model", ["some/model"]),
        ('model = "some/model"', "generate", "model", "some/model"),
        ('lora = ["a=x", "b=y"]', "data", "lora", ["a=x", "b=y"]),
        ('lora = "x"', "train", "lora", "x"),
        ('api-key = ["one", "two"]', "serve", "api-key", ["one", "two"]),
        ('api-key = ["one", "two"]', "probe", "api-key", "one"),
        ('[bench.run]\ncompare = ["a", "b"]', "bench run", "compare", ["a", "b"]),
    ],
)
def test_general_settings_are_converted_to_the_options_type(line: str, command: str, flag: str, value: Any) -> None:
    """An option may be a list in one command and a single value in another."""
    write(line)
    assert Settings(COMMANDS, {}).for_command(command)[flag].value == value


@pytest.mark.parametrize(
    ("command", "given", "hidden"),
    [
        ("data", (), "drafter"), ("bench step", (), "kv-spill"), ("bench run", (), "speculative-config"),
        ("bench run", ("url",), "threads"), ("bench run", ("url",), "model"), ("tune", ("url",), "seed"),
        ("train", ("from-scratch",), "model"), ("probe", (), "max-tokens"), ("chat", (), "n"), ("chat", (), "logprobs"),
    ],
)  # fmt: skip
def test_general_settings_that_a_command_lacks_are_ignored(command: str, given: tuple[str, ...], hidden: str) -> None:
    settings = Settings(COMMANDS, {f"HEADSTART_{hidden.upper().replace('-', '_')}": "1"})
    assert hidden not in settings.for_command(command, given)


@pytest.mark.parametrize(("variable", "file", "hint"), [
    ("3", None, "unset HEADSTART_THREADS"),
    (None, "threads = 3", "take it out of headstart.toml"),
    (None, "[serve]\nthreads = 3", "take it out of headstart.toml [serve]"),
])  # fmt: skip
def test_hint_says_where_to_remove_a_setting(
    variable: str | None, file: str | None, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if variable:
        monkeypatch.setenv("HEADSTART_THREADS", variable)
    if file:
        write(file)
    assert main(["serve", "org/model", "--engine", "vllm", "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "--threads has no counterpart in vllm (--threads is set by" in error
    assert error.splitlines()[-1] == f"hint: {hint}"
