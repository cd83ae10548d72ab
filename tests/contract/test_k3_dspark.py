"""Kimi-K3 with its DSpark drafter of latent attention: drafts equal a reading of vLLM's code, and the text equals plain
decoding."""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import assert_drafts, rotate_pairs
from oracles import build_oracle, config_and_tensors
from readings import mixture
from support import family_of, make, model_at, new_folder, prompt_of, run, varied_requests
from tiny_models import write_model
from torch import Tensor
from torch.nn.functional import linear, silu

from headstart.engine.load import Model
from headstart.errors import ModelError
from headstart.formats.safetensors import save
from headstart.heads.files import read_head
from headstart.heads.kind import head_kind
from headstart.layers.decoder import SumTaps
from headstart.layers.weights import Weights
from headstart.models.small import random_arrays
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

HIDDEN, VOCAB, BLOCK_SIZE, MASK, RANK, LAYERS, TARGETS = 48, 131, 5, 130, 6, 2, [0, 2]
HEADS, QUERY, LATENT, NOPE, ROTARY, VALUE, INNER = 4, 16, 32, 12, 6, 10, 40
DRAFTER: Mapping[str, Any] = {
    "architectures": ["K3DSparkModel"], "model_type": "k3_dspark", "hidden_size": HIDDEN, "target_hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "intermediate_size": INNER, "num_attention_heads": HEADS, "q_lora_rank": QUERY,
    "kv_lora_rank": LATENT, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROTARY, "v_head_dim": VALUE,
    "vocab_size": VOCAB, "markov_rank": RANK, "block_size": BLOCK_SIZE, "mask_token_id": MASK, "hidden_act": "silu",
    "target_layer_ids": TARGETS, "num_target_layers": len(TARGETS), "rms_norm_eps": 1e-5, "mla_use_nope": False,
    "enable_confidence_head": True, "confidence_head_with_markov": True, "rope_parameters": {"rope_type": "default"},
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {
        "context_proj.weight": (HIDDEN, len(TARGETS) * HIDDEN), "context_norm.weight": (HIDDEN,),
        "final_norm.weight": (HIDDEN,), "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK), "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    for at in (f"layers.{i}." for i in range(LAYERS)):
        attn = {
            "q_a_proj": (QUERY, HIDDEN), "q_b_proj": (HEADS * (NOPE + ROTARY), QUERY),
            "kv_a_proj_with_mqa": (LATENT + ROTARY, HIDDEN), "kv_b_proj": (HEADS * (NOPE + VALUE), LATENT),
            "o_proj": (HIDDEN, HEADS * VALUE), "q_a_layernorm": (QUERY,), "kv_a_layernorm": (LATENT,),
        }  # fmt: skip
        found |= {f"{at}self_attn.{name}.weight": shape for name, shape in attn.items()}
        found |= {f"{at}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{at}mlp.down_proj.weight"] = (HIDDEN, INNER)
        found |= {f"{at}{name}.weight": (HIDDEN,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def drafter_at(path: Path, **changes: Any) -> Path:
    path.mkdir(parents=True)
    save(path / "model.safetensors", random_arrays(shapes(), 7))
    (path / "config.json").write_text(json.dumps({**DRAFTER, **changes}))
    return path


@cache
def checkpoint_folders() -> tuple[Path, Path]:
    """Folders of the tiny checkpoint and of its drafter."""
    return write_model(new_folder(), *family_of("kimi_k3").tiny(num_nextn_predict_layers=0)), drafter_at(new_folder())


@cache
def loaded(backend: str = "reference", dtype: str = "float64") -> Model:
    exact: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    return model_at(checkpoint_folders()[0], backend, dtype, head=str(checkpoint_folders()[1]), **exact)


def with_exact_drafter(model: Model) -> Model:
    """The model with unrounded matrices of its drafter, which the native backend quantizes by default."""
    assert model.head
    weights = Weights(read_head(checkpoint_folders()[1]).tensors, model.backend, "the file")
    modules = head_kind("block").modules(weights, model.head.spec, model.config.hidden_size)
    return replace(model, head=replace(model.head, modules=modules))


class ReferenceDrafter:
    """After vLLM 0.33 `models/kimi_k3/nvidia/dspark_mla.py`, in float64."""

    def __init__(self, head: Tensor, embed: Tensor) -> None:
        self.arrays = {name: torch.tensor(each).double() for name, each in random_arrays(shapes(), 7).items()}
        self.head, self.embed = head.double(), embed.double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + DRAFTER["rms_norm_eps"]) * self.arrays[f"{name}.weight"]
        )

    def rope(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate_pairs(x, positions, 50000.0, ROTARY)

    def keys(self, at: str, x: Tensor, positions: Tensor) -> Tensor:
        """[R, H] -> [R, LATENT + ROTARY]."""
        low, shared = linear(x, self.arrays[f"{at}.kv_a_proj_with_mqa.weight"]).split((LATENT, ROTARY), -1)
        return torch.cat((self.norm(low, f"{at}.kv_a_layernorm"), self.rope(shared[:, None], positions)[:, 0]), -1)

    def attention(self, at: str, x: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        low = self.norm(linear(x, self.arrays[f"{at}.q_a_proj.weight"]), f"{at}.q_a_layernorm")
        q = linear(low, self.arrays[f"{at}.q_b_proj.weight"]).unflatten(-1, (HEADS, -1))
        q = torch.cat((q[..., :NOPE], self.rope(q[..., NOPE:], positions)), -1)
        every = torch.cat((context, self.keys(at, x, positions)))
        both = linear(every[:, :LATENT], self.arrays[f"{at}.kv_b_proj.weight"]).unflatten(-1, (HEADS, -1))
        k = torch.cat((both[..., :NOPE], every[:, None, LATENT:].expand(-1, HEADS, -1)), -1)
        shares = (torch.einsum("rhd,nhd->rhn", q, k) * (NOPE + ROTARY) ** -0.5).softmax(-1)
        out = torch.einsum("rhn,nhv->rhv", shares, both[..., NOPE:])
        return linear(out.flatten(1), self.arrays[f"{at}.o_proj.weight"])

    def __call__(self, states: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """From taps [N, taps * H] of positions 0 .. N - 1 and the token at N: base logits [B, V] and y [B, H]."""
        context = self.norm(linear(states, self.arrays["context_proj.weight"]), "context_norm")
        before, positions = torch.arange(len(states)), len(states) + torch.arange(BLOCK_SIZE)
        x = self.embed[[anchor] + [MASK] * (BLOCK_SIZE - 1)]
        for at in (f"layers.{i}" for i in range(LAYERS)):
            kept = self.keys(f"{at}.self_attn", context, before)
            x = x + self.attention(f"{at}.self_attn", self.norm(x, f"{at}.input_layernorm"), positions, kept)
            z = self.norm(x, f"{at}.post_attention_layernorm")
            gate, up = (linear(z, self.arrays[f"{at}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + linear(silu(gate) * up, self.arrays[f"{at}.mlp.down_proj.weight"])
        y = self.norm(x, "final_norm")
        return linear(y, self.head), y

    def draft(self, states: Tensor, anchor: int) -> tuple[list[int], list[float]]:
        """Greedy tokens of a block, and the confidence in each."""
        (logits, y), tokens, confidences = self(states, anchor), [anchor], list[float]()
        for row in range(BLOCK_SIZE):
            e = self.arrays["markov_head.markov_w1.weight"][tokens[-1]]
            both, bias = torch.cat((y[row], e)), self.arrays["confidence_head.proj.bias"]
            confidences.append(float(linear(both, self.arrays["confidence_head.proj.weight"], bias).sigmoid()))
            tokens.append(int((logits[row] + linear(e, self.arrays["markov_head.markov_w2.weight"])).argmax()))
        return tokens[1:], confidences


def taps_of(model: Model, tokens: list[int], *, sums: bool) -> tuple[ReferenceDrafter, Tensor]:
    """The reference drafter, and the newest sums or the mixtures after each target layer, [T, taps * H]."""
    oracle, missing, unexpected = build_oracle("kimi_k3", *config_and_tensors("kimi_k3", model))
    assert not missing and not unexpected
    found: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        def kept(module: Any, args: Any, output: Tensor) -> None:
            each, reader = output[0].unflatten(-1, (-1, HIDDEN)), oracle.model.layers[layer + 1]
            mixed = mixture(each, reader.self_attention_res_norm, reader.self_attention_res_proj)
            found[layer] = each[:, -1] if sums else mixed

        return kept

    for layer in TARGETS:
        oracle.model.layers[layer].register_forward_hook(keep(layer))
    with torch.no_grad():
        oracle(torch.tensor([tokens]), use_cache=False)
    drafter = ReferenceDrafter(oracle.lm_head.weight.data, oracle.get_input_embeddings().weight.data)
    return drafter, torch.cat([found[each] for each in TARGETS], -1).double()


@pytest.mark.parametrize(("backend", "dtype"), [("reference", "float64"), ("native", "float32")])
@pytest.mark.parametrize(("length", "sums"), [(1, True), (7, True), (40, True), (40, False)])
def test_drafts_match_public_code(backend: str, dtype: str, length: int, sums: bool) -> None:
    """`sums`: taps of this drafter's training; otherwise mixtures, as drafters with grouped queries read."""
    model, tokens = with_exact_drafter(loaded(backend, dtype)), [1, *prompt_of(length, 5)]
    assert model.head and isinstance(model.head.spec.tap, SumTaps)
    if not sums:
        model = replace(model, head=replace(model.head, spec=replace(model.head.spec, tap=tuple(model.head.spec.tap))))
    oracle, taps = taps_of(model, tokens, sums=sums)
    assert_drafts(model, oracle, taps, tokens, backend=backend, dtype=dtype)


@pytest.mark.parametrize(("backend", "dtype"), [("reference", "float64"), ("native", "float32")])
def test_drafts_keep_the_text(backend: str, dtype: str) -> None:
    for temperature in (0.0, 1.0):
        how: dict[str, Any] = {"backend": backend, "dtype": dtype, "block_size": 16}
        plain = run(make(loaded(backend, dtype), drafter="none", **how), varied_requests(temperature))
        engine = make(loaded(backend, dtype), depth=BLOCK_SIZE, max_num_batched_tokens=7, **how)
        drafted = run(engine, varied_requests(temperature))
        assert {key: each.tokens for key, each in drafted.items()} == {key: each.tokens for key, each in plain.items()}
        assert engine.drafting.drafter.method == "block" and engine.stats.drafted > 20


def test_inspect_reports_the_drafter() -> None:
    report = inspect.run(InspectOptions(model=str(checkpoint_folders()[1])))
    assert report.ok and any("DSpark (Kimi-K3's, latent attention)" in line for line in report.lines)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("mla_use_qk_norm", True, "mla_use_qk_norm True"), ("is_causal", True, "causal blocks of latent attention"),
    ("q_lora_rank", None, "q_lora_rank is None"), ("target_hidden_size", 64, "its trunk's 64"),
])  # fmt: skip
def test_unsupported_drafters_are_refused(key: str, value: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        read_head(drafter_at(tmp_path / "drafter", **{key: value}))
