"""Every family of the registry against an independent implementation, on tiny random models.

The trunk: transformers, in float32. Native MTP heads: a plain torch restatement of the published formula, in float64.
A new family that transformers knows is tested with no edit here; any other one names its oracle in TRUNKS.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from native_heads import MODULES, NATIVE_HEADS, Tensors, as_deepseek
from support import ALL_FAMILIES, FAMILIES, VOCAB, family_of, make, prompt_of, request, run, tiny_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from headstart.core import Sampled, Sequence, Span
from headstart.drafters.base import Wish
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.errors import ModelError

TRUNKS = {
    "llama4": "llama4_text",
    "mimo": "qwen2", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "gemma3": "gemma3_text",
    "gemma4": "gemma4_text", "gemma3n": "gemma3n_text",
    "minicpm": "granite", "bailing_moe": "glm4_moe",
}  # fmt: skip
"""Families whose trunk is, to transformers, another family."""
UNKNOWN_TO_ORACLE: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": None, "head_dim": 6},
    "glm4_moe_lite": {"head_dim": 6},
    "longcat_flash": {"head_dim": 6},
    "minicpm": {
        "embedding_multiplier": 12, "residual_multiplier": 1.4 / 3**0.5, "logits_scaling": 48 / 16,
        "attention_multiplier": 8**-0.5,
    },
}  # fmt: skip
"""Keys that mean nothing to a family, as its oracle wants them."""

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "as many kv heads": {"num_key_value_heads": 6},
    "one kv head": {"num_key_value_heads": 1},
    "wide odd heads": {"head_dim": 22, "num_attention_heads": 3, "num_key_value_heads": 1},
    "biases": {"attention_bias": True},
    "one layer, odd sizes": {"num_hidden_layers": 1, "intermediate_size": 37, "vocab_size": 97},
    "large epsilon": {"rms_norm_eps": 0.05},
    "gelu": {"hidden_act": "gelu"},
    "gelu, tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "gelu, tanh, older name": {"hidden_act": "gelu_new"},
    "relu": {"hidden_act": "relu"},
    "squared relu": {"hidden_act": "relu2"},
    "rope linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "rope linear, older key": {"rope_scaling": {"type": "linear", "factor": 3.0}},
    "rope llama3": {"rope_scaling": LLAMA3},
    "rope yarn": {"rope_scaling": YARN},
    "rope yarn, own scale, not rounded": {"rope_scaling": {**YARN, "attention_factor": 1.3, "truncate": False}},
    "rope yarn, betas": {"rope_scaling": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}},
    "rope yarn, mscale": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "rope parameters of transformers 5": {"rope_parameters": {**LLAMA3, "rope_theta": 5000.0}, "rope_theta": None},
}
OF_KIND: dict[str, dict[str, Any]] = {
    "rope linear, older key": {},  # of the older key and of `truncate` transformers 5.23 does not know here
    "rope yarn, own scale, not rounded": {"rope_scaling": {**YARN, "attention_factor": 1.3}},
    "rope parameters of transformers 5": {
        "rope_parameters": {
            "full_attention": {**LLAMA3, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    },
}
"""Variants of families whose kinds of layers have a rope each."""
BY_KIND = ("gemma3", "gemma4")
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
SHARING = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
FIVE = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
OWN: dict[str, dict[str, dict[str, Any]]] = {
    "nemotron_h": {
        "experts of whole rows, in groups": {
            "moe_latent_size": None,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        "kinds as lists, all biases": {
            "hybrid_override_pattern": None,
            "layers_block_type": ["mamba", "mlp", "attention", "linear_attention"],
            "use_bias": True,
            "mlp_bias": True,
            "num_nextn_predict_layers": 0,
            "use_conv_bias": False,
        },
    },
    "gemma4": {
        "shared keys, wide MLPs": {"layer_types": FIVE, **SHARING},
        "shared keys, own values": {"layer_types": FIVE, **SHARING, "attention_k_eq_v": False},
        "experts": EXPERTS,
        "experts alone": {**EXPERTS, "hidden_size_per_layer_input": 0, "attention_k_eq_v": False},
        "no more than windows": {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None},
        "sizes of one layer": {"per_layer_config": {"2": {"head_dim": 10, "num_key_value_heads": 3}}},
        "another table": {"vocab_size_per_layer_input": 140, "use_bidirectional_attention": "vision"},
    },
    "deepseek_v4": {
        "wide odd heads of one key": {"head_dim": 23, "num_attention_heads": 3, "o_groups": 3, "index_head_dim": 11},
        "one layer with a window, odd sizes": {
            "num_hidden_layers": 1,
            "compress_ratios": [0, 0],
            "num_hash_layers": 0,
            "vocab_size": 97,
            "moe_intermediate_size": 37,
        },
        "kinds by ratio, three streams": {
            "compress_ratios": [128, 4, 4, 0],
            "compress_rates": None,
            "compress_rate_csa": 5,
            "hc_mult": 3,
            "hc_sinkhorn_iters": 1,
            "scoring_func": "sigmoid",
        },
        "no word on kinds": {"compress_ratios": None, "num_hash_layers": None},
    },
    "longcat_flash": {
        "one layer, odd sizes": {
            "num_hidden_layers": 2,
            "ffn_hidden_size": 37,
            "intermediate_size": None,
            "vocab_size": 97,
            "zero_expert_num": 0,
            "moe_topk": 3,
        },
    },
}
"""Variants of one family."""
NOT_OF = {
    "deepseek_v4": ("num_key_value_heads", "attention_bias", "hidden_act", "num_hidden_layers"),
    "gemma4": ("rope_scaling",),
    "mimo_v2_flash": ("rope_scaling", "rope_parameters", "num_key_value_heads"),
    "ernie4_5_moe": ("attention_bias",),
    "step3p5": ("num_key_value_heads", "num_hidden_layers", "rope_parameters", "rope linear, older key"),
}
"""Keys that a family does not have, or not at those values; variants that transformers reads otherwise."""
WHOLE = ("llama", "deepseek_v3", "qwen3_next", *BY_KIND)
"""Families with all variants. The others share what reads them, so of their ropes and activations one each will do."""
ONCE = [name for name in VARIANTS if name.startswith(("gelu, ", "relu", "squared", "rope ")) and name != "rope yarn"]
CASES = [
    (family, variant)
    for family in FAMILIES
    for variant in {**VARIANTS, **OWN.get(family, {})}
    if (family in WHOLE or variant not in ONCE)
    and not {variant, *VARIANTS.get(variant, {})} & {*NOT_OF.get(family, ())}
]
LENGTH = 90  # beyond the original context of the scaled ropes


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    """Hashable arguments for tiny_model's cache."""
    frozen = {dict: _Frozen, list: _FrozenList}
    return {key: frozen.get(type(value), lambda same: same)(value) for key, value in changes.items()}


class _Frozen(dict[str, Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items())))


class _FrozenList(list[Any]):
    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))


def oracle_of(family: str, model: Model) -> Any:
    """transformers' model with the same weights, in float32."""
    kind = TRUNKS.get(family, family)
    assert kind in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "step3p5"), f"name the trunk of {family} in TRUNKS"
    written = {key: value for key, value in model.checkpoint.config.items() if key != "model_type"}
    config = {key: value for key, value in written.items() if value is not None or key == "sliding_window"}
    config |= UNKNOWN_TO_ORACLE.get(family, {})
    if "kv_lora_rank" in config and family != "deepseek_v3":
        config["num_key_value_heads"] = config["num_attention_heads"]
    if (full := config.get("full_attn_idxs")) is not None:
        kinds = ["full_attention" if i in full else "conv" for i in range(config["num_hidden_layers"])]
        config["layer_types"] = kinds
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
    tensors = {name: torch.tensor(tensor.float32()) for name, tensor in model.checkpoint.tensors.items()}
    if family in LIKE_DEEPSEEK:
        tensors, config = as_deepseek(tensors, config)
    if kind == "step3p5":  # it has the text part inside a wrapper only
        count = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
        config |= {key: value[:count] for key, value in config.items() if key in PER_LAYER and isinstance(value, list)}
        oracle: Any = StepText(AutoConfig.for_model(kind, **config))
    else:
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), **plainly)
    for old, new in {"attention_sink_bias": "sinks", "mlp.moe_statics.": "mlp.gate.moe_statics."}.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    if kind == "hy_v3":
        tensors = {renamed(name, {r"gate\.e_score": "e_score"}): tensor for name, tensor in tensors.items()}
    if kind == "deepseek_v4":
        tensors = {renamed(name, V4): tensor for name, tensor in tensors.items()}
    named = fused_experts(stepwise(tensors) if kind == "step3p5" else tensors)
    for name in [name for name in named if name.endswith(".gate_up_proj") and config.get("zero_expert_num")]:
        nothing = named[name].new_zeros(config["zero_expert_num"], *named[name].shape[1:])
        named[name] = torch.cat((named[name], nothing))  # which it makes and does not read
    missing, unexpected = oracle.load_state_dict(named, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.config.tied else set())
    trailing = tuple(f"model.layers.{model.config.num_layers + i}." for i in range(model.config.num_mtp))
    assert all("mtp" in name or name.startswith(trailing) for name in unexpected), unexpected
    oracle.tie_weights()
    if "lm_head.weight" in missing:  # a class that ties nothing
        oracle.lm_head.weight.data.copy_(oracle.get_input_embeddings().weight)
    return oracle.eval()


def behind(output: Any) -> dict[str, Any]:
    """What the next pass of an oracle goes on from, by the name that transformers has for it: `cache` since 5.24."""
    name = "cache" if hasattr(output, "cache") else "past_key_values"
    return {name: getattr(output, name), "use_cache": True}


LIKE_DEEPSEEK = ("bailing_moe", "exaone_moe", "hy_v3")
"""Families whose files have other names for DeepSeek's experts."""
PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors")


class StepText(torch.nn.Module):
    """Step-3.7's text part with an LM head."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Step3p7TextModel._from_config(config, attn_implementation="eager", experts_implementation="eager")
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tie_weights(self) -> None:
        """Nothing."""

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def forward(self, tokens: Tensor, **more: Any) -> CausalLMOutputWithPast:
        out = self.model(tokens, **more)
        return CausalLMOutputWithPast(logits=self.lm_head(out.last_hidden_state), past_key_values=out.past_key_values)


def stepwise(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Step-3.5's names in files -> those that transformers has inside."""
    found = {}
    for theirs, tensor in tensors.items():
        name = theirs.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias").replace(
            ".moe.gate.", ".mlp.gate."
        )
        name = name.replace(".share_expert.", ".mlp.shared_experts.")
        if match := re.fullmatch(r"(.*)\.moe\.(gate|down)_proj\.weight", name):
            up = [tensors[f"{match[1]}.moe.up_proj.weight"]] if match[2] == "gate" else []
            part = "gate_up" if up else "down"
            found[f"{match[1]}.mlp.experts.{part}_proj"] = torch.cat((tensor, *up), dim=1)
        elif ".moe.up_proj" not in name:
            found[name] = tensor
    return found


MIXTRAL = {"block_sparse_moe.": "mlp.", ".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
"""Its names in files -> those of newer families, which transformers has inside."""


V4 = {
    r"\.attn\.": ".self_attn.", r"\.ffn\.": ".mlp.", r"\.indexer\.compressor\.": ".compressor.indexer.",
    r"^embed\.": "embed_tokens.", r"^head\.": "lm_head.", r"^hc_head_": "hc_head.hc_",
    r"\.attn_norm\.": ".input_layernorm.",
    r"\.ffn_norm\.": ".post_attention_layernorm.", r"\.hc_(attn|ffn)_": r".\1_hc.", r"\.attn_sink": ".sinks",
    r"\.indexer\.weights_proj\.": ".compressor.indexer.scorer.weights_proj.",
    r"\.indexer\.wq_b\.": ".compressor.indexer.q_b_proj.", r"\.norm\.": ".kv_norm.", r"\.ape": ".position_bias",
    r"\.wq_(.)\.": r".q_\1_proj.", r"\.wkv\.": ".kv_proj.", r"\.wgate\.": ".gate_proj.", r"\.wo_(.)\.": r".o_\1_proj.",
    r"\.q_norm\.": ".q_a_norm.", r"\.gate\.bias": ".gate.e_score_correction_bias", r"\.w1\.": ".gate_proj.",
    r"\.w2\.": ".down_proj.", r"\.w3\.": ".up_proj.", r"^(?!lm_head|mtp)": "model.",
}  # fmt: skip
"""DeepSeek's own names -> transformers' (its conversion_mapping.py)."""


def renamed(name: str, table: dict[str, str]) -> str:
    for old, new in table.items():
        name = re.sub(old, new, name)
    return name


GRANITE = {
    ".input_linear.weight": ".experts.gate_up_proj", ".output_linear.weight": ".experts.down_proj",
    ".router.layer.": ".router.",
}  # fmt: skip
GRANITE = {f".block_sparse_moe{old}": f".block_sparse_moe{new}" for old, new in GRANITE.items()}
"""Those of Granite's experts."""


def fused_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one -> transformers' stacks [E, gate and up, H] and [E, H, I] of each layer."""
    found, stacks = {}, {}
    for theirs, tensor in tensors.items():
        name = re.sub(r"^backbone\.", "model.", theirs)
        table = GRANITE if any(old in name for old in GRANITE) else MIXTRAL
        for old, new in table.items() if ".experts." in name or ".block_sparse_moe." in name else ():
            name = name.replace(old, new)
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            stacks.setdefault(match[1], {})[match[3], int(match[2])] = tensor
        else:
            found[name] = tensor
    for prefix, parts in stacks.items():
        count, gated = len({e for _, e in parts}), ("gate", 0) in parts
        ups = [torch.cat((parts["gate", e], parts["up", e])) if gated else parts["up", e] for e in range(count)]
        found[f"{prefix}.{'gate_up' if gated else 'up'}_proj"] = torch.stack(ups)
        found[f"{prefix}.down_proj"] = torch.stack([parts["down", e] for e in range(count)])
    return found


def new_sequence(engine: Engine, tokens: Seq[int], known: int | None = None) -> Sequence:
    """A sequence with blocks for all its tokens (and a draft), of which `known` are committed."""
    sequence = Sequence(request(tokens[:1]), 0, list(tokens[:known]), 0)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    return sequence


def logits_in_chunks(engine: Engine, tokens: Seq[int], first: int, chunk: int) -> Tensor:
    """Logits [T, V] of all positions: of the first few at once, then chunk by chunk."""
    sequence, start, pieces = new_sequence(engine, tokens), 0, []
    while start < len(tokens):
        length = min(chunk if start else first, len(tokens) - start)
        pieces.append(engine.runner.forward([Span(sequence, start, length, length)]).logits)
        start += length
    engine.memory.release(sequence)
    return torch.cat(pieces)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_are_those_of_transformers(family: str, variant: str) -> None:
    known = {**VARIANTS, **(OF_KIND if family in BY_KIND else {}), **OWN.get(family, {})}
    changes = known[variant]
    changes = changes | ({"mlp_bias": True} if (family, variant) == ("llama", "biases") else {})
    model = tiny_model(family, dtype="float32", **changed(changes))
    tokens = [token % model.config.vocab_size for token in prompt_of(LENGTH, 5)]
    with torch.inference_mode():
        expected = oracle_of(family, model)(torch.tensor([tokens]), use_cache=False).logits[0]
    assert expected.std() > 0.3, "logits too small for the tolerance to mean anything"
    engine = make(model, dtype="float32", drafter="none")
    for first, chunk in ((LENGTH, 1), (7, 7), (1, 1), (50, 1))[: None if variant == "as it is" else 2]:
        found = logits_in_chunks(engine, tokens, first, chunk)
        assert float((found - expected).abs().max()) <= 2e-4, (first, chunk)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_company(family: str) -> None:
    """One pass with prefill, a chunk and single rows of several sequences gives each its own logits."""
    model = tiny_model(family, dtype="float32")
    engine = make(model, dtype="float32", drafter="none", max_model_len=512, kv_blocks=200)
    # spans and contexts on both sides of where the reference backend parts its groups
    lengths = ((60, 0), (33, 12), (9, 8), (300, 290), (129, 128), (257, 200), (128, 124))
    oracle, parts = oracle_of(family, model), [(prompt_of(length, length), start) for length, start in lengths]
    spans, expected = [], []
    for tokens, start in parts:
        sequence = new_sequence(engine, tokens)
        if start:
            engine.runner.forward([Span(sequence, 0, start, 0)])
        spans.append(Span(sequence, start, len(tokens) - start, 2 if start < 8 else 1))
        with torch.inference_mode():
            expected.append(oracle(torch.tensor([tokens])).logits[0, -spans[-1].num_sample :])
    found = engine.runner.forward(spans).logits
    assert float((found - torch.cat(expected)).abs().max()) <= 2e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_transformers(family: str) -> None:
    model = tiny_model(family, dtype="float32")
    prompt = prompt_of(12, 8)
    oracle, expected = oracle_of(family, model), list(prompt)
    with torch.inference_mode():
        output = oracle(torch.tensor([prompt]), use_cache=True)
        for _ in range(LENGTH):
            expected.append(int(output.logits[0, -1].argmax()))
            output = oracle(torch.tensor([expected[-1:]]), **behind(output))
    engine = make(model, dtype="float32", drafter="auto", depth=3, max_model_len=256)
    found = run(engine, [request(prompt, max_tokens=LENGTH, stops=())])
    assert found["r", 0].tokens == expected[len(prompt) :]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_arithmetic_is_near(family: str) -> None:
    # rounding decides at the edge of what an indexer chooses: that edge should not be half of what a row sees
    changes = {"index_topk": 70} if "index_topk" in family_of(family).small else {}
    model, tokens = tiny_model(family, dtype="bfloat16", **changes), prompt_of(LENGTH, 5)
    with torch.inference_mode():
        expected = oracle_of(family, model)(torch.tensor([tokens]), use_cache=False).logits[0]
    engine = make(model, dtype="bfloat16", drafter="auto", depth=3)
    found = logits_in_chunks(engine, tokens, 7, 7)
    assert float((found.float() - expected.float()).abs().mean()) <= 0.1 * float(expected.float().std())
    prompt = prompt_of(12, 8)
    assert len(run(engine, [request(prompt, max_tokens=20, stops=())])["r", 0].tokens) == 20


@pytest.mark.parametrize("layers", [2, 3])  # one layer has the window; none has it
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_of_the_last_layers(family: str, layers: int) -> None:
    changes = {"use_sliding_window": True, "sliding_window": 9}
    model = tiny_model(family, dtype="float32", **changes, max_window_layers=layers)
    tokens = prompt_of(LENGTH, 5)
    with torch.inference_mode():
        expected = oracle_of(family, model)(torch.tensor([tokens]), use_cache=False).logits[0]
    found = logits_in_chunks(make(model, dtype="float32", drafter="none"), tokens, LENGTH, 1)
    assert float((found - expected).abs().max()) <= 2e-4


def test_unknown_rope_is_refused() -> None:
    with pytest.raises(ModelError, match="rope scaling type 'spiral'"):
        tiny_model(FAMILIES[0], **changed({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}))


# Native MTP heads, by hand: see native_heads.


@cache
def native(family: str) -> tuple[Model, Tensors]:
    model = tiny_model(family, num_hidden_layers=2)
    tensors = {name: torch.tensor(tensor.float32()).double() for name, tensor in model.checkpoint.tensors.items()}
    return model, tensors


def expected_draft_logits(family: str, tokens: Seq[int], length: int, depth: int) -> list[Tensor]:
    """Draft logits [V] of steps 1 .. depth after `length` tokens, each step fed the true token."""
    model, tensors = native(family)
    trunk, head = NATIVE_HEADS[family]
    config, order = model.checkpoint.config, MODULES.get(family, (0,) * depth)
    hidden = trunk(tensors, config, torch.tensor(tokens[: length - 1]))
    drafted: list[tuple[list[Tensor], list[int]]] = [
        ([], []) for _ in range(max(order) + 1)
    ]  # rows behind the true pairs
    logits: list[Tensor] = []
    recycled = hidden
    for step in range(depth):
        module = order[step]
        rows, ids = drafted[module]
        if step:
            rows.append(recycled[-1:])
            ids.append(tokens[length + step - 1])
        seen = torch.tensor([*tokens[1:length], *ids])
        output, recycled = head(tensors, config, torch.cat((hidden, *rows)), seen, *([module] if max(order) else []))
        logits.append(output[-1])
    return logits


class Forced:
    """Stands in for Runner.draw: keeps the logits, draws the true tokens."""

    def __init__(self, truth: Seq[int]) -> None:
        self.truth = truth
        self.seen: dict[tuple[int, int], Tensor] = {}  # (length, draft step) -> logits

    def __call__(self, logits: Tensor, entries: Any, token_ids: Any = None, *, scored: bool = False) -> Sampled:
        for row, (sequence, position, prefix) in zip(logits, entries, strict=True):
            assert position == len(sequence.tokens) + len(prefix)
            self.seen[len(sequence.tokens), len(prefix)] = row
        return Sampled(np.array([self.truth[position] for _, position, _ in entries]), [None] * len(entries))


def test_every_native_head_has_its_formula_here() -> None:
    assert {name for name in ALL_FAMILIES if family_of(name).head} == set(NATIVE_HEADS)


@pytest.mark.slow
@pytest.mark.parametrize("family", NATIVE_HEADS)
def test_draft_logits_of_a_growing_sequence(family: str) -> None:
    """Teacher-forced drafts at every length; each round catches up what the last one added."""
    model, _ = native(family)
    tokens = prompt_of(30, 3)
    engine = make(model, drafter="mtp", depth=3)
    engine.runner.draw = forced = Forced(tokens)  # type: ignore[method-assign, assignment]
    sequence = new_sequence(engine, tokens, 2)
    for length in range(2, len(tokens) - 3):
        if length % 5 == 0:
            continue  # two tokens at once, as after an accepted draft
        sequence.tokens = list(tokens[:length])
        engine.runner.forward([Span(sequence, sequence.num_computed, length - 1 - sequence.num_computed, 0)])
        sequence.num_computed = length - 1
        engine.drafting.drafter.propose([Wish(sequence, 3)])
        assert sequence.draft.tokens == tokens[length : length + 3]
        for step, expected in enumerate(expected_draft_logits(family, tokens, length, 3)):
            torch.testing.assert_close(
                forced.seen[length, step], expected, rtol=1e-6, atol=1e-7
            )  # norms of 1 + w are rounded to float32


@pytest.mark.slow
@pytest.mark.parametrize("budget", [17, 512])
@pytest.mark.parametrize("family", [name for name in NATIVE_HEADS if name in FAMILIES])
def test_draft_logits_of_a_ragged_batch(family: str, budget: int) -> None:
    """Sequences of many lengths and depths in one round, long ones caught up in chunks."""
    model, _ = native(family)
    tokens = prompt_of(50, 4)
    engine = make(model, drafter="mtp", depth=3, max_num_batched_tokens=budget)
    engine.runner.draw = forced = Forced(tokens)  # type: ignore[method-assign, assignment]
    wishes = []
    for length, depth in ((2, 3), (3, 1), (17, 2), (18, 3), (19, 4), (44, 2)):
        sequence = new_sequence(engine, tokens, length)
        engine.runner.forward([Span(sequence, 0, length - 1, 0)])
        sequence.num_computed = length - 1
        wishes.append(Wish(sequence, depth))
    engine.drafting.drafter.propose(wishes)
    assert len(forced.seen) == sum(wish.depth for wish in wishes)
    for sequence, depth in [(wish.sequence, wish.depth) for wish in wishes]:
        length = len(sequence.tokens)
        assert sequence.filled[0] == length
        for step, expected in enumerate(expected_draft_logits(family, tokens, length, depth)):
            torch.testing.assert_close(
                forced.seen[length, step], expected, rtol=1e-6, atol=1e-7
            )  # norms of 1 + w are rounded to float32


def test_vocabulary_of_the_tests() -> None:
    assert all(family_of(name).tiny()[0]["vocab_size"] == VOCAB for name in FAMILIES)
