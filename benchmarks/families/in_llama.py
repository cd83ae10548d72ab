"""Small random models as GGUF files of llama.cpp's tools: log-probabilities of llama.cpp and headstart.

The model has sizes for K-quants (rows of 256). llama.cpp's converter writes F32 and F16, its quantizer Q8_0 and Q4_K_M.
llama-server continues a prompt of token ids greedily and gives the log-probabilities of the vocabulary at each step
(`n_probs`); headstart reads the same file and scores the same tokens. Both keep KV in float32, so that only the weight
type matters.
"""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines.llama_engine import LlamaServer
from family_rows import row_of
from numpy.typing import NDArray
from tiny_models import write_model

from headstart.config import EngineConfig
from headstart.core import Request, SamplingParams, Sequence, Span
from headstart.engine.build import build_engine
from headstart.engine.load import load_model
from headstart.layers.build import DecoderConfig
from headstart.models.base import Family
from headstart.models.small import Arrays

TYPES = ("F32", "F16", "Q8_0", "Q4_K_M")
PROMPT, STEPS = 40, 24
WIDE: Mapping[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256, "shared_intermediate_size": 256,
    "query_pre_attn_scalar": 64, "global_head_dim": 128, "hidden_size_per_layer_input": 256, "kv_lora_rank": 256,
    "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "linear_key_head_dim": 64,
    "linear_value_head_dim": 64, "linear_num_value_heads": 4, "mamba_n_heads": 8, "mamba_d_head": 64,
    "mamba_d_state": 64, "mamba_d_ssm": 512, "mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 64,
    "index_head_dim": 128, "index_n_heads": 16,
    "moe_latent_size": 256, "moe_shared_expert_intermediate_size": 256, "expert_ffn_hidden_size": 256,
    "ffn_hidden_size": 512,
}  # fmt: skip
"""Config values in sizes that quantizers support; keys missing in a tiny config are left out."""
OWN: Mapping[str, Mapping[str, Any]] = {
    "gemma4_shared": {  # the layers whose KV is shared are one with and one without a window, as in released models
        "layer_types": [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")],
    },
}
"""Additional keys by row."""
NOT_BY_TRANSFORMERS = ("deepseek_v4", "glm5_next", "mimo_v2_flash", "minimax_m3", "qwen4_exp", "step3p5")
"""Families whose config the converter reads in released form, not in that of transformers' class."""
NOT_THERE = ("deepseek_v41", "inkling", "longcat_flash", "mimo", "step5")
"""Families and rows without an architecture in llama.cpp."""
LIMITS = {"F32": 2e-4, "F16": 1e-5, "Q8_0": 1e-2, "Q4_K_M": 1e-2}
"""F32: limit of the maximum difference of a log-probability. Only the order of sums differs (about 1e-5), and GELU,
which llama.cpp reads from a float16 table. Other types: limit of the median divergence over the steps. F16: llama.cpp
rounds the rows of every product to float16, headstart does not (about 4e-7). Q8_0 and Q4_K_M: both round rows to 8
bits, in groups of 32 or 256; `reference` does not (1e-4 to 8e-4; with experts or recurrent layers up to 5e-3). The
median is used as a rounded row may select another expert, with large changes at a few positions. Wrongly read weights
give 5e-2 or more."""


@dataclass(frozen=True)
class Agreement:
    """Over `steps` positions: maximum difference of a log-probability, mean and median KL divergence to llama.cpp, and
    share of equal top tokens."""

    largest: float
    mean: float
    median: float
    same: int
    steps: int


GELU = ("gemma2", "gemma3", "gemma3n", "gemma4")
APART = {"gemma3n": {"F32": 0.1, "F16": 1e-4}, "minimax_m3": {"F32": 2e-2}}
"""Limits of families that llama.cpp computes differently. Gemma 3n: llama.cpp divides the variance of n activations by
n - 1, the model and headstart by n; the difference is 4e-3 with its divisor and 4e-2 otherwise. MiniMax-M3: flash
attention rounds to float16 (Muse-Glimmer with it: 5e-3)."""
IN_FP4 = ("deepseek_v4",)
"""Families whose experts are MXFP4 in files of any type; llama.cpp rounds their inputs to 8 bits."""
IN_FLASH = ("minimax_m3",)
"""Families with block selection, which llama.cpp supports with flash attention only."""
SELECTING = ("deepseek_v32", "glm5_next", "glm_moe_dsa", "hy_v4", "minimax_m3")
"""Families that select 11 to 15 of about 60 positions here; rounding rows to 8 bits changes the selection."""


def table_cell(name: str, kind: str, found: Mapping[str, Agreement]) -> tuple[float, bool]:
    """Cell of a family and weight type: the number of the worse backend, and whether it is within the limit."""
    kind = "Q8_0" if name in IN_FP4 and kind in ("F32", "F16") else kind
    limit = APART.get(name, LIMITS).get(kind, LIMITS[kind])
    if (kind == "F32" and name in GELU and name not in APART) or (kind in ("Q8_0", "Q4_K_M") and name in SELECTING):
        limit = 2e-2 if kind == "F32" else 0.2
    worst = max(each.largest if kind == "F32" else each.median for each in found.values())
    return worst, worst <= limit


def small_model(family: Family, name: str, row: str, folder: Path, changes: Mapping[str, Any]) -> Path:
    """A Hugging Face directory. `row`: name of the family or variant."""
    there = {**family.tiny(**changes)[0]}
    wide = {key: value for key, value in WIDE.items() if there.get(key) is not None}
    config, arrays = family.tiny(**{**changes, **wide, **row_of(name).llama_cpp, **OWN.get(row, {})})
    # The folder's name becomes the model's name in the file, and llama.cpp changes tokens if it contains "phi3".
    arrays = (
        with_fp4_experts(arrays) if name == "deepseek_v4" else stack_experts(arrays, "mlp." if name == "hy_v4" else "")
    )
    arrays = with_hashes(arrays, family.read(config)) if name == "qwen4_exp" else arrays
    return write_model(folder / name / "small", config, arrays)


def stack_experts(arrays: Arrays, parent: str) -> Arrays:
    """Stacks experts [E, ...] with joined gate and up, as in released files of Gemma 4 (beside an MLP) and HY-V4
    (parent: `mlp.`)."""
    found: Arrays = {}
    parts: dict[tuple[str, str], dict[int, NDArray[np.float32]]] = {}
    for name, array in arrays.items():
        if match := re.fullmatch(rf"(.*layers\.\d+\.{parent}experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            parts.setdefault((match[1], match[3]), {})[int(match[2])] = array
        else:
            found[name] = array
    stacks = {key: np.stack([each for _, each in sorted(experts.items())]) for key, experts in parts.items()}
    for prefix, kind in stacks:
        if kind == "down":
            found[f"{prefix}.down_proj"] = stacks[prefix, kind]
            found[f"{prefix}.gate_up_proj"] = np.concatenate((stacks[prefix, "gate"], stacks[prefix, "up"]), 1)
    return found


def with_fp4_experts(arrays: Arrays) -> dict[str, Any]:
    """Random experts in the released form of DeepSeek-V4 (two codes per byte, a power of two per 32 codes), and its
    tables as integers, as the converter requires."""
    rng, found = np.random.default_rng(0), dict[str, Any]()
    for name, array in arrays.items():
        found[name] = array.astype(np.int64) if name.endswith("tid2eid") else array
        if ".ffn.experts." in name:
            rows, columns = array.shape
            found[name] = rng.integers(-128, 128, (rows, columns // 2)).astype(np.int8)
            scales = rng.integers(121, 124, (rows, columns // 32)).astype(np.uint8)
            found[name.replace(".weight", ".scale")] = scales, "F8_E8M0"
    return found


def with_hashes(arrays: Arrays, config: DecoderConfig) -> dict[str, Any]:
    """The n-gram table in parts with its hash parameters, as Qwen3.8-Flash-Next is released."""
    spec = next(layer.memory.spec for layer in config.layers if layer.memory)
    (table,) = (name for name in arrays if name.endswith(".ngram_embedding.weight"))
    parts, place = np.array_split(arrays[table], 2), table.removesuffix("ngram_embedding.weight")
    found: dict[str, Any] = {name: array for name, array in arrays.items() if name != table}
    found |= {f"{place}ngram_embedding.shard_{i}.weight": part for i, part in enumerate(parts)}
    numbers = {"layer_multipliers": spec.factors, "ngram_heads_vocab_sizes": spec.sizes}
    numbers["ngram_heads_offsets"] = (0, *np.cumsum(spec.sizes[:-1]).tolist())
    return found | {f"{place}{name}": np.array(each, np.int64) for name, each in numbers.items()}


def convert(folder: Path, path: Path, source: Path, name: str, *, half: bool) -> None:
    """Converts with llama.cpp's `source` folder. The vocabulary is written here, as the converter knows tokenizers by
    name."""
    for place in (source, source / "gguf-py"):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    logging.getLogger("hf-to-gguf").setLevel(logging.ERROR)
    import gguf
    from conversion import get_model_class  # type: ignore[import-not-found]

    config = json.loads((folder / "config.json").read_text())
    config |= row_of(name).released
    (folder / "config.json").write_text(json.dumps(config))
    kind: Any = get_model_class(config["architectures"][0])
    kind.no_mtp = True
    types = gguf.LlamaFileType
    raw = {"hparams": config} if name in NOT_BY_TRANSFORMERS else {}
    model: Any = kind(folder, types.MOSTLY_F16 if half else types.ALL_F32, path, **raw)

    def set_vocab() -> None:
        writer = model.gguf_writer
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, config["vocab_size"]))])
        writer.add_token_merges(["a b"])

    model.set_vocab = set_vocab
    model.write()


def quantize(source: Path, path: Path, kind: str, programs: Path) -> None:
    command = [programs / "llama-quantize", "--allow-requantize", source, path, kind]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"llama-quantize {kind}: {(done.stderr + done.stdout).strip().splitlines()[-1][:120]}")


def llama_logprobs(
    file: Path, prompt: list[int], vocab: int, programs: Path, flash: str
) -> tuple[list[int], NDArray[np.float64]]:
    """Greedy tokens of llama-server, and their log-probabilities [steps, V]."""
    more = ["-c", "512", "-ctk", "f32", "-ctv", "f32", "-fa", flash, "--no-warmup"]
    server = LlamaServer(programs, file, 1, file.with_suffix(".log"), more)
    try:
        server.wait()
        answer = server.complete(prompt, STEPS, ignore_eos=True, num_probs=vocab)
    finally:
        server.group.end()
    rows = np.full((len(answer["completion_probabilities"]), vocab), -np.inf)
    for row, step in zip(rows, answer["completion_probabilities"], strict=True):
        for entry in step["top_logprobs"]:
            row[entry["id"]] = entry["logprob"]
    return list(answer["tokens"]), rows  # the output may contain end-of-text tokens


def headstart_logprobs(file: Path, tokens: list[int], first: int, backend: str) -> NDArray[np.float64]:
    """Log-probabilities [steps, V] of headstart after tokens[first:]."""
    settings = EngineConfig(
        backend=backend, dtype="float32", drafter="none", threads=1, block_size=16, kv_blocks=40,
        max_model_len=len(tokens) + 16, **({"kv_cache_dtype": "float32"} if backend == "native" else {}),
    )  # fmt: skip
    engine = build_engine(load_model(str(file), settings), settings)
    request = Request(
        request_id="r", prompt_ids=tuple(tokens[:1]), params=SamplingParams(), seed=0, stop_ids=frozenset()
    )
    sequence = Sequence(request, 0, list(tokens), 0)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    span = Span(sequence, 0, len(tokens), len(tokens) - first)
    logits = np.asarray(engine.runner.forward([span]).logits, np.float64)
    top = logits.max(-1, keepdims=True)
    found: NDArray[np.float64] = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return found


def compare(
    file: Path, vocab: int, programs: Path, backends: tuple[str, ...], flash: str = "off"
) -> dict[str, Agreement]:
    prompt = np.random.default_rng(7).integers(3, vocab, PROMPT).tolist()
    chosen, expected = llama_logprobs(file, prompt, vocab, programs, flash)
    found = {}
    for backend in backends:
        rows = headstart_logprobs(file, [*prompt, *chosen[:-1]], PROMPT - 1, backend)
        known = np.isfinite(expected)
        difference = np.abs(np.where(known, rows - expected, 0.0)).max()
        apart = np.where(known, np.exp(expected) * (expected - rows), 0.0).sum(-1)
        same = int((rows.argmax(-1) == expected.argmax(-1)).sum())
        mean, median = float(np.mean(apart)), float(np.abs(np.median(apart)))
        found[backend] = Agreement(float(difference), mean, median, same, len(chosen))
    return found


def compare_all(
    family: Family, name: str, row: str, folder: Path, changes: Mapping[str, Any], source: Path
) -> dict[str, dict[str, Agreement]]:
    """Agreement by weight type and backend. Raises errors of the converter, quantizer or reader."""
    folder.mkdir(parents=True)
    model = small_model(family, name, row, folder, changes)
    vocab = json.loads((model / "config.json").read_text())["vocab_size"]
    programs, found = source / "build/bin", {}
    files = {kind: folder / f"{kind}.gguf" for kind in TYPES}
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        convert(model, files["F32"], source, name, half=False)
        convert(model, files["F16"], source, name, half=True)
    for kind, file in files.items():
        if kind not in ("F32", "F16"):
            quantize(files["F32"], file, kind, programs)
        found[kind] = compare(file, vocab, programs, ("reference", "native"), "on" if name in IN_FLASH else "off")
    return found
