"""Published quantized models: a quantized trunk with a plain embedding and MTP head."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import family_of, model_at
from test_checkpoints import logits_of
from tiny_models import write_model

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.formats.base import make_tensor
from headstart.formats.grouped import E2M1, NF4
from headstart.models.small import Arrays

pytest.importorskip("headstart.kernels.native._native")

Parts = dict[str, Any]
rng = np.random.default_rng(8)


def e4m3(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    return make_tensor("", codes.shape, "F8_E4M3", codes.reshape(-1)).float32()


def fp8(name: str, shape: tuple[int, int]) -> tuple[Parts, NDArray[np.float32]]:
    codes = rng.integers(0, 0x70, shape, dtype=np.uint8) | rng.integers(0, 2, shape, dtype=np.uint8) << 7
    scales = rng.uniform(1e-3, 2e-3, (shape[0], 1)).astype(np.float32)
    return {name: (codes, "F8_E4M3"), f"{name}_scale": scales}, e4m3(codes) * scales


def nvfp4(name: str, shape: tuple[int, int]) -> tuple[Parts, NDArray[np.float32]]:
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    scales, whole = rng.integers(0x30, 0x48, (shape[0], shape[1] // 16), dtype=np.uint8), np.float32(0.03)
    parts = {
        name: codes[:, ::2] | codes[:, 1::2] << 4, f"{name}_scale": (scales, "F8_E4M3"),
        f"{name}_scale_2": np.array(whole),
    }  # fmt: skip
    return parts, E2M1[codes] * np.repeat(e4m3(scales) * whole, 16, axis=1)


def nf4(name: str, shape: tuple[int, int]) -> tuple[Parts, NDArray[np.float32]]:
    codes, largest = rng.integers(0, 16, shape, dtype=np.uint8), rng.uniform(0.1, 0.3, shape[0] * shape[1] // 64)
    state = {"quant_type": "nf4", "blocksize": 64, "shape": list(shape)}
    parts = {
        name: (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1), f"{name}.quant_map": NF4,
        f"{name}.absmax": largest.astype(np.float32),
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }  # fmt: skip
    return parts, NF4[codes] * np.repeat(largest.astype(np.float32), 64).reshape(shape)


FORMATS: dict[str, tuple[dict[str, Any], Callable[[str, tuple[int, int]], tuple[Parts, NDArray[np.float32]]]]] = {
    "fp8": ({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]}, fp8),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, nvfp4),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, nf4),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_quantized_trunk_with_a_plain_head_equals_plain_values(form: str, tmp_path: Path) -> None:
    """Logits equal those of the plain values, and drafts keep the text."""
    settings, encode = FORMATS[form]
    config, arrays = family_of("mimo").tiny(hidden_size=64, intermediate_size=128)
    stored, plain = Arrays(), Arrays()
    for name, array in arrays.items():
        stored[name] = plain[name] = array
        if name.endswith("_proj.weight") and ".layers." in name and array.shape[1] % 64 == 0:
            del stored[name]
            parts, plain[name] = encode(name, array.shape)
            stored |= parts
    folder = write_model(tmp_path / form, {**config, "quantization_config": settings}, stored)
    expected = logits_of(model_at(write_model(tmp_path / "plain", config, plain)))
    assert float((logits_of(model_at(folder)) - expected).abs().max()) <= 1e-5
    stated: Any = {"nf4": "bitsandbytes"}.get(form, form)
    llm = LLM(str(folder), EngineConfig(threads=1, kv_blocks=40, drafter="mtp", quantization=stated))
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    drafted, alone = (llm.generate(["the", "a cat"], params, depth=depth) for depth in (3, 0))
    assert all(each.speculation.drafted for each in drafted)
    assert [each.token_ids for each in drafted] == [each.token_ids for each in alone]


def test_quantization_flag_is_checked_against_the_files(tmp_path: Path) -> None:
    config, arrays = family_of("llama").tiny()
    plain, packed = write_model(tmp_path / "plain", config, arrays), dict(config)
    packed["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    for folder, name in ((plain, "not quantized"), (write_model(tmp_path / "gptq", packed, arrays), "gptq")):
        with pytest.raises(UsageError, match=f"--quantization awq, but .* is {name}") as caught:
            LLM(str(folder), EngineConfig(quantization="awq"))
        assert "leave it out" in caught.value.hint
