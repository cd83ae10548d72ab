"""Robustness of commands: for any input and environment the exit code is 0, 1, 2 or 130, there is no traceback, and an
error ends with a hint. `first_minute.py` has the command lines and checks."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from first_minute import HELP, SMALL, Outcome, commands, endless, forget_output, isolated_folder, run, wrong_lines
from support import PATIENCE

pytestmark = pytest.mark.slow  # many cases
Paths = dict[str, str]
ONE_IN = 83
"""The suite runs one of so many command lines with a wrong value; --fuzz runs more."""
SLOW = ("bench step", "tune")
"""Commands that measure the machine first, for seconds."""
REFUSED = ("probe", "gate", "ps", "stop", "models remove")
"""Commands whose small runs end with 2, as no server or model exists."""
QUICK = tuple(name for name in SMALL if name not in SLOW)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paths]:
    with isolated_folder(tmp_path_factory.mktemp("first-minute")) as names:
        yield names


def small(name: str, paths: Paths, *more: str) -> tuple[str, ...]:
    forget_output(paths)
    return (*name.split(), *(paths.get(word, word) for word in SMALL[name]), *more)


def expect(outcome: Outcome, *codes: int) -> None:
    assert not outcome.faults(), outcome.shown()
    assert outcome.code in codes, outcome.shown()


def test_every_command_has_a_small_run() -> None:
    assert set(SMALL) == set(commands())


@pytest.mark.parametrize("name", QUICK)
def test_small_run_has_the_expected_exit_code(name: str, paths: Paths) -> None:
    expect(run(small(name, paths)), 2 if name in REFUSED else 0)


@pytest.mark.parametrize("name", [name for name in QUICK if name not in ("chat", "serve", "train")])
def test_json_output_is_one_document(name: str, paths: Paths) -> None:
    expect(run(small(name, paths, "--json")), 0, 1, 2)


def test_wrong_values_have_clear_errors(paths: Paths, fuzz: int) -> None:
    lines = [words for words in wrong_lines(paths) if words[0] != "tune" and words[1] != "step" and not endless(words)]
    found = []
    for words in lines[:: max(ONE_IN // fuzz, 1)]:
        forget_output(paths)
        outcome = run(words)
        found += [outcome] if outcome.faults() else []
    if found:  # the words themselves may not be UTF-8, so no assertion shows them
        pytest.fail("\n".join(outcome.shown() for outcome in found))


@pytest.mark.parametrize("name", ["", "bench", *SMALL])
def test_help_fits_the_terminal_and_has_examples(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for columns in (40, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        texts = [run((*name.split(), flag)) for flag in HELP]
        assert len({each.out for each in texts}) == 1
        expect(texts[0], 0)
        text, _, examples = texts[0].out.partition("\nExamples:")
        assert max(map(len, text.splitlines())) <= columns
        assert f"  headstart {name}".rstrip() in examples
        assert not any(word in text for word in (" range", "<int>", "<bool>", "list["))
    assert len(text.splitlines()) < 70, "rare options come with --help-all"
    if name:
        assert len(run((*name.split(), "--help-all")).out) >= len(text)


def test_help_keeps_square_brackets() -> None:
    assert "[[from, to, depth], ...]" in run(("generate", "--help-all")).out
    assert "'[ngram]'" in run(("launch", "--help")).out


@pytest.mark.parametrize("name", QUICK)
def test_closed_pipe_behind_stdout(name: str, paths: Paths) -> None:
    """`headstart ... | true` does its work and has its usual exit code."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as broken:
        outcome = run(small(name, paths), stdout=broken)
    expect(outcome, 2 if name in REFUSED else 0)


@pytest.mark.parametrize("name", [name for name in QUICK if name not in ("serve", "chat", *REFUSED)])
def test_full_disk_behind_stdout_is_reported(name: str, paths: Paths) -> None:
    with Path("/dev/full").open("w") as full:
        outcome = run(small(name, paths), stdout=full)
    expect(outcome, 2)
    assert "No space left on device" in outcome.err


@pytest.mark.parametrize("name", SMALL)
def test_commands_without_arguments(name: str, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Required arguments are named; others have defaults. The default model is tiny; long work is interrupted."""
    monkeypatch.setattr("headstart.hub.DEFAULT_MODEL", paths["MODEL"])
    if name in ("demo", "verify", "tune", "plan", "bench run", "bench step"):  # minutes
        module = f"headstart.tools.{name.replace(' run', '.run').replace(' ', '.')}"
        module += "" if name in ("demo", "tune", "bench run", "bench step") else ".run"
        monkeypatch.setattr(f"{module}.run", interrupt)
    expect(run(tuple(name.split())), 0, 2, 130)


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("name", [name for name in QUICK if name not in (*REFUSED, "export", "train")])
def test_unwritable_home_is_no_error(name: str, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    place = "/proc/nowhere" if len(name) % 2 else "/dev/null/below"
    for variable in ("HOME", "HEADSTART_CACHE", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(variable, place)
    expect(run(small(name, paths)), 0)


def test_default_model_with_an_unwritable_cache_is_an_error(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", "/dev/null/below")
    expect(run(("generate", "--prompt", "Hi")), 2)


# Separate processes: signals, streams and system limits.


def start(*words: str, program: tuple[str, ...] = ("-m", "headstart"), **more: object) -> subprocess.Popen[str]:
    command = [sys.executable, *program, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload, no-any-return]


def wait_outcome(process: subprocess.Popen[str], words: tuple[str, ...]) -> Outcome:
    out, err = process.communicate(timeout=PATIENCE)
    return Outcome(words, process.returncode, out, err)


def wait_for_text(stream: IO[str] | None) -> None:
    assert stream is not None
    assert stream.read(1)


PROGRAM = "import sys; print(flush=True); from headstart.cli.main import main; sys.exit(main())"
"""The `headstart` script with a line of output when Python has started: before that, Python handles Ctrl-C."""


HOMELESS = "import pwd, sys; pwd.getpwuid = {}.__getitem__; from headstart.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize("command", ["doctor", "models"])
def test_user_without_a_home_directory(command: str) -> None:
    """The user database does not have the user id, as in containers; HOME is not set."""
    variables = ("HOME", "HEADSTART_CACHE", "XDG_CACHE_HOME", "HF_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in variables}
    expect(wait_outcome(start(command, program=("-c", HOMELESS), env=environment), (command,)), 0)


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.4, 0.7])
def test_ctrl_c_during_start(seconds: float, paths: Paths) -> None:
    words = ("generate", paths["MODEL"], "--prompt", "Hi", "--max-tokens", "400", "--ignore-eos")
    process = start(*words, program=("-c", PROGRAM))
    wait_for_text(process.stdout)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    expect(wait_outcome(process, words), 0, 130)


def test_ctrl_c_during_an_answer(paths: Paths) -> None:
    words = ("generate", paths["MODEL"], "--prompt", "Hi", "--max-tokens", "480", "--ignore-eos", "--no-mtp")
    process = start(*words)
    wait_for_text(process.stdout)
    process.send_signal(signal.SIGINT)
    outcome = wait_outcome(process, words)
    expect(outcome, 130)
    assert outcome.err == "headstart: error: interrupted\n"


def test_closed_standard_streams() -> None:
    command = f"{sys.executable} -m headstart doctor <&- >&- 2>&-"
    assert subprocess.run(["bash", "-c", command], check=False).returncode == 0


def test_file_size_limit_is_reported(paths: Paths, tmp_path: Path) -> None:
    """Every written file is limited, as on a full disk. No partial output stays."""
    words = ("export", paths["MODEL"], "--to", "vllm-mimo", "--out", str(tmp_path / "out"))
    command = f"ulimit -f 1; exec {sys.executable} -m headstart {' '.join(words)}"
    done = subprocess.run(["bash", "-c", command], check=False, capture_output=True, text=True)
    expect(Outcome(words, done.returncode, done.stdout, done.stderr), 2)
    assert not (tmp_path / "out").exists()


def test_ascii_stdout() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "headstart", "plan", "deepseek-v4", "--gpu", "h200x8"]
    done = subprocess.run(command, env=environment, capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stdout.isascii()


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_stdin_that_is_not_utf8(paths: Paths, command: str) -> None:
    """PYTHONIOENCODING simulates a locale such as en_US.UTF-8."""
    words = (command, paths["MODEL"], "--max-tokens", "8", "--threads", "1")
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    outcomes = []
    for piped in (b"a\xff", b"the\r\n", b"\xef\xbb\xbfthe"):
        done = subprocess.run(
            [sys.executable, "-m", "headstart", *words], env=environment, input=piped, capture_output=True, check=False
        )
        outcomes.append(Outcome(words, done.returncode, done.stdout.decode(), done.stderr.decode()))
    expect(outcomes[0], 2)
    assert "stdin is not UTF-8 text" in outcomes[0].err
    expect(outcomes[1], 0)
    assert outcomes[1].out == outcomes[2].out


def test_streams_stay_open_after_a_command_in_process() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "utf-8")
    expect(run(("--version",), stdout=stream), 0)
    stream.write("still open")


def test_empty_api_key_is_refused(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--api-key is empty" in run(("serve", paths["MODEL"], "--api-key", "")).err
    monkeypatch.setenv("HEADSTART_API_KEY", "")
    outcome = run(("serve", paths["MODEL"], "--port", "0"))
    expect(outcome, 2)
    assert "everybody could use the server" in outcome.err
