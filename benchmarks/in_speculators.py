"""Loads an exported EAGLE-3 head into the class of vllm-project/speculators and compares its logits with the formula's.

    headstart export --head HEAD --to speculators -o EXPORTED
    headstart export --to vllm-mimo -o TRUNK
    python benchmarks/in_speculators.py EXPORTED TRUNK

speculators requires an older transformers than this project. Its class also works with the newer one: `pip install
--no-deps speculators hs-connectors`, then `pip install datasets loguru pydantic-settings typer`. Streams and tokens are
random, so that every weight is used. Exit code 1: a tensor is not read, or logits differ by 1e-3.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file

TESTS = Path(__file__).resolve().parents[1] / "tests"
ROWS = 24


def with_verifier(exported: Path, trunk: Path, folder: Path) -> Path:
    """A copy of the head with `trunk`, as a plain Llama, for verifier; speculators reads the embedding from it."""
    config = json.loads((exported / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder / "trunk")
    trunk_config = json.loads((trunk / "config.json").read_text()) | {"model_type": "llama"}
    trunk_config.pop("auto_map", None)
    for name, source, document in (("head", exported, config), ("trunk", trunk, trunk_config)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(document))
        (folder / name / "model.safetensors").symlink_to((source / "model.safetensors").resolve())
    return folder / "head"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("exported", type=Path)
    parser.add_argument("trunk", type=Path)
    args = parser.parse_args()
    sys.path[:0] = [str(TESTS), str(TESTS / "contract"), str(TESTS / "heads")]
    from speculators import Eagle3DraftModel, Eagle3SpeculatorConfig
    from test_eagle3 import plain_eagle3

    with tempfile.TemporaryDirectory() as folder:
        head = with_verifier(args.exported, args.trunk, Path(folder))
        config = Eagle3SpeculatorConfig.from_pretrained(head)
        config.transformer_layer_config._attn_implementation = "eager"
        model = Eagle3DraftModel.from_pretrained(head, config=config).double().eval()
    tensors = load_file(args.exported / "model.safetensors")
    unread = sorted(set(tensors) - set(model.state_dict()))
    layer = config.transformer_layer_config
    spec = SimpleNamespace(
        head_dim=layer.head_dim, num_heads=layer.num_attention_heads, num_kv_heads=layer.num_key_value_heads
    )
    torch.manual_seed(0)
    ids = torch.randint(0, layer.vocab_size, (ROWS,))
    streams = torch.randn(ROWS, model.fc.in_features, dtype=torch.float64)
    theta = json.loads((args.exported / "config.json").read_text())["transformer_layer_config"]["rope_theta"]
    inv_freq = theta ** -(torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim)
    named = {name.replace("layers.0.", "midlayer."): tensor.double() for name, tensor in tensors.items()}
    with torch.no_grad():
        expected, _ = plain_eagle3(named, streams, model.embed_tokens.weight[ids], spec, inv_freq, layer.rms_norm_eps)
        logits: list[torch.Tensor] = []
        model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
        documents = torch.zeros(1, ROWS, dtype=torch.long)
        model(hidden_states=streams[None], input_ids=ids[None], document_ids=documents, ttt_steps=1)
    difference = (logits[0] - expected).abs().max().item()
    same = (logits[0].argmax(-1) == expected.argmax(-1)).sum().item()
    print(f"unread tensors: {unread or 'none'}; largest difference {difference:.1e} of {expected.abs().max():.1f}; "
          f"{same} of {ROWS} drafts equal")  # fmt: skip
    return int(bool(unread) or difference > 1e-3)


if __name__ == "__main__":
    sys.exit(main())
