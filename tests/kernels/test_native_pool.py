"""The fallback of a thread pool to one thread (csrc/pool.h, SoloFallback)."""

from headstart.kernels.native._native import SoloFallback

RUN_NS = 5_000_000
"""Duration of an undisturbed run."""


def runs_until(fallback: SoloFallback, is_solo: bool, late: int) -> int:
    """Number of runs with `late` nanoseconds of parallel waiting until the fallback switches."""
    for run in range(2000):
        if fallback.is_solo is is_solo:
            return run
        fallback.record_run(RUN_NS + late, late)
    raise AssertionError("no switch in 2000 runs")


def test_few_late_runs_do_not_switch() -> None:
    fallback = SoloFallback(2)
    for run in range(1000):
        late = 3 * RUN_NS if run % 8 == 0 else RUN_NS // 3
        fallback.record_run(RUN_NS + late, late)
        assert not fallback.is_solo


def test_occupied_core_switches_to_one_thread_with_growing_pauses() -> None:
    fallback = SoloFallback(2)
    trials, pauses = [], []
    for _ in range(8):
        trials.append(runs_until(fallback, True, 8 * RUN_NS))
        pauses.append(runs_until(fallback, False, 8 * RUN_NS))
    assert max(trials) <= 2 and pauses == [16, 32, 64, 128, 256, 512, 1024, 1024]
    for _ in range(7 * 16):  # the core is free again
        fallback.record_run(RUN_NS, 0)
        assert not fallback.is_solo
    runs_until(fallback, True, 8 * RUN_NS)
    assert runs_until(fallback, False, 8 * RUN_NS) == 16


def test_many_threads_switch_only_if_most_wait() -> None:
    """Seven of eight threads wait for as long as a run takes: one thread alone would take longer."""
    fallback = SoloFallback(8)
    for _ in range(100):
        fallback.record_run(2 * RUN_NS, 7 * RUN_NS)
        assert not fallback.is_solo
    for _ in range(8):
        fallback.record_run(50 * RUN_NS, 7 * 49 * RUN_NS)
    assert fallback.is_solo
