"""Drafter plug-ins of tests/plug_ins, beyond the examples of docs/extend."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support import family_of, make, new_folder, prompt_of, record_passes, request, run, varied_requests, write_model

from headstart import registry
from headstart.config import EngineConfig
from headstart.core import Rows, Sequence
from headstart.engine.load import Model, load_model
from headstart.layers.network import FORWARD

PLUG_INS = Path(__file__).parents[1] / "plug_ins"
DRAFTERS = ("acme_block", "acme_second")
EXACT = {"reference": "float64", "native": "float32"}


@pytest.fixture(autouse=True)
def plug_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACME_SECOND_MODEL", str(folder_of("qwen3")))
    with registry.search_path("drafters", PLUG_INS / "drafters"):
        yield


@cache
def folder_of(family: str) -> Path:
    """The folder of a tiny model of a family; all have the same vocabulary."""
    return write_model(new_folder(), *family_of(family).tiny())


@cache
def trunk(backend: str) -> Model:
    settings: Mapping[str, Any] = {"backend": backend, "dtype": EXACT[backend], "threads": 1}
    return load_model(str(folder_of("llama")), EngineConfig(**settings))


def outputs(backend: str, temperature: float, **settings: Any) -> Any:
    engine = make(trunk(backend), **{"backend": backend, "dtype": EXACT[backend], "block_size": 16, **settings})
    return {key: each.tokens for key, each in run(engine, varied_requests(temperature)).items()}, engine


@cache
def plain(backend: str, temperature: float) -> Any:
    return outputs(backend, temperature, drafter="none")[0]


@pytest.mark.slow
@pytest.mark.parametrize("backend", EXACT)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("settings", [
    {}, {"max_num_batched_tokens": 7}, {"kv_blocks": 10}, {"depth": "auto"},
], ids=["plain", "chunks", "preempted", "auto"])  # fmt: skip
def test_drafted_text_equals_plain_decoding(backend: str, drafter: str, settings: dict[str, Any]) -> None:
    for temperature in (0.9,) if settings else (0.0, 0.9):
        drafted, engine = outputs(backend, temperature, **{"drafter": drafter, "depth": 3, **settings})
        assert drafted == plain(backend, temperature)
        if "depth" not in settings:
            assert engine.stats.drafted > 20


@pytest.mark.parametrize("backend", EXACT)
def test_drafts_of_an_identical_second_model_are_always_accepted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_SECOND_MODEL", str(folder_of("llama")))
    engine = make(trunk(backend), drafter="acme_second", depth=3, backend=backend, dtype=EXACT[backend], block_size=16)
    prompts = [prompt_of(30, 1), prompt_of(30, 1)[:20] + prompt_of(25, 2), prompt_of(30, 1)]
    for i, prompt in enumerate(prompts):  # later prompts reuse the first one's blocks, filled by both networks
        run(engine, [request(prompt, name=f"r{i}", max_tokens=24, temperature=0.8 * (i % 2), stops=())])
    assert engine.scheduler.prefix_hits > 0
    assert engine.stats.drafted > 40
    assert engine.stats.accepted == engine.stats.drafted


def test_block_drafter_needs_one_pass_per_draft() -> None:
    """A draft of any depth takes one pass of the drafter's network. Each context token is processed once."""
    engine = make(trunk("reference"), drafter="acme_block", depth=3, enable_prefix_caching=False)
    passes = record_passes(engine)
    prompt = prompt_of(21, 3)
    done = run(engine, [request(prompt, max_tokens=16, stops=())])
    tokens = len(done["r", 0].tokens)
    blocks = [rows for name, rows in passes if name == "block"]
    features = sum(rows for name, rows in passes if name == "features")
    assert all(rows <= 4 for rows in blocks)
    assert len(blocks) == sum(name == FORWARD for name, _ in passes) - 2  # the last two tokens need no draft
    assert len(prompt) <= features <= len(prompt) + tokens


def test_logits_of_a_tree_equal_those_of_its_branches() -> None:
    """Rows of a tree in one trunk pass compared with each branch as a chain; bit for bit on `native`."""
    for backend in EXACT:
        settings: dict[str, Any] = {"backend": backend, "dtype": EXACT[backend], "block_size": 16, "drafter": "none"}
        engine = make(trunk(backend), **settings)
        prompt, tree = prompt_of(29, 5), (7, 9, 11, 13, 17, 19)  # the branches cross the end of a tile of 16
        parents = (-1, -1, 0, 0, 2, 4)
        sequence = Sequence(request(prompt), 0, list(prompt), 0)
        assert engine.memory.reserve(sequence, len(prompt) + len(tree))
        runner = engine.runner
        runner.run(runner.trunk, FORWARD, [Rows(sequence, 0, prompt, 0)])
        rows = Rows(sequence, len(prompt), tree, len(tree), parents=parents)
        whole = runner.backend.numpy(runner.run(runner.trunk, FORWARD, [rows])["logits"]).copy()
        for last in range(len(tree)):
            branch, at = [], last
            while at >= 0:
                branch.insert(0, at)
                at = parents[at]
            chain = Rows(sequence, len(prompt), [tree[i] for i in branch], len(branch))
            logits = runner.backend.numpy(runner.run(runner.trunk, FORWARD, [chain])["logits"])
            if backend == "native":
                assert (logits == whole[branch]).all()
            else:
                assert abs(logits - whole[branch]).max() < 1e-9
