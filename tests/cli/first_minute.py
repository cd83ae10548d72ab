"""Command lines of a new user and checks of their outcome, for test_first_minute.py and other tests."""

import contextlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from headstart.cli import app
from headstart.cli.parser import Command, all_commands
from headstart.options import Option

ALLOWED = {0, 1, 2, 130}
HELP = ("-h", "--help")
MAX_RUN_S = 100
NUMBERS = ("nan", "inf", "-1", "0", "", "x", "1e999", str(10**30))
TEXTS = ("", " ", "nan", "-1", "0", ",", "no such thing", "\udcff", "[", "{}", "[1]", "x" * 5000)
SMALL: dict[str, tuple[str, ...]] = {
    "demo": ("MODEL", "--max-tokens", "2"),
    "generate": ("MODEL", "--prompt", "Hi", "--max-tokens", "2"),
    "chat": ("MODEL", "--max-tokens", "2"),
    "serve": ("MODEL", "--port", "0"),
    "verify": ("MODEL", "--max-tokens", "2", "--temperatures", "0", "--depths", "1", "--drafters", "ngram",
               "--batch-sizes", "1", "--chunk-sizes", "32", "--prefix-cache", "on", "--preemption", "off",
               "--thread-counts", "1"),
    "inspect": ("MODEL",),
    "launch": ("vllm", "MODEL", "--dry-run", "--gpus", "h100x1", "--engine-version", "0.12.0"),
    "probe": ("http://127.0.0.1:9",),
    "gate": ("http://127.0.0.1:9", "http://127.0.0.1:9"),
    "plan": ("MODEL", "--gpu", "h200x1", "--context", "128"),
    "tune": ("MODEL", "--minutes", "0.0001", "--concurrency", "1"),
    "data": ("MODEL", "--out", "OUT", "--tokens", "4", "--max-tokens", "2"),
    "train": ("MODEL", "--out", "OUT", "--data", "TEXTS", "--tokens", "4", "--threads", "1"),
    "adapt": ("--forget", "--model", "MODEL"),
    "export": ("MODEL", "--out", "OUT"),
    "graft": ("MODEL", "--out", "OUT", "--strip"),
    "pull": ("qwen3_5-tiny",),
    "ps": ("--url", "http://127.0.0.1:9"),
    "stop": ("no-such-model", "--url", "http://127.0.0.1:9"),
    "doctor": (),
    "completion": ("bash",),
    "models list": (),
    "models remove": ("no-such-model", "--yes"),
    "bench run": ("MODEL", "--modes", "off,1", "--pairs", "1", "--requests", "1", "--concurrency", "1",
                  "--output-tokens", "2"),
    "bench step": ("MODEL", "--rows", "1", "--repeats", "1"),
}  # fmt: skip
"""A small run of each command. Words in capitals are placeholders (`make_paths`)."""


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command line; `code` is None after a timeout."""

    words: tuple[str, ...]
    code: int | None
    out: str
    err: str
    seconds: float = 0.0

    def faults(self) -> list[str]:
        """Violations of the rules for exit codes, messages and JSON output."""
        found = []
        if self.code not in ALLOWED:
            found.append(f"exit code {self.code}")
        if "Traceback" in self.err or "internal error" in self.err or "Exception ignored" in self.err:
            found.append("a traceback or an internal error")
        lines = [line for line in self.err.splitlines() if line.strip()]
        if self.code == 2 and not (lines and any(line.startswith("headstart: error: ") for line in lines)):
            found.append("no line that says what was wrong")
        if self.code == 2 and lines and not (lines[-1].startswith("hint: ") or ", but " in lines[-1]):
            found.append("the last line does not say what to do")
        if "--json" in self.words and self.code in (0, 1):
            found += _json_faults(self.out)
        return found

    def shown(self) -> str:
        words = " ".join(word if len(word) < 60 else f"{word[:50]}..." for word in self.words)
        shown = f"headstart {words}\n  code {self.code}: {'; '.join(self.faults())}\n  {self.err[-600:]!r}"
        return shown.encode("utf-8", "backslashreplace").decode()  # pytest-xdist sends UTF-8 only


def _json_faults(text: str) -> list[str]:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
        text.encode()
    except ValueError as error:
        return [f"not one JSON document: {error}"]
    return []


class RunTimeout(BaseException):
    """A BaseException, so that no handler of Exception catches it."""


def run(words: tuple[str, ...], *, stdin: str = "", stdout: Any = None, seconds: float = MAX_RUN_S) -> Outcome:
    """Runs a command line in this process with redirected streams."""
    out, err = stdout or io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")

    def raise_timeout(*_: object) -> None:
        raise RunTimeout

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    begun = time.monotonic()
    code: int | None = None
    try:
        with mock.patch.multiple(sys, stdin=io.StringIO(stdin), stdout=out, stderr=err):
            code = app.run(list(words))
    except RunTimeout:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return Outcome(words, code, "" if stdout else _text(out), _text(err), time.monotonic() - begun)


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]


def commands() -> dict[str, Command]:
    """Commands by their full name."""
    return all_commands(app.application())


def wrong_values(item: Option, paths: Mapping[str, str]) -> tuple[str, ...]:
    """Wrong values for an option or argument."""
    kind = str if item.is_comma_list else item.kind
    places = tuple(paths[name] for name in ("FILE", "FOLDER", "MISSING", "BELOW_A_FILE", "FIFO"))
    if kind in (int, float):
        return NUMBERS
    return ("", *places[:-1]) if kind is Path else (*TEXTS, *places)


def make_paths(folder: Path) -> dict[str, str]:
    """Values of the placeholders in SMALL: a tiny model and paths of several kinds."""
    from tiny_models import write_tiny

    (folder / "file").write_text("not a model\n")
    (folder / "folder").mkdir()
    (folder / "texts.jsonl").write_text('{"text": "the sky is blue and the sea is blue and the sky is blue"}\n' * 40)
    os.mkfifo(folder / "fifo")
    return {
        "MODEL": str(write_tiny("mimo", folder / "model")), "OUT": str(folder / "out"),
        "TEXTS": str(folder / "texts.jsonl"), "FILE": str(folder / "file"), "FOLDER": str(folder / "folder"),
        "MISSING": str(folder / "missing"), "BELOW_A_FILE": str(folder / "file" / "below"),
        "FIFO": str(folder / "fifo"),
    }  # fmt: skip


def wrong_lines(paths: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Command lines with each option and argument of each command: one per wrong value, and one without a value."""
    for name, command in commands().items():
        base = tuple(paths.get(word, word) for word in SMALL[name])
        places = [index for index, word in enumerate(SMALL[name]) if word in ("MODEL", "vllm", "qwen3_5-tiny")]
        for item in command.options:
            if item.is_argument:
                place = (
                    places[min(len(places) - 1, [each.name for each in command.options].index(item.name))]
                    if places
                    else 0
                )
                for value in wrong_values(item, paths):
                    yield (*name.split(), *base[:place], value, *base[place + 1 :])
                continue
            flag = item.label
            if item.is_switch:
                yield (*name.split(), *base, flag)
                continue
            rest = _without(base, flag)
            for value in wrong_values(item, paths):
                yield (*name.split(), *rest, flag, *[value] * item.num_values)
            yield (*name.split(), *rest, flag)


def _without(words: tuple[str, ...], flag: str) -> tuple[str, ...]:
    if flag not in words:
        return words
    index = words.index(flag)
    return (*words[:index], *words[index + 2 :])


def endless(words: tuple[str, ...]) -> bool:
    """True for valid lines that would run for very long."""
    return words[0] in ("data", "train", "tune") and bool({"inf", "1e999", str(10**30)} & set(words))


def forget_output(paths: Mapping[str, str]) -> None:
    for name in ("out", "out.training"):
        shutil.rmtree(Path(paths["OUT"]).with_name(name), ignore_errors=True)


@contextlib.contextmanager
def isolated_folder(folder: Path, *, cache: bool = True) -> Iterator[dict[str, str]]:
    """A separate working folder and cache. Servers return at once, and simulated fleets serve few requests."""
    place = {"HEADSTART_CACHE": str(folder / "cache")} if cache else {}
    paths = make_paths(folder)
    before = Path.cwd()
    os.chdir(folder / "folder")
    try:
        with (
            mock.patch("headstart.server.run.serve", lambda *arguments: None),
            mock.patch("headstart.server.replicas.supervisor.supervise", lambda *arguments: 0),
            mock.patch.multiple("headstart.tools.plan.fleet", MAX_REQUESTS=600, MAX_DISAGGREGATED_REQUESTS=600),
            mock.patch.dict(os.environ, place),
        ):
            yield paths
    finally:
        os.chdir(before)
