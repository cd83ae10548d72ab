"""Tokens/s on the device, plain and with an MTP head, at several batch sizes, against plain torch and the memory limit.

Each row decodes `--decode` tokens per sequence (greedy, end of text ignored) after prompts of 32 random tokens:
tokens/s = (tokens - 1) x sequences / (first to last token). `plain torch`: transformers' `generate` with its cache in
bfloat16, on the same sizes with random weights. `limit`: bytes of a pass (weights, KV of all sequences) over the
measured read bandwidth; rows of a batch share the weights, of a mixture the expected number of experts. Random models
accept drafts at the rates RATES; the default model uses its own head.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import write_model

from device.clock import Clock, Results, attempt, say, table
from headstart import hub, registry
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.formats.safetensors import bfloat16
from headstart.layers.moe import MoEConfig
from headstart.models.small import TINY, random_arrays

CARDS: Mapping[str, Any] = json.loads(
    (Path(__file__).parents[2] / "headstart" / "tools" / "plan" / "cards.json").read_text("utf-8")
)
SHAPES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("qwen3_5", {}),
    "qwen3.5-0.8b": ("qwen3_5", {
        **CARDS["qwen3.5-9b"]["config"], "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16, "tie_word_embeddings": True,
    }),
    "qwen3.5-9b": ("qwen3_5", {**CARDS["qwen3.5-9b"]["config"], "num_hidden_layers": 8}),
    "moe": ("qwen3_5_moe", {**CARDS["qwen3.6-35b-a3b"]["config"], "num_hidden_layers": 4}),
}  # fmt: skip
"""Family and keys of config.json. The two large models have a quarter and a tenth of their layers, to be written and
read fast; the share of the limit does not depend on it."""
DEFAULT = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
"""Sizes of the default model; transformers needs another package to read them from the GGUF file."""
DEPTH, RATES = 3, "0.75,0.5,0.35"
"""RATES give acceptance length 2.6."""
SHARE, GAIN, LENGTH = 0.6, 1.8, 2.6
"""Goals for one sequence: share of the memory limit of plain decoding; speed-up by MTP at LENGTH tokens per pass."""
PROMPT, BLOCK, LARGE = 32, 1 << 20, 1 << 20
READ_BYTES, READ_RUNS = 4 << 30, 8


@dataclass(frozen=True)
class Options:
    backend: str
    device: str
    model: str
    shapes: Sequence[str]
    batches: Sequence[int]
    decode: int


def config_of(backend: str, device: str, **more: Any) -> EngineConfig:
    """The reference backend uses bfloat16 on a GPU; other backends use their default."""
    narrow = {"dtype": "bfloat16"} if backend == "reference" and device == "cuda" else {}
    return EngineConfig(**{"backend": backend, "device": device, "seed": 0, **narrow, **more})


def run(options: Options, work: Path, clock: Clock, results: Results) -> None:
    bandwidth = _bandwidth(options)
    results.add("speed", what="read bandwidth", bytes_per_s=bandwidth)
    for shape in options.shapes:
        if clock.left < 30:
            say(f"no time for {shape}")
            continue
        attempt(results, "speed", lambda: _shape(options, shape, work, clock, results, bandwidth), shape=shape)  # noqa: B023
    rows = [
        [row.get(key, "") for key in ("shape", "mode", "batch", "tokens_per_s", "limit", "share", "tokens_a_pass")]
        for row in results.rows
        if row["part"] == "speed" and "mode" in row
    ]
    print(f"\nreads at {bandwidth / 1e9:.0f} GB/s")
    table(("shape", "mode", "sequences", "tokens/s", "limit of plain", "share of it", "tokens a pass"), rows)
    print()
    for line in goals([row for row in results.rows if row["part"] == "speed" and "mode" in row]):
        print(line)


def goals(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Goals for one sequence: share of the memory limit, and speed-up by drafts."""
    found = {(row["shape"], row["mode"]): row for row in rows if row["batch"] == 1}
    for (shape, mode), row in found.items():
        plain = found.get((shape, "plain"))
        if mode == "plain":
            outcome = f"{row['share']:.0%} of the memory's limit", row["share"] >= SHARE
            wanted = f"{SHARE:.0%}"
        elif mode == "MTP" and plain:
            gain, length = row["tokens_per_s"] / plain["tokens_per_s"], row["tokens_a_pass"]
            outcome = f"{gain:.2f} x plain at {length:.2f} tokens a pass", gain >= GAIN * min(length / LENGTH, 1)
            wanted = f"{GAIN} x at {LENGTH} tokens a pass, in proportion below"
        else:
            continue
        verdict = "reached" if outcome[1] else "NOT reached"
        yield f"goal, {shape}, {mode}, one sequence: {outcome[0]}; wanted {wanted}: {verdict}"


def _bandwidth(options: Options) -> float:
    from headstart.kernels.reference.backend import ReferenceBackend

    size = READ_BYTES if options.device == "cuda" else 1 << 28
    return ReferenceBackend(device=options.device).read_bandwidth(size, READ_RUNS)


def _shape(options: Options, shape: str, work: Path, clock: Clock, results: Results, bandwidth: float) -> None:
    todo = [(mode, n) for mode in ("plain", "MTP", "plain torch") for n in options.batches]
    todo = [each for each in todo if not results.done("speed", shape=shape, mode=each[0], batch=each[1])]
    if not todo:
        return
    own = shape == "default"
    folder = Path(options.model) if own else work / "shapes" / shape
    if not own and not (folder / "config.json").exists():
        write_random(folder, *SHAPES[shape])
    name = options.model if own else str(folder)
    synthetic = {} if own else {"synthetic_acceptance": RATES}
    limits = _limits(options, name, bandwidth, results, shape)
    for mode in ("plain", "MTP"):
        counts = [n for each, n in todo if each == mode]
        if not counts or clock.left < 10:
            continue
        more = {"drafter": "none"} if mode == "plain" else {"drafter": "mtp", "depth": DEPTH, **synthetic}
        llm = LLM(name, config_of(options.backend, options.device, max_num_seqs=max(counts), max_model_len=512, **more))
        for count in counts:
            measured = decode(llm, count, options.decode)
            results.add("speed", shape=shape, mode=mode, batch=count, limit=limits[count], backend=options.backend,
                        share=measured["tokens_per_s"] / limits[count], **measured)  # fmt: skip
            if clock.left < 10:
                return
        del llm
    counts = [n for each, n in todo if each == "plain torch"]
    if counts and clock.left > 30:
        _plain_torch(options, name, shape, counts, results, limits)
    if not own:
        shutil.rmtree(folder)


def decode(llm: LLM, count: int, tokens: int) -> dict[str, Any]:
    """Decodes all sequences together, after a warm-up round."""
    rng = np.random.default_rng(count)
    vocab = llm.model.config.vocab_size
    for most in (8, tokens):
        prompts = [rng.integers(min(300, vocab // 2), vocab - 1, PROMPT).tolist() for _ in range(count)]
        params = SamplingParams(max_tokens=most, ignore_eos=True, temperature=0.0)
        done = llm.generate(prompts, params)
    seconds = max(each.timing["decode_s"] for each in done)
    passes, emitted = (sum(getattr(each.speculation, name) for each in done) for name in ("passes", "emitted"))
    written = sum(len(each.token_ids) - 1 for each in done)
    return {"tokens_per_s": written / seconds, "tokens_a_pass": emitted / max(passes, 1), "seconds": seconds}


def _limits(options: Options, name: str, bandwidth: float, results: Results, shape: str) -> dict[int, float]:
    """Upper bound of tokens/s by batch size, from memory reads alone."""
    from headstart.formats import open_checkpoint
    from headstart.models.tensors import canonical_tensors, find_family, read_config

    checkpoint = open_checkpoint(hub.resolve(name))
    family = find_family(checkpoint)
    config = read_config(checkpoint, family)
    tensors = canonical_tensors(checkpoint, family, config)
    plain, experts = 0.0, 0.0
    for each, tensor in tensors.items():
        size = float(tensor.nbytes if hasattr(tensor, "nbytes") else 2 * np.prod(tensor.shape))
        if options.backend == "reference":
            size = np.prod(tensor.shape) * (2.0 if options.device == "cuda" else 4.0)
        if each.startswith("mtp.") or (each == "embed_tokens.weight" and "lm_head.weight" in tensors):
            continue
        experts, plain = (experts + size, plain) if ".experts." in each else (experts, plain + size)
    mixture = next((layer.mlp for layer in config.layers if isinstance(layer.mlp, MoEConfig)), None)
    left = 1 - mixture.router.top_k / mixture.router.num_experts if mixture else 0.0
    cached = sum(
        spec.num_kv_heads * (spec.head_dim + spec.value_width) * 2.0
        for layer in config.layers
        if (spec := getattr(layer.mixer, "spec", None)) and hasattr(spec, "num_kv_heads")
    ) * (PROMPT + options.decode / 2)
    return {n: n * bandwidth / (plain + experts * (1 - left**n) + n * cached) for n in options.batches}


def write_random(folder: Path, family: str, keys: Mapping[str, Any]) -> None:
    """A checkpoint of these sizes; large matrices repeat a block of noise, other tensors are as in the tiny models."""
    declared = registry.find("models", family).FAMILY
    sizes = {**TINY, **declared.small, **keys, "torch_dtype": "bfloat16"}
    config = declared.read(sizes)
    shapes = declared.shapes(config)
    noise = np.random.default_rng(0).standard_normal(BLOCK + 1, np.float32)
    small = {name: shape for name, shape in shapes.items() if np.prod(shape) < LARGE}
    arrays = random_arrays(small)
    for name in shapes.keys() - small.keys():
        shape = shapes[name]
        arrays[name] = np.resize(noise * np.float32(shape[-1] ** -0.5), shape)
    begun = time.monotonic()
    written = declared.as_published(arrays, config)
    write_model(folder, sizes, {name: bfloat16(each) for name, each in written.items()})
    say(f"{folder.name}: {sum(map(np.prod, shapes.values())) / 1e9:.2f}e9 weights in {time.monotonic() - begun:.0f} s")


def _plain_torch(
    options: Options, name: str, shape: str, counts: Sequence[int], results: Results, limits: Mapping[int, float]
) -> None:
    """Speed of transformers with this config."""
    import transformers

    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    if shape == "default":
        config = transformers.LlamaConfig(**DEFAULT)
    else:
        config = transformers.AutoConfig.from_pretrained(name)
    with torch.device(options.device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for count in counts:
        prompts = torch.randint(min(300, config.vocab_size // 2), config.vocab_size - 1, (count, PROMPT))
        prompts = prompts.to(options.device)
        for most in (8, options.decode):
            stamps: list[float] = []

            def stamp(_: torch.Tensor, scores: torch.Tensor, stamps: list[float] = stamps) -> torch.Tensor:
                """Logits processor that records the time of each token."""
                if options.device == "cuda":
                    torch.cuda.synchronize()
                stamps.append(time.perf_counter())
                return scores

            model.generate(
                prompts, max_new_tokens=most, min_new_tokens=most, do_sample=False, eos_token_id=None,
                attention_mask=torch.ones_like(prompts), pad_token_id=0,
                logits_processor=transformers.LogitsProcessorList([stamp]),
            )  # fmt: skip
        rate = count * (len(stamps) - 1) / (stamps[-1] - stamps[0])
        results.add("speed", shape=shape, mode="plain torch", batch=count, tokens_per_s=rate, limit=limits[count],
                    share=rate / limits[count], backend="transformers", tokens_a_pass=1.0)  # fmt: skip
