"""One engine shared by several threads: the fair lock, dropped streams, failing steps."""

import gc
import threading
import time
from typing import Any

import pytest
from support import assert_clean, in_threads, tiny_model, until

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.shared import FairLock
from headstart.errors import GenerationError

LONG = SamplingParams(max_tokens=60, ignore_eos=True, seed=1, temperature=0.8)


def small_llm(**settings: Any) -> LLM:
    small = {"backend": "reference", "dtype": "float64", "threads": 1, "kv_blocks": 60, "max_model_len": 128}
    return LLM(tiny_model("llama"), EngineConfig(**small | settings))


def test_lock_is_fair() -> None:
    """A thread that takes the lock in a loop lets a waiting thread in after at most one turn."""
    lock, order, stop = FairLock(), list[str](), threading.Event()

    def greedy() -> None:
        while not stop.is_set():
            with lock:
                order.append("greedy")
                time.sleep(0.0005)

    thread = threading.Thread(target=greedy)
    thread.start()
    try:
        for _ in range(20):
            with lock:
                order.append("other")
            begun = len(order)
            until(lambda begun=begun: len(order) > begun)
    finally:
        stop.set()
        thread.join()
    assert order.count("other") == 20


def test_lock_is_exclusive_and_runs_deferred_calls() -> None:
    lock, inside, most = FairLock(), list[int](), list[int]()

    def work(number: int) -> None:
        for _ in range(300):
            with lock:
                inside.append(number)
                most.append(len(inside))
                inside.remove(number)
            lock.call_soon(lambda: most.append(len(inside)) if not inside else most.append(9))

    in_threads(work, range(4))
    assert max(most) == 1
    assert len(most) == 4 * 300 * 2, "a call of call_soon was lost"
    done = list[int]()
    with lock:
        lock.call_soon(lambda: done.append(1))
        assert not done
    assert done == [1]
    lock.call_soon(lambda: done.append(2))
    assert done == [1, 2]


def test_interrupted_wait_leaves_the_lock_free() -> None:
    lock, interrupted = FairLock(), threading.Event()

    class Interrupt(BaseException):
        pass

    def wait_interrupted() -> None:
        original = threading.Lock

        class Lock:
            def __init__(self) -> None:
                self._lock, self._count = original(), 0

            def acquire(self) -> None:
                self._count += 1
                if self._count == 2:  # the wait for the lock
                    raise Interrupt
                self._lock.acquire()

            def release(self) -> None:
                self._lock.release()

        threading.Lock = Lock
        try:
            with lock:
                raise AssertionError("somebody else has it")
        except Interrupt:
            interrupted.set()
        finally:
            threading.Lock = original

    with lock:
        thread = threading.Thread(target=wait_interrupted)
        thread.start()
        thread.join(10)
    assert interrupted.is_set()
    with lock:
        pass


def test_dropped_stream_frees_its_sequence() -> None:
    """The garbage collector may drop the stream in the middle of a step."""
    llm = small_llm()
    for inside in (False, True):
        held: list[Any] = [llm.stream([1, 2, 3], LONG)]
        next(held[0])
        held.append(held)  # a reference cycle: only the garbage collector frees it
        if inside:
            step = llm.engine.step

            def collecting(deliver: Any, step: Any = step) -> None:
                gc.collect()
                step(deliver)

            llm.engine.step = collecting
        del held
        llm.generate([[4, 5]], SamplingParams(max_tokens=3, ignore_eos=True))
        gc.collect()
        assert_clean(llm.engine)
        assert not llm.shared.inboxes


def test_failed_step_ends_every_text_in_it() -> None:
    llm = small_llm()
    streams = [llm.stream([1, 2, number], LONG) for number in range(2)]
    for stream in streams:
        next(stream)
    forward = llm.engine.runner.forward

    def broken(spans: Any) -> Any:
        raise RuntimeError("a fault")

    llm.engine.runner.forward = broken
    with pytest.raises(RuntimeError, match="a fault"):
        list(streams[0])
    llm.engine.runner.forward = forward
    with pytest.raises(GenerationError, match="a step that it shared"):
        list(streams[1])
    assert_clean(llm.engine)
    assert not llm.shared.inboxes and len(llm.generate([[1, 2]], LONG)[0].token_ids) == 60


def test_paused_stream_does_not_block_others() -> None:
    llm = small_llm()
    alone, stream = llm.generate([[1, 2, 3], [7, 8]], LONG), llm.stream([1, 2, 3], LONG)
    tokens = list(next(stream).token_ids)
    assert in_threads(lambda number: llm.generate([[7, 8]], LONG)[0].token_ids, range(3)) == [alone[1].token_ids] * 3
    tokens += [token for delta in stream for token in delta.token_ids]
    assert tokens == alone[0].token_ids
    assert_clean(llm.engine)
