"""Memory estimates shared by `plan` and `launch`: weights, KV cache, verdicts."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

from headstart.formats import open_described
from headstart.tools.plan.machine import find_device
from headstart.tools.plan.shape import (
    LIMIT,
    USABLE,
    MemoryEstimate,
    SizedModel,
    Split,
    devices_needed,
    estimate_memory,
    kv_bytes,
    weight_format,
)
from headstart.tools.plan.sources import CARDS, find_shape, from_checkpoint, sized_model


def model(name: str, weights: str | None = None, kv: str = "bf16") -> SizedModel:
    shape = find_shape(name, weights)
    return SizedModel(shape=shape, kv=kv_bytes(kv))


def split_on(gpu: str, tp: int = 1) -> Split:
    return Split(device=find_device(gpu).memory, tp=tp)


def test_estimate_is_the_sum_of_its_parts() -> None:
    dense = model("llama-2-7b")
    estimate = estimate_memory(dense, Split(device=1e12), 1000)
    assert estimate.weights == pytest.approx(sum(dense.weight_bytes().values()))
    assert estimate.per_sequence == 33 * 8192 * 1000 * 2
    assert estimate.max_batch == math.floor(
        (USABLE * 1e12 - estimate.weights - estimate.activations) / estimate.per_sequence
    )
    assert estimate_memory(dense, split_on("3060"), 1000).max_batch == 0


@pytest.mark.parametrize("context", [1, 4096, 1_000_000])
@pytest.mark.parametrize("name", ["llama-2-7b", "qwen3.6-27b", "deepseek-v4", "gpt-oss-120b", "glm-5.1"])
def test_max_context_is_the_longest_that_fits(name: str, context: int) -> None:
    estimate = estimate_memory(model(name), Split(device=2e12), context)
    longest = estimate.max_context
    assert (longest is None or longest >= context) == (estimate.verdict == "fits")
    if longest is not None:
        fits, no_more = (estimate_memory(model(name), Split(device=2e12), longest + more).max_batch for more in (0, 1))
        assert fits >= 1 and no_more == 0


@pytest.mark.parametrize(("name", "weights", "kv", "gpu", "context"), [
    ("qwen3.6-27b", "int4", "fp8", "4090", 65536),  # a known set-up for this card
    ("qwen3.6-27b", "int4", "bf16", "3090", 32768),
    ("qwen3-30b-a3b", None, "bf16", "a100", 16384),
    ("gpt-oss-120b", None, "bf16", "h100", 8192),  # the published target device
    ("deepseek-v4", None, "bf16", "b200", 65536),
])  # fmt: skip
def test_known_deployments_fit(name: str, weights: str | None, kv: str, gpu: str, context: int) -> None:
    assert estimate_memory(model(name, weights, kv), split_on(gpu), context).verdict == "fits"


@pytest.mark.parametrize(
    ("name", "weights", "gpu"),
    [("qwen3.6-27b", None, "4090"), ("qwen3-30b-a3b", None, "a6000"), ("deepseek-v3", None, "h200")],
)
def test_impossible_deployments_are_too_small(name: str, weights: str | None, gpu: str) -> None:
    estimate = estimate_memory(model(name, weights), split_on(gpu), 8192)
    assert estimate.verdict == "too small" and "weights take" in estimate.reason


def test_kv_caches_of_all_users_are_counted() -> None:
    """The weights fit and 8 caches of 64k tokens do not: the verdict is `close`, with the possible batch."""
    dense = model("qwen3.6-27b", "int4", "fp8")
    estimate = estimate_memory(dense, split_on("4090"), 65536, users=8)
    assert (estimate.verdict, estimate.max_batch) == ("close", 1) and "room for 1 at full length" in estimate.reason
    assert estimate_memory(dense, split_on("4090"), estimate.max_context).verdict == "fits"


def test_need_between_usable_and_total_memory_is_close() -> None:
    dense = model("llama-2-7b")
    need = estimate_memory(dense, Split(device=24e9), 1024)
    least = need.weights + need.activations + need.per_sequence
    verdicts = [estimate_memory(dense, Split(device=least / share), 1024).verdict for share in (USABLE - 0.01, 0.93, 1)]
    assert verdicts == ["fits", "close", "too small"] and LIMIT < 1


def test_tensor_parallel_divides_weights_and_kv_up_to_the_kv_heads() -> None:
    dense = model("qwen3.6-27b")
    alone, four, eight = (estimate_memory(dense, Split(device=80e9, tp=tp), 4096) for tp in (1, 4, 8))
    assert four.weights == pytest.approx(alone.weights / 4)
    assert four.per_sequence == pytest.approx(alone.per_sequence / 4)
    keys = [estimate_memory(dense, Split(device=80e9, tp=tp), 10**6).per_sequence for tp in (4, 8)]
    assert keys[1] / keys[0] > 0.99  # 4 KV heads: 8 devices hold copies
    assert eight.weights == pytest.approx(alone.weights / 8)


def test_file_bytes_override_the_estimate() -> None:
    assert devices_needed(model("glm-5.1", "fp8"), find_device("h200").memory) == 6
    dense = model("llama-2-7b")
    assert estimate_memory(dense, Split(device=80e9, tp=2), 100, weight_bytes=10e9).weights == pytest.approx(5e9)
    verdicts = [MemoryEstimate(device=80e9, weights=size / 2, replicas=1).verdict for size in (100e9, 150e9, 160e9)]
    assert verdicts == ["fits", "close", "too small"]


V4 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
         "vocab_size": 256}  # fmt: skip


def compressed(bits: int, kind: str, size: int | None) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "group_size": size}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(("quantization", "weights"), [
    (None, "bf16"), (V4, "fp8"), ({"quant_method": "mxfp4"}, "mxfp4"),
    ({"quant_method": "awq", "bits": 4}, "int4"), ({"quant_method": "gptq", "bits": 8}, "int8"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8"),
    (compressed(4, "int", 128), "int4"), (compressed(8, "int", None), "int8"),
    (compressed(8, "float", None), "fp8"), (compressed(4, "float", 16), "nvfp4"),
    (compressed(4, "float", 32), "mxfp4"),
])  # fmt: skip
def test_declared_quantization_sets_the_weight_format(quantization: dict[str, Any] | None, weights: str) -> None:
    config = {"quantization_config": quantization} if quantization else {}
    assert sized_model("made up", {**LLAMA, **config}).shape.weight_format == weights


def test_quantization_in_other_keys_sets_the_weight_format() -> None:
    formats = {"mlx4": {"quantization": {"bits": 4, "group_size": 64}},
               "fp4-fp8": {"quantization_config": V4, "expert_dtype": "fp4"}}  # fmt: skip
    for name, more in formats.items():
        assert sized_model("made up", {**LLAMA, **more}).shape.weight_format == name


def test_fp4_experts_of_a_lone_config_are_counted(tmp_path: Path) -> None:
    """DeepSeek-V4-Pro has 862 GB in files; with FP8 experts it would have 1.6 TB."""
    config = {**CARDS["deepseek-v4-pro"]["config"], "quantization_config": V4, "expert_dtype": "fp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = find_shape(str(tmp_path))
    model = SizedModel(shape=shape, kv=2)
    assert sum(model.weight_bytes().values()) == pytest.approx(862e9, rel=0.01)


@pytest.mark.slow
def test_every_verdict_but_fits_has_a_reason() -> None:
    estimates: list[MemoryEstimate] = [
        estimate_memory(model(name), Split(device=device, tp=tp), context, users=users)
        for name in ("llama-2-7b", "qwen3.6-27b", "deepseek-v4")
        for device in (8e9, 24e9, 80e9)
        for tp in (1, 2)
        for context in (1, 4096, 10**6)
        for users in (1, 64)
    ]
    assert {estimate.verdict for estimate in estimates} == {"fits", "close", "too small"}
    assert all(bool(estimate.reason) == (estimate.verdict != "fits") for estimate in estimates)


@pytest.mark.parametrize(("kind", "name"), [("Q5_0", "q5_0"), ("Q4_0", "q4_0"), ("IQ4_XS", "iq4_xs"), ("BF16", "bf16")])
def test_weight_format_of_a_gguf_file_is_its_tensor_type(kind: str, name: str, tmp_path: Path) -> None:
    model = open_described(write_tiny("llama", tmp_path / "model"))
    for tensor in model.tensors.values():
        object.__setattr__(tensor, "dtype", kind)
    shape = from_checkpoint(model, "made up")
    assert shape.weight_format == name
    assert weight_format(name).compute == ("bf16" if kind == "BF16" else "int8")
