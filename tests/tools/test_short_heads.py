"""A head with a smaller maximum depth than the defaults: commands work, and explicit greater depths are refused."""

from pathlib import Path

import pytest
from tiny_models import write_tiny

from headstart import noise
from headstart.cli.main import main
from headstart.tools.plan import measure as here

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def two_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model with two MTP modules, and so depth 2 at most."""
    pytest.importorskip("headstart.kernels.native._native")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.tools.pass_timing.MAX_READ_BYTES", 1 << 16)
    monkeypatch.setattr(here, "PASSES_BUDGET_S", 0.1)
    monkeypatch.setattr(noise, "MAX_WAITING", 1e9)
    return str(write_tiny("mimo", tmp_path / "model", num_nextn_predict_layers=2))


@pytest.mark.slow
@pytest.mark.parametrize("command", [
    "verify {} --max-tokens 2 --temperatures 0 --batch-sizes 1 --chunk-sizes 32 --preemption off "
    "--prefix-cache off --thread-counts 1",
    "bench step {} --repeats 1 --rows 1,2 --context 16",
    "bench {} --requests 1 --pairs 1 --concurrency 1 --input-tokens 8 --output-tokens 4",
    "plan {} --batch 1",
    "generate {} --prompt hi --max-tokens 2",
])  # fmt: skip
def test_default_depths_are_limited_by_the_head(command: str, two_modules: str, capsys: Capture) -> None:
    assert main(command.format(two_modules).split()) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["verify {} --depths 3 --max-tokens 2", "bench step {} --depth 3", "bench {} --modes 3"]
)
def test_explicit_depth_beyond_the_head_is_refused(command: str, two_modules: str, capsys: Capture) -> None:
    assert main(command.format(two_modules).split()) == 2 and "2" in capsys.readouterr().err
