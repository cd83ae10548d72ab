"""Malformed headers and configs end in a clear error and use little memory."""

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from zoo import ZOO, config_of, heads, trunk, write, write_file

from headstart.cli.main import main
from headstart.errors import ModelError
from headstart.formats import find_checkpoint
from headstart.formats.base import BITS
from headstart.formats.gguf_file import read
from headstart.formats.safetensors_file import read_file
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

FUZZ = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
MAX_BYTES = 20_000_000

numbers = st.one_of(st.integers(-3, 9), st.sampled_from([2**31, 2**62, 2**63, 2**64, 10**30]), st.floats())
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=6)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3), max_leaves=6,
)  # fmt: skip
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*BITS, "F99"]) | values, "shape": st.lists(st.integers(0, 4), max_size=3) | values,
        "data_offsets": st.tuples(st.integers(0, 40), st.integers(0, 40)) | values},
)  # fmt: skip


def raw(path: Path, header: bytes, data: int = 40, claims: int | None = None) -> Path:
    path.write_bytes((len(header) if claims is None else claims).to_bytes(8, "little") + header + bytes(data))
    return path


@pytest.mark.slow
@FUZZ
@given(st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | values, max_size=4))
@example({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 1]}})
@example({"a": {"dtype": "F32", "shape": [0, 10**40], "data_offsets": [0, 0]}})
@example({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}})
def test_random_safetensors_headers_are_read_or_refused(tmp_path: Path, header: dict[str, Any]) -> None:
    path = raw(tmp_path / "x.safetensors", json.dumps(header).encode())
    with suppress(ModelError):
        for name, entry in read_file(path).items():
            assert 0 <= entry.begin <= entry.begin + entry.nbytes <= path.stat().st_size and len(entry.shape) < 17, name


@FUZZ
@given(st.binary(max_size=120), st.none() | st.integers(0, 2**64 - 1))
def test_random_safetensors_bytes_are_read_or_refused(tmp_path: Path, header: bytes, claims: int | None) -> None:
    with suppress(ModelError):
        read_file(raw(tmp_path / "x.safetensors", header, claims=claims))


@pytest.mark.slow
@FUZZ
@given(
    st.sampled_from([2, 3]), st.integers(0, 3) | st.just(2**62), st.integers(0, 3) | st.just(2**62),
    st.lists(st.binary(max_size=9) | st.integers(0, 12).map(lambda kind: struct.pack("<I", kind)), max_size=12),
)  # fmt: skip
def test_random_gguf_bytes_are_read_or_refused(
    tmp_path: Path, version: int, tensors: int, keys: int, rest: list[bytes]
) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(rest))
    with suppress(ModelError):
        read(path)


KEYS = sorted(
    {
        "text_config", "quantization_config", "architectures", "model_type", "tie_word_embeddings", "rope_scaling",
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_hidden_layers", "hidden_size", "vocab_size",
        "num_attention_heads", "head_dim", "n_routed_experts", "q_lora_rank", "speculators_model_type", "mtp_config",
        "layer_types", "mtp_layer_types", "headstart_head", "tap", "dflash_config", "speculators_config", "num_heads"}
)  # fmt: skip
LIKELY = [
    *ZOO, "eagle3", "dflash", "medusa", 0, 1, 3, 10**9, None, {}, [], {"ignore": ["re:("], "bits": 4},
    {"dynamic": {"-:x": 1}}, {"config_groups": {"a": 1}}, {"dynamic": [1]}, {"num_nextn_predict_layers": 2}, [None],
]  # fmt: skip


@pytest.mark.slow
@FUZZ
@given(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(LIKELY) | values, max_size=6), st.sampled_from(sorted(ZOO))
)
def test_random_configs_are_inspected_or_refused(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    folder = tmp_path / key
    if not folder.exists():
        write(folder, {}, trunk(ZOO[key]) | heads(ZOO[key]))
    (folder / "config.json").write_text(json.dumps({**config_of(ZOO[key]), **changes}))
    with suppress(ModelError):
        inspect.run(InspectOptions(model=str(folder)))


SUFFIXES = (
    "weight", "qweight", "weight_packed", "weight_scale", "weight_scale_inv", "scales", "g_idx", "scale", "SCB", "bias",
    "weight.absmax", "gate_up_proj_blocks", "gate_up_proj_scales", "biases",
)  # fmt: skip


@pytest.mark.slow
@FUZZ
@given(
    st.dictionaries(
        st.sampled_from(SUFFIXES),
        st.tuples(st.sampled_from(sorted(BITS)), st.lists(st.integers(0, 40), max_size=3).map(tuple)), max_size=4),
)  # fmt: skip
def test_packed_weights_of_random_shapes_are_inspected_or_refused(tmp_path: Path, stored: dict[str, Any]) -> None:
    write_file(tmp_path / "model.safetensors", {f"model.layers.0.mlp.{word}": value for word, value in stored.items()})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "x", "quantization_config": {"bits": 3}}))
    with suppress(ModelError):
        inspect.run(InspectOptions(model=str(tmp_path)))


def gguf_header(*parts: tuple[str, Any]) -> bytes:
    return b"GGUF" + b"".join(struct.pack(code, value) for code, value in parts)


KEY = (("<Q", 1), ("<c", b"k"))
FALSE_SIZES: dict[str, tuple[str, bytes, int]] = {
    "a header of 2 GB": ("x.safetensors", (2 * 10**9).to_bytes(8, "little"), 3 * 10**9),
    "a header beyond the file": ("x.safetensors", (2**63).to_bytes(8, "little"), 1000),
    "many GGUF tensors": ("x.gguf", gguf_header(("<I", 3), ("<Q", 2**61), ("<Q", 0)), 10**9),
    "many GGUF keys": ("x.gguf", gguf_header(("<I", 3), ("<Q", 0), ("<Q", 2**61)), 10**9),
    "a long GGUF string": ("x.gguf", gguf_header(("<I", 3), ("<Q", 0), ("<Q", 1), ("<Q", 2**62)), 10**9),
    "a long GGUF array": (
        "x.gguf", gguf_header(("<I", 3), ("<Q", 0), ("<Q", 1), *KEY, ("<I", 9), ("<I", 12), ("<Q", 2**60)), 10**9),
    "a GGUF array of strings": (
        "x.gguf", gguf_header(("<I", 3), ("<Q", 0), ("<Q", 1), *KEY, ("<I", 9), ("<I", 8), ("<Q", 2**60)), 10**9),
    "a huge GGUF tensor": (
        "x.gguf", gguf_header(("<I", 3), ("<Q", 1), ("<Q", 0), *KEY, ("<I", 1), ("<Q", 2**60), ("<I", 0), ("<Q", 0)),
        10**6),
}  # fmt: skip


@pytest.mark.parametrize("lie", FALSE_SIZES)
def test_false_sizes_are_refused_without_allocating(tmp_path: Path, lie: str) -> None:
    name, head, size = FALSE_SIZES[lie]
    path = tmp_path / name
    path.write_bytes(head)
    os.truncate(path, size)
    reader: Callable[[Path], Any] = read if name.endswith(".gguf") else read_file
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=name):
            reader(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def make_shards_overlap(folder: Path) -> None:
    row = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    raw(folder / "model-1.safetensors", json.dumps({"a": row, "b": {**row, "data_offsets": [4, 12]}}).encode())


def add_absent_tensor_to_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.phantom.weight"] = "model-0.safetensors"
    index.write_text(json.dumps(document))


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut off": (lambda folder: os.truncate(folder / "model-0.safetensors", 9000), "9000 bytes, but its tensors need"),
    "overlapping": (make_shards_overlap, "overlap"),
    "a missing shard": (lambda folder: (folder / "model-1.safetensors").unlink(), "names the shard model-1"),
    "an index of absent tensors": (
        add_absent_tensor_to_index,
        "model.phantom.weight is in model-0.safetensors, but it is not",
    ),
    "a path in the index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../b"}}'),
        "not a plain file name",
    ),
    "a config that is not JSON": (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
    "a config that is a list": (lambda folder: (folder / "config.json").write_text("[]"), "must be an object"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    "a folder in place of a shard": (
        lambda folder: ((folder / "model-0.safetensors").unlink(), (folder / "model-0.safetensors").mkdir()),
        "cannot read",
    ),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_damaged_directories_end_in_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    folder = write(tmp_path / "m", config_of(ZOO["mimo"]), trunk(ZOO["mimo"]), shards=2)
    damage, message = DAMAGED[what]
    damage(folder)
    assert main(["inspect", str(folder)]) == 2
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == "" and lines[0].startswith("headstart: error: ") and message in lines[0]
    assert len(lines) == 2 and lines[1].startswith("hint: ")


def test_files_other_than_checkpoints_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="a pickle, opened for heads only"):
        find_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="neither a GGUF file nor a directory"):
        find_checkpoint(tmp_path / "pytorch_model.bin")
