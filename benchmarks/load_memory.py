"""What loading a large checkpoint takes: seconds, and memory of the process's own at most and afterwards.

    python benchmarks/load_memory.py --work WORK --gb 4 --json load.json

Checkpoints with random weights and realistic shapes are written to WORK as safetensors shards (config.json, a tiny
tokenizer) and deleted afterwards unless `--keep`: as many layers as make `--gb`.

dense-bf16   Llama 3's proportions, 2048 wide.
hybrid-bf16  Qwen3.5's, 2048 wide: linear and full layers in turn, gates beside the queries, an MTP module.
moe-fp8      DeepSeek-V3's, 2048 wide, 32 experts: latent attention, FP8 with a scale per block of 128 x 128, an MTP
             module; `moe-fp8-int8` with `--quantization int8`.
dense-FORMAT the first one's matrices in each format that people publish (embedding and head in bfloat16): FP8 with a
             scale for each row, MXFP8, int8, NVFP4, MXFP4, bitsandbytes' nf4 (double), AWQ, GPTQ.

Each is loaded twice, in processes of their own: `first` packs the weights and keeps them in the packed cache (made anew
in WORK), `again` maps that. Own memory is RssAnon (pages of mapped files can be dropped at any time and are not
counted), sampled every 20 ms; the ratio is to the bytes of the weights in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from measure import formats
from measure.formats import Part, Stored

from headstart import registry
from headstart.layers.build import DecoderConfig
from headstart.models.base import Family
from headstart.models.small import TINY
from headstart.tools.tiny import write_model

GOAL = 1.2
"""Own memory at most, as a multiple of the weights' bytes."""
SAMPLE_SECONDS = 0.02
SHARD_BYTES = 1 << 30
LOAD = (
    "import sys, time; begin = time.perf_counter()\n"
    "from headstart.api import LLM\n"
    "from headstart.config import EngineConfig\n"
    "llm = LLM(sys.argv[1], EngineConfig(backend='native', max_model_len=1024, quantization=sys.argv[2] or None))\n"
    "print(time.perf_counter() - begin, flush=True); sys.stdin.read()\n"
)
Shapes = Mapping[str, tuple[int, ...]]
WIDE = {"hidden_size": 2048, "vocab_size": 32000, "max_position_embeddings": 4096}


@dataclass(frozen=True)
class Case:
    """`config`: of a checkpoint, but for its layers."""

    family: str
    config: Mapping[str, Any]
    stored: Stored | None = None
    """How matrices inside of layers are stored; None: in bfloat16."""
    quantization: str = ""


def shapes_of(family: Family, sizes: DecoderConfig) -> Shapes:
    """Hugging Face names and shapes of a whole checkpoint."""
    blank = {name: np.zeros(shape, np.float16) for name, shape in family.shapes(sizes).items()}  # takes no memory yet
    with np.errstate(divide="ignore"):
        return {name: array.shape for name, array in family.as_written(blank, sizes).items()}  # type: ignore[arg-type]


DENSE = {**WIDE, "model_type": "llama", "intermediate_size": 8192, "num_attention_heads": 16, "head_dim": 128,
         "num_key_value_heads": 4}  # fmt: skip
HYBRID = {**WIDE, "model_type": "qwen3_5_text", "intermediate_size": 6144, "num_attention_heads": 8, "head_dim": 256,
          "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
          "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_key_head_dim": 128,
          "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mtp_num_hidden_layers": 1}  # fmt: skip
SPARSE = {**WIDE, "model_type": "deepseek_v3", "intermediate_size": 6144, "num_attention_heads": 16,
          "num_key_value_heads": 16, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
          "qk_rope_head_dim": 64, "head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 1024,
          "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
          "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
          "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}  # fmt: skip
CASES = {
    "dense-bf16": Case("llama", DENSE),
    "hybrid-bf16": Case("qwen3_5", HYBRID),
    "moe-fp8": Case("deepseek_v3", SPARSE, stored=formats.fp8_blocks),
    "moe-fp8-int8": Case("deepseek_v3", SPARSE, stored=formats.fp8_blocks, quantization="int8"),
    **{
        f"dense-{name}": Case("llama", {**DENSE, "quantization_config": told}, stored=stored)
        for name, (told, stored) in formats.FORMATS.items()
    },
}


def write(folder: Path, case: Case, num_bytes: float) -> int:
    """A checkpoint of about so many bytes; returns the bytes of its weights."""
    family: Family = registry.find("models", case.family).FAMILY
    layers, shapes = 2, dict[str, tuple[int, ...]]()
    while not shapes or size_of(shapes, case) < num_bytes:
        layers += 1
        config = {**TINY, **case.config, "num_hidden_layers": layers}
        shapes = dict(shapes_of(family, family.parse(config)))
    write_model(folder, config, {})  # with a tokenizer; its empty file goes
    (folder / "model.safetensors").unlink()
    rng, shard, number = np.random.default_rng(0), dict[str, tuple[int, ...]](), 0
    for name, shape in shapes.items():
        shard[name] = shape
        if size_of(shard, case) > SHARD_BYTES:
            write_shard(folder / f"model-{number:05}.safetensors", shard, case, rng)
            shard, number = {}, number + 1
    write_shard(folder / f"model-{number:05}.safetensors", shard, case, rng)
    return size_of(shapes, case)


def stored(name: str, shape: tuple[int, ...], case: Case) -> Iterator[Part]:
    """What stands for a tensor in the file."""
    outside = ("embed_tokens", "lm_head", "mlp.gate.", "eh_proj")
    if case.stored and len(shape) == 2 and not any(part in name for part in outside):
        yield from case.stored(name, shape)
    elif len(shape) == 1:
        yield Part(name, "F32", shape, lambda rng: np.full(shape, 1.0 if "norm" in name else 0.1, np.float32))
    else:
        yield Part(name, "BF16", shape, lambda rng: formats.small(rng, shape))


def size_of(shapes: Shapes, case: Case) -> int:
    return sum(part.num_bytes for name, shape in shapes.items() for part in stored(name, shape, case))


def write_shard(path: Path, shapes: Shapes, case: Case, rng: np.random.Generator) -> None:
    parts = [part for name, shape in shapes.items() for part in stored(name, shape, case)]
    header, at = dict[str, Any](), 0
    for part in parts:
        header[part.name] = {
            "dtype": part.dtype, "shape": part.shape, "data_offsets": [at, at + part.num_bytes]
        }  # fmt: skip
        at += part.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            file.write(np.ascontiguousarray(part.make(rng)).reshape(-1).view(np.uint8).data)


def load(folder: Path, cache: Path, quantization: str) -> dict[str, float]:
    """One process that loads: seconds, bytes of its own memory at most and afterwards."""
    words = [sys.executable, "-c", LOAD, str(folder), quantization]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words, stdin=pipe, stdout=pipe, text=True, env={**os.environ, "HEADSTART_CACHE": str(cache)}
    ) as process:
        assert process.stdin and process.stdout
        peak, done = 0, threading.Event()

        def sample() -> None:
            nonlocal peak
            while not done.wait(SAMPLE_SECONDS):
                peak = max(peak, own_bytes(process.pid))

        sampler = threading.Thread(target=sample, daemon=True)
        sampler.start()
        line = process.stdout.readline()
        done.set()
        sampler.join()
        after = own_bytes(process.pid)
        process.stdin.close()
    if process.returncode or not line:
        raise SystemExit(f"loading {folder} failed")
    return {"seconds": float(line), "peak_bytes": max(peak, after), "after_bytes": after}


def own_bytes(pid: int) -> int:
    """RssAnon; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")), 0)


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    case, folder, cache = CASES[name], args.work / name, args.work / f"{name}-cache"
    shutil.rmtree(cache, ignore_errors=True)
    try:
        print(f"writing {name}", file=sys.stderr, flush=True)
        weights = write(folder, case, args.gb * 1e9)
        found: dict[str, Any] = {"case": name, "weight_bytes": weights}
        for turn in ("first", "again"):
            print(f"loading {name}, {turn}", file=sys.stderr, flush=True)
            found[turn] = load(folder, cache, case.quantization)
            found[turn]["ratio"] = found[turn]["peak_bytes"] / weights
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory for the checkpoints, twice their size")
    add("--gb", type=float, default=4.0, help="bytes of the weights, in 10^9")
    add("--cases", type=lambda text: text.split(","), default=list(CASES), help=",".join(CASES))
    add("--keep", action="store_true", help="leave the checkpoints")
    add("--json", type=Path, help="file for all numbers")
    args = parser.parse_args()
    if unknown := sorted(set(args.cases) - set(CASES)):
        parser.error(f"--cases: unknown {unknown[0]}")
    print(f"| weights | GB | load | seconds | own memory, at most | of the file (goal {GOAL}) | afterwards | of it |")
    print("|---" * 8 + "|")
    document = []
    for name in args.cases:
        found = measure(args, name)
        document.append(found)
        for turn in ("first", "again"):
            each = found[turn]
            size, peak, after = (n / 1e9 for n in (found["weight_bytes"], each["peak_bytes"], each["after_bytes"]))
            cells = [f"{size:.2f}", turn, f"{each['seconds']:.1f}", f"{peak:.2f} GB", f"{each['ratio']:.2f}"]
            cells += [f"{after:.2f} GB", f"{after / size:.2f}"]
            print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"goal": GOAL, "cases": document}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
