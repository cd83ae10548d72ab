"""Several threads on one LLM, and several LLMs on one model: every text equals that of a single thread."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE, assert_clean, family_of, in_threads, new_folder
from tiny_models import write_model

from headstart import machine
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.load import Model, load_model
from headstart.kernels.backends.native import limits
from headstart.machine import Node

NATIVE = pytest.mark.skipif(limits(EngineConfig()) is not None, reason="not built")
CASES = [
    pytest.param("native", "mimo", marks=NATIVE),  # with an MTP head
    pytest.param("native", "qwen3_5_moe", marks=NATIVE),  # states and experts use memory of their own in a pass
    ("reference", "mimo"),
]
SETTINGS: dict[str, Any] = {"threads": 2, "block_size": 16, "kv_blocks": 40, "max_model_len": 256, "depth": 3}


def load(family: str, backend: str) -> Model:
    config, arrays = family_of(family).tiny()
    return load_model(str(write_model(new_folder(), config, arrays)), config_of(backend))


def config_of(backend: str) -> EngineConfig:
    dtype = {"dtype": "float64"} if backend == "reference" else {}
    return EngineConfig(backend=backend, **SETTINGS | dtype)


def varied_request(number: int) -> tuple[list[int], SamplingParams]:
    """A prompt and its sampling parameters, of various lengths, prefixes and settings."""
    rng = random.Random(number)
    shared = [7] * rng.choice((0, 20, 40))  # prefixes for the prefix cache
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.9)), seed=number, max_tokens=rng.randrange(1, 30), ignore_eos=True,
        n=rng.choice((1, 1, 2)), logprobs=rng.choice((None, 2)), frequency_penalty=rng.choice((0.0, 0.5)),
        stop=rng.choice(((), ("e",))),
    )  # fmt: skip
    return shared + [rng.randrange(3, 120) for _ in range(rng.randrange(1, 60))], params


def answer(llm: LLM, number: int) -> list[tuple[Any, ...]]:
    prompt, params = varied_request(number)
    [done] = llm.generate([prompt], params)
    return [(each.token_ids, each.text, each.finish_reason, each.logprobs) for each in done.choices]


def drop_a_stream(llm: LLM, number: int) -> None:
    prompt, params = varied_request(number)
    next(llm.stream(prompt, SamplingParams(max_tokens=20, ignore_eos=True, seed=params.seed)))


@pytest.mark.parametrize(("backend", "family"), CASES)
def test_threads_share_llms_and_llms_share_a_model(backend: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_nodes = Node(0, ((0,),)), Node(1, ((1,),))  # each thread is a group, as with two sockets
    monkeypatch.setattr(machine, "nodes", lambda: two_nodes)
    model = load(family, backend)
    first, second = (LLM(model, config_of(backend)) for _ in range(2))
    count = 24 if backend == "native" else 3
    alone = [answer(first, number) for number in range(count)]

    def work(number: int) -> list[list[tuple[Any, ...]]]:
        llm, own = (first, second)[number % 2], []
        for i in range(count):
            if i % 5 == number % 5:
                drop_a_stream(llm, i)
            own.append(answer(llm, (i * 7 + number) % count))
        return own

    for number, own in enumerate(in_threads(work, range(6))):
        assert own == [alone[(i * 7 + number) % count] for i in range(count)], f"thread {number}"
    for llm in (first, second):
        assert_clean(llm.engine)
        assert not llm.shared.inboxes


def test_llms_are_built_while_others_run() -> None:
    """Also on the same model: weights of drafters and heads are packed while passes run."""
    backend = "native" if limits(EngineConfig()) is None else "reference"
    model = load("mimo", backend)
    llm = LLM(model, config_of(backend))
    alone = [answer(llm, number) for number in range(6)]

    def work(number: int) -> list[list[tuple[Any, ...]]]:
        own = llm if number % 2 else LLM(model, config_of(backend))
        return [answer(own, each) for each in range(6)]

    assert in_threads(work, range(6)) == [alone] * 6


TESTS = Path(__file__).parents[1]
MADE = """
import faulthandler, os, random, signal, sys, threading, time
from pathlib import Path
from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.errors import GenerationError
from tiny_models import write_tiny
llm = LLM(str(write_tiny("mimo", Path(sys.argv[1]))), backend="native", threads=2, kv_blocks=40, depth=2)
params = SamplingParams(max_tokens=15, ignore_eos=True)
"""


def run_script(code: str) -> None:
    command = [sys.executable, "-c", MADE + code, str(new_folder())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=TESTS)
    assert done.returncode == 0, done.stderr


@NATIVE
def test_forked_process_starts_its_own_threads() -> None:
    """The parent's threads do not exist in the child, so waiting for them would never end. Runs in a separate process,
    since a test process with many threads should not fork."""
    run_script("""
alone = llm.generate([[5, 6]], params)[0].token_ids
child = os.fork()
if child == 0:
    signal.alarm(250)
    llm.model.backend.read_bandwidth(1 << 20, 1)  # by all threads, whatever else runs on this machine
    answer = llm.generate([[5, 6]], params)[0].token_ids
    del llm
    os._exit(answer != alone)
sys.exit(os.waitpid(child, 0)[1])
""")


@NATIVE
@pytest.mark.slow
def test_interrupts_do_not_affect_other_threads() -> None:
    """Repeated Ctrl-C in the main thread: texts of another thread are right or end with an error, nothing blocks, and
    the engine keeps no state."""
    run_script("""
faulthandler.dump_traceback_later(250, exit=True)
def ask():
    try:
        return llm.generate([[5, 6, 7]], params)[0].token_ids
    except GenerationError:
        return alone
alone = ask()
def interrupted(number, frame):
    while frame is not None:
        if frame.f_code is ask.__code__:  # else this script would be what is interrupted
            raise KeyboardInterrupt
        frame = frame.f_back
signal.signal(signal.SIGINT, interrupted)
end, answers, num_interrupts, over = time.monotonic() + 3, [], 0, threading.Event()
def goes_on():
    return time.monotonic() < end or num_interrupts <= 10 or len(answers) <= 10
def neighbour():
    while not over.is_set():
        answers.append(ask() == alone)
def interrupt():
    rng = random.Random(1)
    while goes_on():
        time.sleep(0.02 * rng.random())
        os.kill(os.getpid(), signal.SIGINT)
threads = [threading.Thread(target=each) for each in (neighbour, interrupt)]
for thread in threads:
    thread.start()
while threads[1].is_alive():
    try:
        while threads[1].is_alive():
            assert ask() == alone
    except KeyboardInterrupt:
        num_interrupts += 1
over.set()
threads[0].join()
assert num_interrupts > 10 and len(answers) > 10 and all(answers), (num_interrupts, len(answers))
assert not llm.engine.has_work and not llm.shared.inboxes and ask() == alone
""")
