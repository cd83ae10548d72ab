"""Oracles: transformers' classes with a tiny model's weights, for trunks and for MTP modules as models of one layer."""

import re
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from typing import Any
from unittest import mock

import torch
from family_rows import MTPModule, row_of
from readings import READINGS
from support import tiny_model
from torch import Tensor
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
from transformers.models.muse_glimmer.modeling_muse_glimmer import MuseGlimmerTextModel
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

from headstart.engine.load import Model

Tensors = dict[str, Tensor]
Config = dict[str, Any]


@contextmanager
def double_precision() -> Iterator[None]:
    """Makes transformers compute norms, softmax and ropes in float64 where it converts to float32."""
    before = torch.get_default_dtype()
    with (
        mock.patch.multiple(torch, float32=torch.float64, float=torch.float64),
        mock.patch.object(Tensor, "float", Tensor.double),
    ):
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def config_and_tensors(family: str, model: Model) -> tuple[Config, Tensors]:
    """Config and tensors of the model's checkpoint; DeepSeek's names for families that share its experts."""
    config = {key: value for key, value in model.checkpoint.config.items() if key != "model_type"}
    config = {key: value for key, value in config.items() if value is not None or key == "sliding_window"}
    config |= row_of(family).oracle_config
    if "kv_lora_rank" in config and family != "deepseek_v3":
        config["num_key_value_heads"] = config["num_attention_heads"]
    if family == "minimax_m3":
        config["moe_layer_freq"] = config["moe_layer_freq"][: config["num_hidden_layers"]]
        flags = config["sparse_attention_config"]["sparse_attention_freq"][: config["num_hidden_layers"]]
        config["layer_types"] = ["minimax_m3_sparse" if each else "full_attention" for each in flags]
    if family != "step3p5" and isinstance(kinds := config.get("layer_types"), list):  # modules have layer types as well
        config["layer_types"] = kinds[: config["num_hidden_layers"]]
    if (full := config.get("full_attn_idxs")) is not None:
        kinds = ["full_attention" if i in full else "conv" for i in range(config["num_hidden_layers"])]
        config["layer_types"] = kinds
    tensors = {name: torch.tensor(tensor.float32()) for name, tensor in model.checkpoint.tensors.items()}
    if row_of(family).has_deepseek_names:
        tensors, config = as_deepseek(tensors, config)
    return config, tensors


def build_oracle(family: str, config: Config, tensors: Tensors) -> tuple[Any, set[str], set[str]]:
    """Transformers' model, and the names of missing and of unexpected tensors."""
    kind = row_of(family).trunk or family
    if kind in READINGS:
        return _filled(READINGS[kind](config), tensors)
    assert kind in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TEXT_PARTS), f"name the trunk of {family} in family_rows.py"
    if kind in TEXT_PARTS:  # only the text part inside a wrapper exists
        count = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
        config |= {key: value[:count] for key, value in config.items() if key in PER_LAYER and isinstance(value, list)}
        oracle: Any = TextPart(TEXT_PARTS[kind], AutoConfig.for_model(kind, **config))
    else:
        plainly = {"attn_implementation": "eager", "experts_implementation": "eager"}
        oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), **plainly)
    for old, new in {"attention_sink_bias": "sinks", "mlp.moe_statics.": "mlp.gate.moe_statics."}.items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    named = fused_experts(INSIDE[kind](tensors) if kind in INSIDE else tensors)
    for name in [name for name in named if name.endswith(".gate_up_proj") and config.get("zero_expert_num")]:
        nothing = named[name].new_zeros(config["zero_expert_num"], *named[name].shape[1:])
        named[name] = torch.cat((named[name], nothing))  # created, but never read
    return _filled(oracle, named)


def _filled(oracle: Any, named: Tensors) -> tuple[Any, set[str], set[str]]:
    missing, unexpected = oracle.load_state_dict(named, strict=False)
    oracle.tie_weights()
    if "lm_head.weight" in missing:  # for classes without tied tensors
        oracle.lm_head.weight.data.copy_(oracle.get_input_embeddings().weight)
    computed = {name for name, _ in oracle.named_buffers()}  # factors and sizes of hashes, from the config
    return oracle.eval(), set(missing) - computed, set(unexpected)


def oracle_of(family: str, model: Model) -> Any:
    """Transformers' model with the same weights, in float32."""
    oracle, missing, unexpected = build_oracle(family, *config_and_tensors(family, model))
    assert missing <= ({"lm_head.weight"} if model.config.tied else set())
    trailing = tuple(f"model.layers.{model.config.num_layers + i}." for i in range(model.config.num_mtp))
    assert all("mtp" in name or name.startswith(trailing) for name in unexpected), unexpected
    return oracle


@torch.inference_mode()
def logits_of_oracle(oracle: Any, tokens: Seq[int]) -> Tensor:
    """Logits [T, V] of one pass."""
    logits: Tensor = oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def assert_greedy_text(oracle: Any, prompt: Seq[int], found: Seq[int]) -> None:
    """Each token is the first choice after the tokens before it, computed in one pass."""
    logits = logits_of_oracle(oracle, [*prompt, *found[:-1]])
    assert list(found) == logits[len(prompt) - 1 :].argmax(-1).tolist()


class SingleStream(torch.nn.Module):
    """Hyper-connections of one stream, which have no effect. `mixed`: with a mixing matrix."""

    def __init__(self, *, mixed: bool) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, streams: Tensor) -> tuple[Tensor, ...]:
        one = torch.ones_like(streams[..., :1])
        return one[..., 0], *([one] if self.mixed else []), streams[:, :, 0]


class OnlyStream(torch.nn.Module):
    """The final sum of one stream."""

    def forward(self, streams: Tensor) -> Tensor:
        return streams[:, :, 0]


class MTPOracle:
    """Draft logits of a family's MTP modules over whole sequences, in float64."""

    def __init__(self, family: str, mtp: MTPModule | None = None, **changes: Any) -> None:
        self.model = tiny_model(family, num_hidden_layers=2, **changes)
        self.family, self.mtp = family, mtp or row_of(family).mtp
        assert self.mtp
        self.config, self.tensors = config_and_tensors(family, self.model)
        with double_precision():
            self.trunk = oracle_of(family, self.model)
            self.modules = [self._build_module(i) for i in range(self.model.config.num_mtp)]

    def name(self, part: str, module: int) -> str:
        """Name of a tensor: `{i}` is the module, `{last}` its layer after the trunk's, `{block}` the block's prefix."""
        places = {"i": module, "last": self.config["num_hidden_layers"] + module}
        return part.format(**places, block=self.mtp.block.format(**places))

    def _build_module(self, module: int) -> Any:
        """A model of one layer: the module's block, its final norm and LM head."""
        mtp = self.mtp
        config = {**self.config, "num_hidden_layers": 1, "num_nextn_predict_layers": 0, **mtp.config}
        block, last = self.name("{block}", module), self.config["num_hidden_layers"] + module
        config |= {key: config[key][last : last + 1] for key in PER_LAYER if self.family == "step3p5"}
        tensors = {name: t for name, t in self.tensors.items() if "layers." not in name and "mtp" not in name}
        for name, tensor in self.tensors.items():
            if name.startswith(block):
                tensors[renamed(mtp.layer + name.removeprefix(block), dict(mtp.names))] = tensor
        if mtp.norm:
            (norm,) = [name for name in tensors if re.fullmatch(r"(\w+\.|model\.llm\.)?norm(_f)?\.weight", name)]
            tensors[norm] = self.tensors[self.name(mtp.norm, module) + ".weight"]
        for name in [name for name in self.tensors if mtp.mixer and name.startswith(mtp.mixer)]:
            tensors[name.replace(mtp.mixer, "model.hyper_connection_mixer.")] = self.tensors[name]
        if mtp.lm_head:
            tensors["lm_head.weight"] = self.tensors[self.name(mtp.lm_head, module) + ".weight"]
        if mtp.single_stream:
            tensors = {name: tensor for name, tensor in tensors.items() if "hc_head" not in name}
        oracle, missing, _ = build_oracle(self.family, config, tensors)
        if mtp.single_stream:
            missing -= {name for name in missing if "hc" in name}
            mixed = self.model.config.streams.mixed
            oracle.model.layers[0].attn_hc = oracle.model.layers[0].ffn_hc = SingleStream(mixed=mixed)
            oracle.model.hc_head = OnlyStream()
        for name, parameter in oracle.named_parameters():
            if name in missing and name != "lm_head.weight":
                assert mtp.zeros_missing, name
                torch.nn.init.zeros_(parameter)
        return oracle

    def trunk_states(self, tokens: Seq[int]) -> Tensor:
        """Hidden states [T, ...] that the module reads."""
        _, block, normed = passed(self.trunk, tokens)
        return normed if self.mtp.reads_normed else block

    @torch.no_grad()
    @double_precision()
    def forward(self, hidden: Tensor, tokens: Seq[int], module: int = 0) -> tuple[Tensor, Tensor]:
        """States [P, ...] and the tokens after them -> draft logits [P, V] and recycled states [P, ...]."""
        mtp, oracle = self.mtp, self.modules[module]
        if mtp.mixer:
            return self._in_streams(oracle, hidden, tokens)
        embedded = oracle.get_input_embeddings().weight[list(tokens)].clone()
        if mtp.masks_first:
            embedded[0] = 0
        embedded = embedded.view(len(tokens), *[1] * (hidden.dim() - 2), -1).expand_as(hidden)
        norm, parts = deepcopy(final_norm(oracle)), []
        if mtp.trunk_norm:
            norm.weight.data = self.tensors[f"{mtp.trunk_norm}.weight"].double()
            embedded = norm(embedded)
        for x, part in ((embedded, mtp.embedding_norm), (hidden, mtp.hidden_norm)):
            norm.weight.data = self.tensors[self.name(part, module) + ".weight"].double()
            parts.append(norm(x))
        weights = [self.tensors[self.name(part, module) + ".weight"].double() for part in mtp.projections]
        x = linear(torch.cat(parts[::-1] if mtp.hidden_first else parts, -1), torch.cat(weights, -1))
        _, block, normed = passed(oracle, tokens, x)
        found = normed if mtp.norm else block
        logits = self.model.config.logit_scale * linear(found, oracle.lm_head.weight)
        return logits, found if mtp.recycles_normed else block

    def _in_streams(self, oracle: Any, hidden: Tensor, tokens: Seq[int]) -> tuple[Tensor, Tensor]:
        """`forward` of a module with a projection of the embedding and one of each stream (Qwen3.8-Flash-Next)."""
        norm, parts = deepcopy(oracle.model.layers[0].self_attn.q_norm), []
        embedded = oracle.get_input_embeddings().weight[list(tokens)]
        names = (self.mtp.embedding_norm, self.mtp.hidden_norm)
        for x, part, projection in zip((embedded, hidden), names, self.mtp.projections, strict=True):
            norm.weight.data = self.tensors[f"{part}.weight"].double()
            streams = norm(x).unflatten(-1, (-1, embedded.shape[-1]))
            parts.append(linear(streams, self.tensors[f"{projection}.weight"].double()))
        _, block, normed = passed(oracle, tokens, (parts[0] + parts[1]).flatten(-2))
        return linear(normed, oracle.lm_head.weight), block


def final_norm(oracle: Any) -> Any:
    if hasattr(oracle.model, "hyper_connection_mixer"):  # the LM head reads its output
        return oracle.model.hyper_connection_mixer
    return oracle.model.norm_f if hasattr(oracle.model, "norm_f") else oracle.model.norm


def passed(oracle: Any, tokens: Seq[int], states: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [T, V], and the states after the last layer and after the final norm; `states` replace the first layer's
    input."""
    found: list[Tensor] = []

    def replace(layer: Any, args: Any, kwargs: Any) -> Any:
        if states is None:
            return None
        rows = states[None, :, None] if isinstance(getattr(layer, "attn_hc", None), SingleStream) else states[None]
        return ((rows, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": rows})

    def keep(layer: Any, args: Any, output: Any) -> None:
        found.append((output[0] if isinstance(output, tuple) else output)[0])

    layers = oracle.model.layers
    hooks = [
        layers[0].register_forward_pre_hook(replace, with_kwargs=True),
        layers[-1].register_forward_hook(keep),
        final_norm(oracle).register_forward_hook(keep),
    ]
    with torch.no_grad(), double_precision():
        logits = oracle(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, *found


@cache
def mtp_oracle(family: str) -> MTPOracle:
    return MTPOracle(family)


PER_LAYER = ("layer_types", "rope_theta", "partial_rotary_factors")


TEXT_PARTS: dict[str, Any] = {
    "step3p5": Step3p7TextModel, "glm5_next_text": Glm5NextTextModel, "muse_glimmer_text": MuseGlimmerTextModel,
}  # fmt: skip


class TextPart(torch.nn.Module):
    """The text part of a multimodal model with an LM head."""

    def __init__(self, kind: Any, config: Any) -> None:
        super().__init__()
        self.model = kind._from_config(config, attn_implementation="eager", experts_implementation="eager")
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def tie_weights(self) -> None:
        """Transformers' interface; no tensors are tied."""

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def forward(self, tokens: Tensor, **more: Any) -> CausalLMOutputWithPast:
        out = self.model(tokens, **more)
        cache = out.cache if hasattr(out, "cache") else out.past_key_values
        logits, config = self.lm_head(out.last_hidden_state), self.model.config
        if (multiplier := getattr(config, "output_multiplier", None)) is not None:  # of Muse-Glimmer's wrapper
            cap = config.final_logit_softcapping
            logits = cap * torch.tanh(logits * multiplier / cap)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


def step_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of Step-3.5 in files -> names inside transformers."""
    found = {}
    for theirs, tensor in tensors.items():
        name = theirs.replace(".moe.router_bias", ".mlp.gate.e_score_correction_bias")
        name = name.replace(".moe.gate.", ".mlp.gate.").replace(".share_expert.", ".mlp.shared_experts.")
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


HY4 = {
    r"\.hc_(attn|mlp)_layer\.hc_pre\.hc_": r".\1_hc.", r"\.mlp_hc\.": ".ffn_hc.", r"hc_head\.hc_head_": "hc_head.hc_",
    r"\.learnable_sink_param": ".sinks", r"\.linear_gate\.": ".gate_proj.",
}  # fmt: skip
"""HY-V4's names -> transformers'."""
M3 = {
    r"\.block_sparse_moe\.e_score": ".mlp.gate.e_score", r"\.block_sparse_moe\.": ".mlp.",
    r"\.self_attn\.index_": ".self_attn.indexer."}  # fmt: skip
"""MiniMax-M3's names -> transformers'."""


INKLING = {
    r"^model\.llm\.embed_norm\.": "model.embed_tokens.embed_norm.", r"^model\.llm\.embed\.": "model.embed_tokens.",
    r"^model\.llm\.unembed\.": "lm_head.", r"^model\.llm\.": "model.", r"\.attn\.w(.)_d.\.": r".self_attn.\1_proj.",
    r"\.attn\.wo_ud\.": ".self_attn.o_proj.", r"\.attn\.": ".self_attn.", r"_sconv\.weight": "_sconv.conv1d.weight",
    r"\.mlp_norm\.": ".post_attention_layernorm.", r"\.attn_norm\.": ".input_layernorm.",
    r"\.mlp\.gate\.bias": ".mlp.gate.e_score_correction_bias", r"\.(?:shared_)?w2_weight": ".down_proj",
    r"\.w2_md\.weight": ".down_proj.weight",
}  # fmt: skip
"""Inkling's names -> transformers' (its conversion_mapping.py)."""


def inkling_names(tensors: Tensors) -> Tensors:
    """Renamed tensors of Inkling, with the interleaved rows of gate and up projections separated."""
    found: Tensors = {}
    for theirs, tensor in tensors.items():
        name = renamed(theirs, INKLING)
        if (match := re.fullmatch(r"(.+)\.(shared_)?w13_(?:dn\.)?weight", name)) is None:
            found[name] = tensor
            continue
        gate, up = tensor.unflatten(-2, (-1, 2)).unbind(-2)
        if match[1].endswith(".experts"):
            found[f"{match[1]}.gate_up_proj"] = torch.cat((gate, up), 1)
        else:
            end = "" if match[2] else ".weight"
            found |= {f"{match[1]}.gate_proj{end}": gate, f"{match[1]}.up_proj{end}": up}
    return found


def joined_gates(tensors: Tensors) -> Tensors:
    """Gate and up projections of dense layers and shared experts joined in one matrix."""
    found = dict(tensors)
    for name in [name for name in tensors if re.search(r"(mlp|shared_experts)\.gate_proj\.weight$", name)]:
        parts = [found.pop(name.replace("gate_proj", f"{part}_proj")) for part in ("gate", "up")]
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat(parts)
    return found


KDA = {
    r"\.attention\.": ".self_attn.", r"\.self_attn\.(f_\w*proj|dt_bias|A_log)": r".self_attn.forget_gate.\1",
    r"\.word_embeddings\.": ".embed_tokens.", r"\.self_attn\.dense\.": ".self_attn.o_proj.",
    r"\.hc_(attn|ffn)_": r".\1_hc.",
    r"\.mlp\.gate\.expert_bias": ".mlp.gate.e_score_correction_bias", r"\.block_sparse_moe\.": ".mlp.",
    r"\.w1\.": ".gate_proj.", r"\.w2\.": ".down_proj.", r"\.w3\.": ".up_proj.",
}  # fmt: skip
"""Names of Kimi-Linear, Ling 3 and GLM-5.3 -> transformers' (its conversion_mapping.py)."""


def delta_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The three convolutions of Kimi delta attention joined in one tensor."""
    found = {renamed(name, KDA): tensor for name, tensor in tensors.items()}
    for name in [name for name in found if name.endswith(".q_conv1d.weight")]:
        parts = [found.pop(name.replace("q_conv1d", f"{part}_conv1d")) for part in "qkv"]
        found[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return found


def all_renamed(tensors: Tensors, table: dict[str, str]) -> Tensors:
    return {renamed(name, table): tensor for name, tensor in tensors.items()}


INSIDE: dict[str, Callable[[Tensors], Tensors]] = {
    "hy_v3": lambda tensors: all_renamed(tensors, {r"gate\.e_score": "e_score"}),
    "deepseek_v4": lambda tensors: all_renamed(tensors, V4),
    "hy_v4": lambda tensors: all_renamed(tensors, HY4),
    "minimax_m3_vl_text": lambda tensors: joined_gates(all_renamed(tensors, M3)),
    "step3p5": step_names,
    "inkling_text": inkling_names,
    **dict.fromkeys(("kimi_linear", "bailing_hybrid", "glm5_next_text"), delta_names),
}
"""transformers' model type -> the tensors of files under the names that it has inside."""
GRANITE = {f".block_sparse_moe{old}": f".block_sparse_moe{new}" for old, new in {
    ".input_linear.weight": ".experts.gate_up_proj", ".output_linear.weight": ".experts.down_proj",
    ".router.layer.": ".router."}.items()}  # fmt: skip
"""Those of Granite's experts."""


def fused_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Single experts joined to transformers' stacks [E, gate and up, H] and [E, H, I] of each layer."""
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


AS_DEEPSEEK = {
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias", "mlp.router.gate.": "mlp.gate.",
    "mlp.shared_mlp.": "mlp.shared_experts.", "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias", "final_layernorm": "shared_head.norm",
    "word_embeddings.": "embed_tokens.", ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_layernorm": ".self_attn.q_norm", ".attention.key_layernorm": ".self_attn.k_norm",
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
"""Names of tensors (parts of them) and keys of families with DeepSeek's experts -> DeepSeek's."""


def as_deepseek(tensors: Tensors, c: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Tensors under DeepSeek's names, with separate q, k and v."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in AS_DEEPSEEK.items():
            name = name if new in name else name.replace(old, new)
        if ".query_key_value." in name:
            heads = [c[key] * c["head_dim"] for key in ("num_attention_heads", *["num_key_value_heads"] * 2)]
            for part, rows in zip("qkv", tensor.split(heads), strict=True):
                found[name.replace("attention.query_key_value", f"self_attn.{part}_proj")] = rows
        else:
            found[name] = tensor
    return found, {"n_group": 1, "topk_group": 1, **c} | {AS_DEEPSEEK.get(key, key): value for key, value in c.items()}
