"""`headstart chat` at a pseudo-terminal: signals, pasted text, line wrapping, history."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake import FakeLLM
from support import PATIENCE

from headstart.api import TextDelta
from headstart.cli.main import main
from headstart.core import SamplingParams

PROGRAM = """
import signal, sys, threading, time
from pathlib import Path
sys.path.insert(0, {here!r})
import headstart.api
from fake import FakeLLM, WORDS
from headstart.api import TextDelta

def signal_own_thread(number):
    # the main thread waits for a key, and its wait is not interrupted by a signal on this thread
    state = Path("/proc/self/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "S":
        time.sleep(0.01)
    time.sleep(0.1)
    signal.pthread_kill(threading.get_ident(), number)

class Slow(FakeLLM):
    def stream(self, prompt, params, **_):
        if (word := prompt[-1]["content"]).startswith("SIG"):
            threading.Thread(target=signal_own_thread, args=[getattr(signal, word)]).start()
        print("<" + repr(prompt[-1]["content"]) + ">", flush=True)
        if "slowly" in prompt[-1]["content"] or "at length" in prompt[-1]["content"]:
            for word in WORDS[:-1] * 200:
                time.sleep(0.01 * ("slowly" in prompt[-1]["content"]))
                yield TextDelta(word, [0])
        yield from super().stream(prompt, params)

headstart.api.LLM = Slow
import headstart.cli.chat
headstart.cli.chat.history_file = lambda: Path({cache!r}, "chat_history")
from headstart.cli.main import main
sys.exit(main(["chat"]))
"""


class Terminal:
    """A chat process at a pseudo-terminal."""

    def __init__(self, cache: Path, columns: int = 80) -> None:
        self.main, side = pty.openpty()
        fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        program = PROGRAM.format(here=str(Path(__file__).parent), cache=str(cache))
        environment = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
        command = [sys.executable, "-c", program]
        self.process = subprocess.Popen(
            command, stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True,
            preexec_fn=lambda: _own_terminal(),
        )  # fmt: skip
        os.close(side)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.main, text.encode())

    def wait_for(self, text: str, seconds: float = PATIENCE) -> str:
        """Waits for `text`; returns the output before it and drops both."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"{text!r} is not in {self.shown!r}"
            if select.select([self.main], [], [], 0.1)[0]:
                self.shown += os.read(self.main, 4096).decode("utf-8", "replace")
        before, _, self.shown = self.shown.partition(text)
        return before


def _own_terminal() -> None:
    """Makes stdin the controlling terminal: Ctrl-C comes from there."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def open_chat(cache: Path, columns: int = 80) -> Iterator[Terminal]:
    chat = Terminal(cache, columns)
    chat.wait_for("> ")
    yield chat
    chat.process.kill()
    chat.process.wait()
    os.close(chat.main)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    with open_chat(tmp_path) as chat:
        yield chat


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_signals_end_the_chat(terminal: Terminal, number: signal.Signals) -> None:
    terminal.type("Hello\r")
    terminal.wait_for("blue.")
    terminal.wait_for("> ")
    terminal.process.send_signal(number)
    assert "Ctrl-C again" not in terminal.wait_for("error: interrupted")
    assert terminal.process.wait(PATIENCE) == 130


@pytest.mark.slow
def test_signals_that_do_not_interrupt_the_wait_for_a_key_take_effect(terminal: Terminal) -> None:
    terminal.type("SIGINT\r")
    terminal.wait_for("Ctrl-C again")
    terminal.type("SIGTERM\r")
    terminal.wait_for("error: interrupted")
    assert terminal.process.wait(PATIENCE) == 130


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_but_not_the_chat(terminal: Terminal) -> None:
    terminal.type("slowly, please\r")
    terminal.wait_for("The sky is The sky ")
    terminal.type("\x03")
    assert "blue" not in terminal.wait_for("stopped")
    terminal.wait_for("> ")
    terminal.type("And now?\r")
    terminal.wait_for("blue.")
    terminal.wait_for("> ")
    terminal.type("\x03")
    terminal.wait_for("Ctrl-C again")
    terminal.wait_for("> ")
    terminal.type("\x03")
    assert terminal.process.wait(PATIENCE) == 0


def test_ctrl_c_twice_during_an_answer_ends_the_chat(fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted(fake_llm):  # type: ignore[misc, valid-type]
        def stream(self, prompt: Any, params: SamplingParams, **options: Any) -> Iterator[TextDelta]:
            for delta in super().stream(prompt, params, **options):
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                yield delta

    monkeypatch.setattr("headstart.api.LLM", Interrupted)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("headstart.cli.chat._read_turns", lambda: iter(["Hello", "never read"]))
    assert main(["chat"]) == 0
    assert [prompt[-1]["content"] for prompt, *_ in fake_llm.asked] == ["Hello"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "paste", ["one\ntwo\nthree\n", "\x1b[200~one\rtwo\rthree\x1b[201~\r"], ids=["plain", "bracketed"]
)
def test_pasted_lines_are_one_turn(terminal: Terminal, paste: str) -> None:
    terminal.type(paste)
    assert re.sub(r"\\[rn]", " ", terminal.wait_for("blue.")).count("<'one two three'>") == 1
    terminal.wait_for("> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_multi_line_input_and_private_history_file(terminal: Terminal, tmp_path: Path) -> None:
    for line in ('"""one', "two", "", 'three"""'):
        terminal.type(f"{line}\r")
        if not line.endswith('"""'):
            terminal.wait_for("... ")
    assert "<'one\\ntwo\\n\\nthree'>" in terminal.wait_for("blue.")
    terminal.wait_for("> ")
    terminal.type("/exit\r")
    assert terminal.process.wait(PATIENCE) == 0
    history = tmp_path / "chat_history"
    assert "two" in history.read_text() and history.stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_answers_wrap_between_words(tmp_path: Path) -> None:
    with open_chat(tmp_path, columns=24) as terminal:
        terminal.type("at length, please\r")
        terminal.wait_for("please'>")
        lines = terminal.wait_for("blue.").split("\r\n")[1:-1]
    assert len(lines) > 50
    assert {len(line) for line in lines} <= {18, 21, 22, 24}  # whole words only
    assert {word for line in lines for word in line.split(" ")} == {"The", "sky", "is"}


@pytest.mark.slow
def test_regenerate_and_history_of_an_earlier_chat(tmp_path: Path) -> None:
    with open_chat(tmp_path) as terminal:
        terminal.type("/set temperature 0.7\r")
        terminal.wait_for("> ")
        for line in ("Why, then?", "/regenerate"):
            terminal.type(f"{line}\r")
            assert "<'Why, then?'>" in terminal.wait_for("blue.")
            terminal.wait_for("> ")
        terminal.type("/exit\r")
        assert terminal.process.wait(PATIENCE) == 0
    with open_chat(tmp_path) as terminal:
        terminal.type("\x1b[A" * 3)  # up, beyond the two commands
        terminal.wait_for("Why, then?")
        terminal.type("\r")
        assert "<'Why, then?'>" in terminal.wait_for("blue.")
