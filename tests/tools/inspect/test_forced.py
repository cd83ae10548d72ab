"""`inspect --deep` of models larger than memory: layers are streamed, tokens and drafts equal the engine's."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import support
from gguf_files import write_gguf
from tiny_models import write_model

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import no_progress
from headstart.engine.engine import Engine
from headstart.engine.load import Model, load_model
from headstart.errors import ModelError
from headstart.files import write_atomic
from headstart.formats.safetensors import save
from headstart.heads.base import HeadSpec
from headstart.tools.graft.describe import FP8_CONFIG, fp8_blocks
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.forced import SavedStates, builtin_texts, run_trunk
from headstart.tools.inspect.forced_head import TeacherForcedHead

pytest.importorskip("headstart.kernels.native._native", exc_type=ImportError)
DEPTH = 3
CONFIG = EngineConfig(backend="native", threads=1)
GGUF, FP8, CHAINED = "in GGUF", "in FP8", "with a chain"
QUANTIZED = f"qwen3_moe {GGUF}"
KEYS: dict[str, dict[str, Any]] = {
    QUANTIZED: {"hidden_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": []},
    "deepseek_v41": {"dspark_block_size": None},  # DSpark's layers attend to windows of blocks
}
slow = pytest.mark.slow
FAMILIES = [
    "deepseek_v3", QUANTIZED, "qwen3_5", f"llama {CHAINED}",
    *(pytest.param(name, marks=slow) for name in (
        "llama", "gemma3", "gemma4", "gpt_oss", "glm4_moe", "mimo_v2_flash", "longcat_flash", "nemotron_h", "llama4",
        "deepseek_v41", f"llama {GGUF}", f"deepseek_v3 {FP8}",
    )),
]  # fmt: skip


def write_softened(name: str, softness: float = 0.02) -> Path:
    """The file or folder of a tiny model, softened so that a head can predict its tokens."""
    family, _, form = name.partition(" ")
    config, arrays = support.family_of(family).tiny(**KEYS.get(name, {}))
    arrays = support.soften(arrays, softness)
    folder = support.new_folder()
    if form == GGUF:
        folder.mkdir()
        kind = gguf.GGMLQuantizationType.Q8_0 if name == QUANTIZED else None
        return write_gguf(folder / "model.gguf", config, arrays, quantized=kind)
    if form != FP8:
        return write_model(folder, config, arrays)
    write_model(folder, config | {"quantization_config": FP8_CONFIG}, arrays)
    tensors: dict[str, Any] = {}
    for name, tensor in support.as_tensors(arrays).items():
        if (".experts." not in name and "self_attn" not in name) or len(tensor.shape) != 2:
            tensors[name] = arrays[name]
            continue
        for part in fp8_blocks(name, tensor):
            array = np.concatenate([np.atleast_2d(each) for each in part.pieces()]).reshape(part.shape)
            tensors[part.name] = (array, part.dtype) if part.dtype != "F32" else array
    save(folder / "model.safetensors", tensors, {"format": "pt"})
    return folder


def load_with_head(path: Path, *, streamed: bool, chained: bool = False) -> Model:
    model = load_model(str(path), CONFIG, streamed=streamed)
    spec = HeadSpec(tap="pre_norm", chained=chained, num_modules=DEPTH if chained else 1)
    return replace(model, head=support.make_head(model, spec, agreeing=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_tokens_and_drafts_equal_the_engines(name: str) -> None:
    """Teacher forcing over the engine's texts gives the engine's tokens and drafts."""
    path = write_softened(name)
    seen: dict[str, dict[int, list[int]]] = {}

    def after_step(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            if sequence.draft.tokens:
                drafts = seen.setdefault(sequence.request.request_id, {})
                drafts[len(sequence.tokens)] = list(sequence.draft.tokens)

    chained = name.endswith(CHAINED)
    whole = load_with_head(path, streamed=False, chained=chained)
    engine = support.make(whole, backend="native", dtype="float32", depth=DEPTH, block_size=16)
    requests = [
        support.request(support.prompt_of(9 + 5 * i, i), name=f"r{i}", max_tokens=30, stops=()) for i in range(3)
    ]
    outputs = support.run(engine, requests, after_step)
    texts = [[*each.prompt_ids, *outputs[each.request_id, 0].tokens] for each in requests]

    model = load_with_head(path, streamed=True, chained=chained)
    trunk = run_trunk(model, texts, no_progress)
    for begin, each, text in zip(trunk.plan.row_starts, requests, texts, strict=False):
        prompt = len(each.prompt_ids)
        assert trunk.best[begin + prompt - 1 : begin + len(text) - 1].tolist() == text[prompt:]
    forced = TeacherForcedHead(trunk)
    drafted: list[dict[int, int]] = [
        dict(zip(pairs.tolist(), tokens.tolist(), strict=True)) for pairs, tokens in forced.drafts(model.head, DEPTH)
    ]
    first, compared = 0, [0] * DEPTH
    for each, text in zip(requests, texts, strict=True):
        for length, tokens in seen[each.request_id].items():
            for step, token in enumerate(tokens):
                pair = first + length - 2
                if pair not in drafted[step] or length - 1 + step >= len(text) - 1:
                    break
                assert drafted[step][pair] == token, (length, step)
                compared[step] += 1
        first += len(text) - 1
    assert compared[0] > 20 and compared[1] > 5, compared


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Makes every model appear too large for memory."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("headstart.engine.load.memory_needed", lambda checkpoint: 1 << 60)
    yield


def test_interrupted_run_resumes_from_finished_layers(too_large: None, tmp_path: Path) -> None:
    """Finished layers are kept after Ctrl-C and read by the next run. A successful run removes them."""
    path = write_softened("deepseek_v3")
    messages: list[str] = []

    def stop(done: int, total: int, what: str) -> None:
        messages.append(what)
        if what.startswith("reading layer 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inspect.run(inspect.InspectOptions(model=str(path), deep=True), stop)
    assert messages[1].startswith("reading layer 2 of 3") and "about" in messages[1] and "about" not in messages[0], (
        messages
    )
    folder = hub.cache_dir() / "inspect"
    assert len(list(folder.iterdir())) == 1
    resumed: list[str] = []
    report = inspect.run(inspect.InspectOptions(model=str(path), deep=True), lambda *now: resumed.append(now[2]))
    assert report.data["deep"]["ran"] and resumed[0].startswith("reading layer 3 of 3"), resumed
    assert not list(folder.iterdir())
    fresh = inspect.run(inspect.InspectOptions(model=str(path), deep=True))
    assert fresh.data["deep"] == report.data["deep"]


def test_damaged_file_is_reported_and_finished_layers_are_kept(
    too_large: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_softened("deepseek_v3")
    file = path / "model.safetensors"
    content = file.read_bytes()

    def cut(done: int, total: int, what: str) -> None:
        if what.startswith("reading layer 3"):
            file.write_bytes(content[: len(content) // 4])

    report = inspect.run(inspect.InspectOptions(model=str(path), deep=True), cut)
    assert not report.data["deep"]["ran"] and "model.safetensors ends after" in report.data["deep"]["why"]
    assert report.lines[-1].startswith("acceptance not measured: ") and "\n" not in report.lines[-1]
    assert len(list((hub.cache_dir() / "inspect").iterdir())) == 1
    shutil.rmtree(path)
    report_path = write_softened("deepseek_v3")
    arrays = support.family_of("deepseek_v3").tiny()[1]
    save(report_path / "model.safetensors", {n: a for n, a in arrays.items() if "layers.2.self_attn" not in n})
    missing = inspect.run(inspect.InspectOptions(model=str(report_path), deep=True))
    assert "has no tensor layers.2.self_attn" in missing.data["deep"]["why"]


def test_saved_states_of_other_texts_or_damaged_files_are_ignored(too_large: None) -> None:
    model = load_model(str(write_softened("llama")), CONFIG, streamed=True)
    texts = builtin_texts(model)
    saved = SavedStates.of(model, texts)
    saved.write(2, {"embedded": np.ones((1, 2), np.float32)})
    assert saved.read()[0] == 2 and SavedStates.of(model, texts[1:]).path != saved.path
    write_atomic(saved.path, b"not an archive")
    assert saved.read() == (0, {})


def model_with_fault(tap: str = "post_norm", **changes: Any) -> Path:
    """A model whose native head is often right. `changes`: swapped halves of eh_proj, norms stored as w - 1, or a dead
    eh_proj."""
    config, arrays = support.family_of("deepseek_v3").tiny(hidden_size=64)
    arrays = support.soften(arrays, 0.02)
    layer, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    halves = [np.eye(hidden), np.zeros((hidden, hidden))]
    arrays[f"{layer}.eh_proj.weight"] = np.hstack(halves[::-1] if changes.get("swapped") else halves)
    arrays[f"{layer}.enorm.weight"] = np.ones(hidden)
    arrays[f"{layer}.shared_head.norm.weight"] = arrays["model.norm.weight"]
    for name in list(arrays):
        if name.startswith(layer) and name.endswith("norm.weight") and changes.get("norms"):
            arrays[name] = arrays[name] - 1
        if name.endswith("eh_proj.weight") and changes.get("dead"):
            arrays[name] = np.random.default_rng(1).standard_normal(arrays[name].shape)
    return write_model(support.new_folder(), config, {name: np.float32(each) for name, each in arrays.items()})


@pytest.mark.parametrize("streamed", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(
    ("fault", "verdict", "named"),
    [
        ("", "alive", ""), ("swapped", "mismatch", "the hidden state first in the projection"),
        ("norms", "mismatch", "norms that multiply by 1 + w"), ("dead", "dead", ""),
    ],
)  # fmt: skip
def test_deep_names_the_fault_of_a_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str, verdict: str, named: str, streamed: bool
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    monkeypatch.setattr("headstart.engine.load.memory_needed", lambda checkpoint: streamed << 60)
    report = inspect.run(inspect.InspectOptions(model=str(model_with_fault(**{fault: True})), deep=True))
    heads, deep = report.data["heads"], report.data["deep"]
    assert heads["verdict"] == verdict and report.ok == (verdict == "alive"), (heads, deep)
    assert (deep["better"] or {}).get("what", "") == named
    if named:
        assert named in heads["reason"] and heads["fix"], heads


def test_missing_head_or_tensor_is_named_when_streaming(too_large: None) -> None:
    path = write_softened("llama")
    assert "has no head" in inspect.run(inspect.InspectOptions(model=str(path), deep=True)).data["deep"]["why"]
    model = load_model(str(path), CONFIG, streamed=True)
    with pytest.raises(ModelError, match="no tensor"):
        model.weights.raw("layers.9.mlp.up_proj.weight", (1, 1))
