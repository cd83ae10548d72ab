"""--portable-bits: tokens and logprob bits equal stored digests on every machine and instruction path.

The digests were written by `python -m tests.contract.test_portable_bits` on x86 with AVX2. The file uses neither torch
nor other test files, so that ARM processors run it (tests/arm.py)."""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tiny_models import write_tiny

from headstart import api
from headstart.config import EngineConfig
from headstart.core import SamplingParams

native = pytest.importorskip("headstart.kernels.native.backend", exc_type=ImportError)

PATHS = native.instruction_paths(portable_bits=True)
DIGESTS = Path(__file__).with_name("portable_bits.json")
PROMPTS, TOKENS = 6, 12
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "packaged model": ("", {}),
    "llama, int4": ("llama", {"quantization": "int4"}),
    "llama, int8, KV in float32": ("llama", {"quantization": "int8", "kv_cache_dtype": "float32"}),
    "gemma3, int8, KV in int8": ("gemma3", {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "gpt_oss, KV in fp8": ("gpt_oss", {"kv_cache_dtype": "fp8"}),
    "deepseek_v32": ("deepseek_v32", {}),
    "deepseek_v4": ("deepseek_v4", {}),
    "qwen3_next, int4": ("qwen3_next", {"quantization": "int4"}),
    "kimi_linear": ("kimi_linear", {}),
    "nemotron_h, int8": ("nemotron_h", {"quantization": "int8"}),
    "phi3": ("phi3", {}),
    "gemma3n": ("gemma3n", {}),
}
"""All kinds of KV cache, latent attention, an indexer, experts, streams, recurrent layers, activations."""


def digest(name: str, path: str, folder: Path) -> str:
    family, options = MODELS[name]
    model = str(write_tiny(family, folder)) if family else "qwen3_5-tiny"
    config = EngineConfig(portable_bits=True, threads=2, kv_blocks=40, max_model_len=64, backend="native", **options)
    with patch.object(native, "paths", lambda portable_bits: [path]):
        llm = api.LLM(model, config)
    params = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=TOKENS, logprobs=2)
        for seed, temperature in enumerate((0.0, 0.8, 1.3) * (PROMPTS // 3))
    ]
    prompts = [[3 + (seed * 7 + i * i) % 60 for i in range(4 + 5 * seed)] for seed in range(PROMPTS)]
    found = llm.generate(prompts, params, raw=True)
    outputs = [[each.token_ids, [one.logprob.hex() for one in each.logprobs]] for each in found]
    return hashlib.sha256(json.dumps(outputs).encode()).hexdigest()[:16]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", MODELS)
def test_bits_match_the_stored_digests(name: str, path: str, tmp_path: Path) -> None:
    assert digest(name, path, tmp_path) == json.loads(DIGESTS.read_text())[name]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        digests = {name: digest(name, PATHS[0], Path(folder) / str(i)) for i, name in enumerate(MODELS)}
    DIGESTS.write_text(json.dumps(digests, indent=2) + "\n")


if __name__ == "__main__":
    main()
