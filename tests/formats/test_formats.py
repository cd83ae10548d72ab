"""Checkpoint formats: files round-trip, and damaged files raise only ModelError."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import gguf_files
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors import safe_open

from headstart.errors import ModelError
from headstart.files import write_atomic_chunks
from headstart.formats import gguf_file, open_checkpoint, safetensors, safetensors_file
from headstart.formats.base import make_tensor
from headstart.formats.gguf import rope_config
from headstart.formats.gguf_names import canonical_names
from headstart.formats.quantization import readable
from headstart.formats.rows import unpermute_rows
from headstart.hub import cached_trunk

RNG = np.random.default_rng(0)
SMALL = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tensors() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "a": rng.normal(size=(3, 5)).astype(np.float32),
        "half": rng.normal(size=(4, 2)).astype(np.float16),
        "ids": np.arange(7, dtype=np.int64),
        "mask": np.array([True, False, True]),
        "bf": (np.array([[0x3F80, 0xC000], [0x4049, 0]], np.uint16), "BF16"),
        "f8": (np.array([0x38, 0xC0, 0x7F, 1], np.uint8), "F8_E4M3"),
        "cube": rng.normal(size=(2, 3, 4)).astype(np.float32),
        "scalar": np.array(3.5, np.float32),
        "nothing": np.zeros((0, 4), np.float32),
    }


def write_folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    safetensors.save(path / "model.safetensors", tensors(), {"format": "np"})
    return path


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int = 0, end: int = 8, **changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]} | changes


def test_safetensors_round_trip(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path / "m"))
    assert checkpoint.format == "safetensors" and not checkpoint.canonical_names
    found, expected = checkpoint.tensors, tensors()
    for name in ("half", "scalar", "nothing"):
        np.testing.assert_array_equal(found[name].float32(), expected[name].astype(np.float32))
        assert found[name].shape == expected[name].shape
    np.testing.assert_array_equal(found["ids"].numpy(), expected["ids"])
    np.testing.assert_array_equal(found["mask"].numpy(), expected["mask"])
    np.testing.assert_array_equal(found["bf"].float32(), [[1.0, -2.0], [3.140625, 0.0]])
    np.testing.assert_array_equal(found["f8"].float32(), np.array([1.0, -2.0, np.nan, 2.0**-9], np.float32))
    assert found["cube"].data.shape == (2, 48) and found["cube"].float32().shape == (2, 3, 4)
    assert found["ids"].nbytes == 56
    with pytest.raises(ModelError, match="holds I64"):
        found["ids"].float32()
    with pytest.raises(ModelError, match="BF16"):
        found["bf"].numpy()


def test_saved_file_is_readable_by_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    plain = {name: value for name, value in tensors().items() if not isinstance(value, tuple)}
    safetensors.save(path, plain, {"note": "hi"})
    with safe_open(path, framework="np") as file:
        assert file.metadata() == {"note": "hi"}
        for name, value in plain.items():
            np.testing.assert_array_equal(file.get_tensor(name), value)
    assert list(tmp_path.iterdir()) == [path]


def test_failed_save_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(ModelError, match="cannot be saved"):
        safetensors.save(path, {"a": np.zeros(2, np.complex64)})
    with pytest.raises(TypeError):
        write_atomic_chunks(path, [b"new", None])
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def test_take_rows_is_exact(tmp_path: Path) -> None:
    found = open_checkpoint(write_folder(tmp_path / "m")).tensors
    rows = np.array([2, 0, 2], np.int64)
    for name in ("a", "ids"):
        np.testing.assert_array_equal(found[name].take_rows(rows).numpy(), found[name].numpy()[rows])
    np.testing.assert_array_equal(found["cube"].take_rows(rows[1:2]).float32(), found["cube"].float32()[[0]])
    with pytest.raises(ModelError, match="scalar"):
        found["scalar"].take_rows(rows)
    assert found["nothing"].take_rows(np.zeros(0, np.int64)).shape == (0, 4)


def test_sharded_checkpoint_is_read(tmp_path: Path) -> None:
    write_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    safetensors.save(tmp_path / "one.safetensors", {"a": np.zeros(2, np.float32)})
    safetensors.save(tmp_path / "two.safetensors", {"b": np.ones(2, np.float32)})
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert set(open_checkpoint(tmp_path).tensors) == {"a", "b"}
    for weight_map, message in (
        ({"a": "one.safetensors", "c": "two.safetensors"}, "tensor c is in two"),
        ({"a": "three.safetensors"}, "three.safetensors, which is missing"),
        ({"a": "../one.safetensors"}, "not a plain file name"),
        ({"a": 1}, "no weight_map"),
        (None, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ModelError, match=message):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize(("header", "data", "message"), [
    (b"{", b"", "not valid JSON"),
    (b"[1]", b"", "must be an object"),
    (b'{"a":' + b"[" * 100_000, b"", "not valid JSON"),
    (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}', b"", "not valid JSON"),
    (b'{"a":1,"a":2}', b"", "twice"),
    ({"a": 3}, b"", "not an object"),
    ({"a": entry()}, b"1234", r"the file has \d+ bytes, but its tensors need \d+"),
    ({"a": entry(8, 0)}, b"12345678", "offsets"),
    ({"a": entry(-8, 0)}, b"12345678", "offsets"),
    ({"a": entry(0, 4)}, b"12345678", "needs 8 bytes, but has 4"),
    ({"a": entry(shape=[2**62, 2**62])}, b"12345678", "needs"),
    ({"a": entry(shape=[10**40])}, b"12345678", "shape"),
    ({"a": entry(shape="2")}, b"12345678", "shape"),
    ({"a": entry(dtype="F99")}, b"12345678", "dtype 'F99'"),
    ({"a": entry(dtype=["F32"])}, b"12345678", "dtype"),
    ({"a": entry(), "b": entry(4, 12)}, b"x" * 12, "overlap"),
])  # fmt: skip
def test_damaged_safetensors_are_refused(tmp_path: Path, header: object, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        safetensors_file.read_file(write_raw(tmp_path / "x.safetensors", header, data))
    assert "x.safetensors" in caught.value.message


def test_oversized_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for blob in (b"", b"123", (2**63).to_bytes(8, "little"), (100).to_bytes(8, "little") + b"{}"):
        path.write_bytes(blob)
        with pytest.raises(ModelError, match=r"x\.safetensors"):
            safetensors_file.read_file(path)
    with path.open("wb") as file:  # a sparse file
        file.write((safetensors_file.MAX_HEADER + 1).to_bytes(8, "little"))
        file.truncate(safetensors_file.MAX_HEADER + 100)
    with pytest.raises(ModelError, match="more than"):
        safetensors_file.read_file(path)


def test_paths_without_a_checkpoint_are_refused(tmp_path: Path) -> None:
    def assert_refused(message: str, path: Path = tmp_path) -> None:
        with pytest.raises(ModelError, match=message):
            open_checkpoint(path)

    assert_refused("does not exist", tmp_path / "gone")
    assert_refused("empty directory")
    (tmp_path / "m.gguf").touch()
    assert_refused(r"name one of them, such as m\.gguf")
    (tmp_path / "m.gguf").unlink()
    (tmp_path / "note.txt").write_text("hello")
    assert_refused(r"no config\.json")
    assert_refused("neither", tmp_path / "note.txt")
    (tmp_path / "config.json").write_text("{}")
    assert_refused(r"no \*.safetensors")
    write_folder(tmp_path)
    assert_refused("is one file of a checkpoint", tmp_path / "model.safetensors")
    (tmp_path / "config.json").rename(tmp_path / "other")
    assert_refused(r"has weights, but no config\.json")
    (tmp_path / "config.json").write_text("not json")
    assert_refused("not valid JSON")


@SMALL
@given(st.binary(max_size=200), st.integers(0, 300))
def test_random_safetensors_raise_model_errors_only(tmp_path: Path, blob: bytes, size: int) -> None:
    path = tmp_path / "x.safetensors"
    for text in (blob, size.to_bytes(8, "little") + blob):
        path.write_bytes(text)
        with suppress(ModelError):
            safetensors_file.read_file(path)


def write_gguf(path: Path, **extra: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    values = {
        "llama.block_count": extra.get("blocks", 1), "llama.embedding_length": 32, "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.context_length": 128,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 5000.0,
        "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 32, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 5, "llama.some.list": [1, 2, 3], "test.words": extra.get("words", ["word"]),
        **{f"general.sampling.{name}": value for name, value in extra.get("sampling", {}).items()},
        **({"llama.nextn_predict_layers": extra["nextn"]} if "nextn" in extra else {}),
    }  # fmt: skip
    for name, value in values.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    embed = RNG.normal(size=(16, 32)).astype(np.float32)
    kind = gguf.GGMLQuantizationType.Q8_0
    writer.add_tensor("token_embd.weight", gguf.quantize(embed, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.add_tensor("blk.0.attn_q.weight", embed.astype(np.float16))
    writer.add_tensor("blk.0.attn_q.bias", np.arange(16, dtype=np.float32))
    return gguf_files.written(writer, path)


def test_gguf_config_and_names_are_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf"))
    assert checkpoint.canonical_names and checkpoint.format == "gguf"
    expected = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rope_theta": 5000.0,
        "max_position_embeddings": 128, "vocab_size": 16, "tie_word_embeddings": True, "eos_token_id": [2, 5],
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    }  # fmt: skip
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert set(checkpoint.tensors) == {
        "embed_tokens.weight", "norm.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias",
    }  # fmt: skip
    with pytest.raises(ModelError, match="no tokenizer"):
        checkpoint.load_tokenizer()
    assert checkpoint.chat_template() is None


def test_gguf_sampling_recommendations_are_read(tmp_path: Path) -> None:
    message = {"temp": 0.6, "top_p": 0.95, "top_k": 20, "penalty_repeat": 1.05, "mirostat": 0}
    assert open_checkpoint(write_gguf(tmp_path / "m.gguf", sampling=message)).generation_config == {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": [2, 5],
    }  # fmt: skip


def test_gguf_tensors_match_the_gguf_library(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    ours, rows = {tensor.name: tensor for tensor in gguf_file.read(path).tensors.values()}, np.array([3, 1], np.int64)
    for theirs in gguf.GGUFReader(path).tensors:
        values = gguf.dequantize(theirs.data, theirs.tensor_type)
        np.testing.assert_array_equal(ours[theirs.name].float32(), values)
        np.testing.assert_array_equal(ours[theirs.name].take_rows(rows).float32(), values[rows])


def llama3_factors(theta: float, factor: float) -> np.ndarray:
    """Llama 3.1's published rule, as written by llama.cpp's converter."""
    length = 2 * np.pi * theta ** (np.arange(0, 64, 2) / 64)
    smooth = np.clip((8192 / length - 1) / 3, 0, 1)
    return np.float32(1 / ((1 - smooth) / factor + smooth))


def test_rope_factors_are_read_as_llama3_scaling() -> None:
    def scaling(values: np.ndarray) -> Any:
        tensor = make_tensor("rope_freqs.weight", values.shape, "F32", values.view(np.uint8))
        config = {"model_type": "llama", "head_dim": 64, "rope_theta": 500000.0}
        return rope_config({}, {"rope_freqs.weight": tensor}, config).get("rope_scaling")

    assert scaling(llama3_factors(500000.0, 32.0)) == {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert scaling(np.ones(32, np.float32)) is None
    assert scaling(np.linspace(1, 9, 32, dtype=np.float32))["rope_type"] == "rope_freqs"


def test_mtp_modules_are_not_counted_as_layers(tmp_path: Path) -> None:
    config = open_checkpoint(write_gguf(tmp_path / "m.gguf", blocks=3, nextn=1)).config
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)
    with pytest.raises(ModelError, match="blocks are heads"):
        open_checkpoint(write_gguf(tmp_path / "n.gguf", blocks=1, nextn=1))


@pytest.mark.parametrize("piece", [1, 8, 21, 100, 1 << 20])
def test_vocabulary_is_read_in_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "_PIECE_BYTES", piece)
    words = ["", "a", "of twenty characters", "é" * 40, *map(str, range(50))]
    assert gguf_file.read(write_gguf(tmp_path / "m.gguf", words=words)).metadata["test.words"] == words


def test_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    blob, path = write_gguf(tmp_path / "m.gguf").read_bytes(), tmp_path / "cut.gguf"
    for size in [*range(0, 1500, 23), len(blob) - 200, len(blob) - 129]:
        path.write_bytes(blob[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf"):
            open_checkpoint(path)


def test_unsupported_gguf_headers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for blob, message in (
        (b"GGML" + bytes(40), "not a GGUF"), (b"GGUF\1\0\0\0" + bytes(40), "version 1"),
        (b"GGUF\0\0\0\3" + bytes(40), "big-endian"), (b"GGUF\3\0\0\0" + b"\xff" * 16, "the file ends before its"),
    ):  # fmt: skip
        path.write_bytes(blob)
        with pytest.raises(ModelError, match=message):
            open_checkpoint(path)


@pytest.mark.slow
@SMALL
@given(st.lists(st.tuples(st.integers(4, 1200), st.integers(0, 255)), min_size=1, max_size=6))
def test_damaged_gguf_files_raise_model_errors_only(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    original = tmp_path / "m.gguf"
    if not original.exists():
        write_gguf(original)
    blob = bytearray(original.read_bytes())
    for at, byte in changes:
        blob[at] = byte
    path = tmp_path / "bad.gguf"
    path.write_bytes(blob)
    with suppress(ModelError):
        for tensor in open_checkpoint(path).tensors.values():
            tensor.float32()


def test_split_gguf_files_are_read(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(ModelError, match=r"m-00002-of-00002\.gguf is missing"):
        open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
    writer = gguf.GGUFWriter(tmp_path / "m-00002-of-00002.gguf", "llama")
    writer.add_tensor("output.weight", np.zeros((16, 32), np.float32))
    gguf_files.written(writer, tmp_path / "m-00002-of-00002.gguf")
    checkpoint = open_checkpoint(tmp_path / "m-00001-of-00002.gguf")
    assert "lm_head.weight" in checkpoint.tensors and not checkpoint.config["tie_word_embeddings"]


def test_gguf_names_are_mapped() -> None:
    names = canonical_names(["blk.3.ffn_norm.weight", "blk.0.nextn.eh_proj.weight", "blk.1.exp_probs_b.bias", "odd"])
    assert list(names.values()) == [
        "layers.3.post_attention_layernorm.weight", "layers.0.eh_proj.weight",
        "layers.1.mlp.gate.e_score_correction_bias", "odd",
    ]  # fmt: skip
    both = canonical_names(["blk.0.ffn_norm.weight", "blk.0.post_attention_norm.weight"])
    assert both["blk.0.ffn_norm.weight"] == "layers.0.pre_feedforward_layernorm.weight"
    with pytest.raises(ModelError, match="both mean"):
        canonical_names(["output.weight", "output.weight"])


@pytest.mark.parametrize("columns", [0, 3])
def test_unpermute_rows_inverts_the_converter(columns: int) -> None:
    heads, half = 3, 4
    shape = (heads * 2 * half, columns) if columns else (heads * 2 * half,)
    original = RNG.normal(size=shape).astype(np.float32)
    # The converter's documented order: [head, half, pair] -> [head, pair, half].
    permuted = np.ascontiguousarray(original.reshape(heads, 2, half, -1).swapaxes(1, 2)).reshape(shape)
    tensor = make_tensor("q", shape, "F32", permuted.reshape(-1).view(np.uint8))
    np.testing.assert_array_equal(unpermute_rows(tensor, heads).float32(), original)
    with pytest.raises(ModelError, match="rotary pairs"):
        unpermute_rows(tensor, 5)


@pytest.mark.skipif(cached_trunk() is None, reason="the default model is not in the cache")
def test_default_model_is_read() -> None:
    checkpoint = open_checkpoint(cached_trunk())
    assert checkpoint.config["num_hidden_layers"] == 30 and checkpoint.config["eos_token_id"] == 2
    weight = checkpoint.tensors["layers.0.self_attn.q_proj.weight"]
    assert (weight.shape, weight.dtype, weight.data.shape) == ((576, 576), "Q4_1", (576, 360))
    rows = np.array([5, 0], np.int64)
    np.testing.assert_array_equal(weight.take_rows(rows).float32(), weight.float32()[rows])


def test_parts_and_transposes_keep_the_values() -> None:
    """Parts are views, of quantized tensors as well; transposed tensors stay 16-bit or become float32."""
    stack = RNG.normal(size=(3, 4, 64)).astype(np.float32)
    for kind in (gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0):
        raw = gguf.quantize(stack, kind)
        part = make_tensor("x", stack.shape, kind.name, raw.reshape(-1)).part(2)
        assert part.shape == (4, 64) and np.shares_memory(part.data, raw)
        np.testing.assert_array_equal(part.float32(), gguf.dequantize(raw, kind)[2])
        np.testing.assert_array_equal(part.take_rows(np.array([3, 1])).float32(), part.float32()[[3, 1]])
        np.testing.assert_array_equal(part.transposed().float32(), part.float32().T)
        assert part.plain().dtype == part.transposed().dtype == "F32"
    half = make_tensor("x", (2, 3), "F16", np.arange(6, dtype=np.float16).view(np.uint8))
    assert half.transposed().dtype == half.plain().dtype == "F16"
    assert half.transposed().float32().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert half.part(1).shaped(1, 3).float32().tolist() == [[3, 4, 5]]
    with pytest.raises(ModelError, match="has no part 2"):
        half.part(2)


def test_fp8_e5m2_and_e8m0_values_match_their_definition() -> None:
    """E5M2 is the upper half of a float16; E8M0 is a power of two, with 255 for NaN."""
    codes = np.array([0x00, 0x3C, 0xC0, 0x7B, 0x01], np.uint8)
    assert make_tensor("x", (5,), "F8_E5M2", codes).float32().tolist() == [0, 1, -2, 57344, 2.0**-16]
    powers = make_tensor("x", (4,), "F8_E8M0", np.array([0, 127, 130, 255], np.uint8)).float32()
    assert powers[:3].tolist() == [2.0**-127, 1, 8] and np.isnan(powers[3])


def test_codes_with_scales_are_dequantized() -> None:
    """int8 with a scale for each row, and pairs of FP4 codes with a power of two for 32 columns: whole, selected rows,
    and one matrix of a stack."""
    rng = np.random.default_rng(2)
    codes = rng.integers(-128, 128, (2, 3, 64)).astype(np.int8)
    steps = rng.random((2, 3), np.float32)
    packed, powers = rng.integers(0, 256, (3, 32)).astype(np.uint8), rng.integers(120, 134, (3, 2)).astype(np.uint8)
    stored = {
        "a.experts.up": ("I8", codes), "a.experts.up_scale": ("F32", steps), "b.weight": ("I8", packed),
        "b.scale": ("F8_E8M0", powers),
    }  # fmt: skip
    found = readable(
        {name: make_tensor(name, x.shape, kind, x.reshape(-1).view(np.uint8)) for name, (kind, x) in stored.items()}, {}
    )
    assert {name: each.shape for name, each in found.items()} == {"a.experts.up": (2, 3, 64), "b.weight": (3, 64)}
    halves = safetensors.bfloat16(codes * steps[..., None])[0].reshape(-1).view(np.uint8)
    up = make_tensor("", codes.shape, "BF16", halves).float32()
    np.testing.assert_array_equal(found["a.experts.up"].float32(), up)
    np.testing.assert_array_equal(found["a.experts.up"].part(1).take_rows(np.array([2, 0])).float32(), up[1, [2, 0]])
    sizes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1).reshape(3, 64)
    signed = np.where(nibbles & 8, -sizes[nibbles & 7], sizes[nibbles & 7])
    expected = signed * np.exp2(np.repeat(powers.astype(np.float32) - 127, 32, axis=1))
    np.testing.assert_array_equal(found["b.weight"].float32(), expected)
