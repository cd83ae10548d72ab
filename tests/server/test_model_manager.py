"""Several models in one process: loading on demand, unloading, memory limit, failures."""

import asyncio
import gc
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from inside import tokens_of
from support import PATIENCE
from tiny_models import write_tiny

from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.engine.async_engine import RequestStream
from headstart.errors import BusyError, GenerationError, ModelError, UsageError
from headstart.server import model_manager as manager_module
from headstart.server.app import ServerConfig, multi_model_manager
from headstart.server.model_manager import ModelManager, ModelSpec, ServedModel, default_names, models_in
from headstart.server.options import KeepAlive

CONFIG = EngineConfig(threads=1, max_num_seqs=4, kv_blocks=64)
Check = Callable[[ModelManager], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `a` and `b`, and `broken` with an empty weights file."""
    place = tmp_path_factory.mktemp("models")
    write_tiny("mimo", place / "a")
    write_tiny("llama", place / "b")
    shutil.copytree(place / "b", place / "broken")
    (place / "broken" / "model.safetensors").write_bytes(b"")
    return place


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_module, "SWEEP_INTERVAL_S", 0.02)
    monkeypatch.setattr(manager_module, "MIN_KEEP_ALIVE_S", 0.1)


def with_models(folder: Path, check: Check, keep_alive: float | None = None, memory: int | None = None) -> None:
    specs = [ModelSpec(names=(name,), path=str(path), config=CONFIG) for name, path in models_in(folder).items()]

    async def main() -> None:
        models = multi_model_manager(specs, ServerConfig(keep_alive=KeepAlive(keep_alive), memory=memory))
        models.start()
        try:
            async with asyncio.timeout(PATIENCE):
                await check(models)
        finally:
            models.stop()

    asyncio.run(main())


async def start_request(served: ServedModel, tokens: int = 20) -> RequestStream:
    params = SamplingParams(max_tokens=tokens, seed=1, temperature=1.0, ignore_eos=True)
    return await served.open([served.llm.request(list(range(5, 15)), params)])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def loaded(models: ModelManager) -> list[str]:
    return [each.names[0] for each in models.loaded]


def sizes_of(folder: Path) -> dict[str, int]:
    found: dict[str, int] = {}

    async def check(models: ModelManager) -> None:
        for name in ("a", "b"):
            await models.get(name)
            found[name] = models.find(name).size_bytes

    with_models(folder, check)
    return found


def test_model_is_loaded_on_demand_and_unloaded_when_idle(folder: Path) -> None:
    async def check(models: ModelManager) -> None:
        assert loaded(models) == []
        waiting = [asyncio.create_task(models.get("a")) for _ in range(4)]
        waiting[0].cancel()
        first = (await asyncio.gather(*waiting, return_exceptions=True))[-1]
        assert isinstance(first, ServedModel) and models.find("a").num_loads == 1
        expected, engine = await tokens_of(await start_request(first)), ref(first.llm.engine)
        del first, waiting
        await until(lambda: loaded(models) == [])
        async with models._moving:
            gc.collect()
        assert engine() is None, "the unloaded engine is still referenced"
        assert await tokens_of(await start_request(await models.get("a:latest"))) == expected
        assert models.find("a").num_loads == 2
        with pytest.raises(ModelError, match="this server has a, b, broken"):
            await models.get("c")

    with_models(folder, check, keep_alive=0.2)


def test_longest_idle_model_is_unloaded_but_running_models_stay(folder: Path) -> None:
    sizes = sizes_of(folder)

    async def check(models: ModelManager) -> None:
        await models.get("a")
        running = await start_request(await models.get("b"), 100)
        assert loaded(models) == ["b"]
        with pytest.raises(BusyError, match="models that run leave"):
            await models.get("a")
        expected = await tokens_of(running)
        await models.get("a")
        assert loaded(models) == ["a"]
        assert await tokens_of(await start_request(await models.get("b"), 100)) == expected

    with_models(folder, check, memory=sizes["a"] + sizes["b"] - 1)


def test_model_larger_than_the_memory_limit_is_refused(folder: Path) -> None:
    async def check(models: ModelManager) -> None:
        for _ in range(2):
            with pytest.raises(BusyError, match="but all models may take"):
                await models.get("a")
        assert loaded(models) == []

    with_models(folder, check, memory=1000)


def test_failed_load_does_not_affect_running_models(folder: Path) -> None:
    async def check(models: ModelManager) -> None:
        expected = await tokens_of(await start_request(await models.get("b"), 100))
        running = await start_request(await models.get("b"), 100)
        for _ in range(2):
            with pytest.raises(
                GenerationError, match=r"the model broken cannot be loaded: .*model.safetensors is empty"
            ):
                await models.get("broken")
        assert await tokens_of(running) == expected
        assert loaded(models) == ["b"]

    with_models(folder, check)


def test_running_model_is_not_released(folder: Path) -> None:
    async def check(models: ModelManager) -> None:
        running = await start_request(await models.get("a"), 400)
        assert not await models.release("a")
        assert len(await tokens_of(running)) == 400
        await until(lambda: loaded(models) == [])
        with (await models.get("b")).admission.hold():
            assert not await models.release("b")
        assert await models.release("b") and await models.release("b")

    with_models(folder, check)


def test_models_share_the_threads_and_keep_their_tokens(folder: Path) -> None:
    """Models take turns on one thread pool: two pools of all cores would compete."""

    async def check(models: ModelManager) -> None:
        a, b = await models.get("a"), await models.get("b")
        assert a.llm.model.backend.threads is b.llm.model.backend.threads  # type: ignore[attr-defined]
        alone = [await tokens_of(await start_request(each, 50)) for each in (a, b)]
        streams = [await start_request(each, 50) for each in (a, b)]
        assert await asyncio.gather(*map(tokens_of, streams)) == alone

    with_models(folder, check)


def test_drained_manager_refuses_requests(folder: Path) -> None:
    async def check(models: ModelManager) -> None:
        await models.get("a")
        models.drain()
        with pytest.raises(BusyError, match="shutting down"):
            await models.get("b")
        with pytest.raises(BusyError, match="shutting down"):
            await start_request(await models.get("a"))

    with_models(folder, check)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90.0), ("90", 90.0), ("5m", 300.0), ("1h30m", 5400.0), ("250ms", 0.25), (0, 0.0), (-1, None), ("-1m", None)],
)
def test_keep_alive_parses_durations(given: float | str, seconds: float | None) -> None:
    assert KeepAlive.of(given).seconds == seconds


@pytest.mark.parametrize("given", ["", "soon", "5 m", "m", "1h30", "nan", "--1"])
def test_keep_alive_refuses_invalid_durations(given: str) -> None:
    with pytest.raises(UsageError, match="which is no time"):
        KeepAlive.of(given)


def test_models_in_a_folder(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a", tmp_path / "a")
    for name in ("x.gguf", "y-00001-of-00002.gguf", "y-00002-of-00002.gguf", "z-00002-of-00000.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    (tmp_path / "notes.txt").write_text("a note")
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder / "a", tmp_path / "damaged")
    (tmp_path / "damaged" / "config.json").write_text("{")
    assert list(models_in(tmp_path)) == ["a", "damaged", "x", "y", "z-00002-of-00000"]


def test_default_names_of_a_local_file_are_stem_and_path(tmp_path: Path) -> None:
    stems = {"a-Q4_K_M": "a-Q4_K_M", "b-00001-of-00002": "b", "c-00001-of-00000": "c-00001-of-00000"}
    for file, stem in ((f"{name}.gguf", stem) for name, stem in stems.items()):
        path = tmp_path / file
        path.touch()
        assert default_names(str(path)) == (stem, str(path))
    assert default_names("smollm2-135m-mtp") == ("smollm2-135m-mtp",)
    assert default_names(str(tmp_path)) == (str(tmp_path),)
