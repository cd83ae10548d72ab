"""When the threads of a pool work together."""

from headstart.kernels.native._native import Company

PASS = 5_000_000
"""Nanoseconds of a run that nobody disturbs."""


def runs_until(company: Company, alone: bool, late: int) -> int:
    """Runs, each so late where all take part, until they part or meet."""
    for run in range(2000):
        if company.alone is alone:
            return run
        company.ran(PASS + late, late)
    raise AssertionError("they stay as they are")


def test_a_late_run_among_many_costs_less_than_being_alone() -> None:
    company = Company(2)
    for run in range(1000):
        late = 3 * PASS if run % 8 == 0 else PASS // 3
        company.ran(PASS + late, late)
        assert not company.alone


def test_one_works_alone_while_a_core_is_taken_and_asks_ever_more_seldom() -> None:
    company = Company(2)
    trials, pauses = [], []
    for _ in range(8):
        trials.append(runs_until(company, True, 8 * PASS))
        pauses.append(runs_until(company, False, 8 * PASS))
    assert max(trials) <= 2 and pauses == [16, 32, 64, 128, 256, 512, 1024, 1024]
    for _ in range(7 * 16):  # the core is free again
        company.ran(PASS, 0)
        assert not company.alone
    runs_until(company, True, 8 * PASS)
    assert runs_until(company, False, 8 * PASS) == 16


def test_of_many_threads_most_must_wait() -> None:
    """All but one of eight wait for as long as a run takes; alone, each run would take longer."""
    company = Company(8)
    for _ in range(100):
        company.ran(2 * PASS, 7 * PASS)
        assert not company.alone
    for _ in range(8):
        company.ran(50 * PASS, 7 * 49 * PASS)
    assert company.alone
