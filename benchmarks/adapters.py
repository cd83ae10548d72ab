"""Cost of LoRA adapters: tokens/s of plain decoding without adapters, with one, and with one per text.

    python benchmarks/adapters.py
    python benchmarks/adapters.py --model ./my-model --rank 64 --batch-sizes 1,8

The adapters have random factors for all attention and MLP matrices, at the cost of trained ones. Each row is the median
of several rounds; rows alternate.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.formats import safetensors

ROUNDS = 5


def write_adapter(folder: Path, llm: LLM, rank: int, seed: int) -> Path:
    """A PEFT directory over the canonical names of the model's matrices."""
    rng, arrays = np.random.default_rng(seed), {}
    for name, tensor in llm.model.weights.tensors.items():
        if name.startswith("layers.") and name.endswith("_proj.weight") and len(tensor.shape) == 2:
            num_out, num_in = tensor.shape
            module = f"base_model.model.model.{name.removesuffix('.weight')}"
            arrays[f"{module}.lora_A.weight"] = rng.standard_normal((rank, num_in)).astype(np.float32)
            arrays[f"{module}.lora_B.weight"] = rng.standard_normal((num_out, rank)).astype(np.float32) / 1000
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    safetensors.save(folder / "adapter_model.safetensors", arrays)
    return folder


def speed(llm: LLM, prompts: list[str], loras: list[str], tokens: int) -> float:
    """Total tokens/s of all texts."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, params, lora=loras, depth=0)
    return len(prompts) * tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch-sizes", default="1,8")
    args = parser.parse_args()
    sizes = [int(word) for word in args.batch_sizes.split(",")]
    with tempfile.TemporaryDirectory() as folder, LLM(args.model, enable_prefix_caching=False) as llm:
        for number in range(max(sizes)):
            llm.load_adapter(str(number), write_adapter(Path(folder) / str(number), llm, args.rank, number))
        for size in sizes:
            prompts = [f"Text number {number} is about" for number in range(size)]
            modes = {"no adapter": [""] * size, "1 adapter": ["0"] * size}
            if size > 1:
                modes[f"{size} adapters"] = [str(number) for number in range(size)]
            speeds: dict[str, list[float]] = {mode: [] for mode in modes}
            for _ in range(ROUNDS):
                for mode, loras in modes.items():
                    speeds[mode].append(speed(llm, prompts, loras, args.tokens))
            plain = statistics.median(speeds["no adapter"])
            for mode, found in speeds.items():
                median = statistics.median(found)
                spread = f"{min(found):.0f} to {max(found):.0f}"
                print(f"batch {size}, {mode:<12} {median:7.1f} tokens/s ({spread}), {median / plain:.2f} of none")


if __name__ == "__main__":
    main()
