"""Tiny models as GGUF files with the names, tensor orders and keys of llama.cpp b11434's converter."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from headstart.models.small import Arrays

Config = dict[str, Any]
ARCH = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe",
    "deepseek_v3": "deepseek2", "qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "smollm3": "smollm3", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "lfm2": "lfm2", "lfm2_moe": "lfm2moe",
    "gpt_oss": "gpt-oss", "qwen2_5_vl_text": "qwen2vl", "qwen3_vl_text": "qwen3vl",
}  # fmt: skip
"""model_type -> llama.cpp's architecture."""
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
PERMUTED = ("llama", "smollm3")
GEMMA = ("gemma3_text", "gemma4_text")
TOP = {
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "mtp.fc": "nextn.eh_proj",
    "mtp.pre_fc_norm_embedding": "nextn.enorm", "mtp.pre_fc_norm_hidden": "nextn.hnorm",
    "mtp.norm": "nextn.shared_head_norm", "model.embedding_norm": "token_embd_norm",
}  # fmt: skip
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm", "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
}  # fmt: skip
SHARED = ("shared_expert", "shared_experts")
NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "input_layernorm": "attn_norm", "self_attn.o_proj": "attn_output", "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp", "self_attn.sinks": "attn_sinks.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias", "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "shared_head.norm": "nextn.shared_head_norm",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp", "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_ba": "ssm_ba", "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out", "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a",
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", 
    **{f"feed_forward.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")}, "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.expert_bias": "exp_probs_b.bias",
    "self_attn.out_proj": "attn_output", **{f"self_attn.{n}_layernorm": f"attn_{n}_norm" for n in "qk"},
    **{f"conv.{n}": f"shortconv.{n}" for n in ("conv", "in_proj", "out_proj")},
    **{f"self_attn.{n}_proj": f"attn_{n}" for n in "qkv"}, **{f"self_attn.{n}_norm": f"attn_{n}_norm" for n in "qk"},
    **{f"mlp.{n}_proj": f"ffn_{n}" for n in ("gate", "up", "down")},
    **{f"mlp.{s}.{n}_proj": f"ffn_{n}_shexp" for n in ("gate", "up", "down") for s in SHARED},
}  # fmt: skip
SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads", "key_length": "head_dim", "value_length": "head_dim",
    "layer_norm_rms_eps": "rms_norm_eps", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor", "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group", "leading_dense_block_count": "first_k_dense_replace",
    "ssm_conv_kernel": "linear_conv_kernel_dim", "ssm_state_size": "linear_key_head_dim",
    "ssm_group_count": "linear_num_key_heads", "ssm_time_step_rank": "linear_num_value_heads",
    "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank",
    "final_logit_softcapping": "final_logit_softcapping",
}  # fmt: skip
"""GGUFWriter.add_* -> keys of config.json."""


def write_gguf(
    path: Path,
    config: Config,
    arrays: Arrays,
    *,
    listed: bool = True,
    quantized: gguf.GGMLQuantizationType | None = None,
    part: str = "_exps.",
    vocabulary: Callable[[gguf.GGUFWriter], None] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """Writes a GGUF file of `config` and `arrays` in Hugging Face's form. `listed`: a flag per layer says whether it is
    recurrent, as in newer files; `quantized`: the type of tensors whose names contain `part`; `vocabulary` writes the
    tokenizer; `more` adds keys and tensors."""
    writer = gguf.GGUFWriter(path, ARCH[config["model_type"]])
    tensors = llama_tensors(config, arrays)
    _write_sizes(writer, config, tensors, listed=listed)
    _write_rope(writer, config, tensors)
    if config["model_type"] == "gemma4_text":
        _write_gemma4(writer, config, tensors)
    vocabulary(writer) if vocabulary else add_vocabulary(writer, config["vocab_size"])
    more(writer)
    for name, array in tensors.items():
        if quantized is not None and part in name:
            writer.add_tensor(name, gguf.quantize(array, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
    return written(writer, path)


def add_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """Writes a vocabulary with one merge; the other tokens are names."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{i}>" for i in range(3, size))])
    writer.add_token_merges(["a b"])


def write_file(path: Path, arch: str, metadata: Mapping[str, Any], tensors: Arrays, vocab_size: int) -> Path:
    """Writes a GGUF file. `metadata`: keys below the architecture's name; values None are left out."""
    writer = gguf.GGUFWriter(path, arch)

    def add_uint64(key: str, value: Any) -> None:
        writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)

    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array,
           str: writer.add_string, np.ndarray: add_uint64}  # fmt: skip
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](f"{arch}.{key}", value)
    for name, array in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(array))
    add_vocabulary(writer, vocab_size)
    return written(writer, path)


def stacked(arrays: Arrays) -> Arrays:
    """Stacks the experts, which Hugging Face's files store one by one, under the name without a number."""
    found, stacks = Arrays(), dict[str, dict[int, Any]]()
    for name, array in arrays.items():
        if match := re.search(r"(\.experts|projections)\.(\d+)", name):
            stacks.setdefault(name.replace(match[0], match[1]), {})[int(match[2])] = array
        else:
            found[name] = array
    return found | {name: np.stack([each for _, each in sorted(parts.items())]) for name, parts in stacks.items()}


def in_rope_order(array: Any, heads: int) -> Any:
    """Rows of q and k in llama.cpp's order: the two halves of each rotated pair are adjacent."""
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def written(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Completes the file at `path`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_sizes(writer: gguf.GGUFWriter, config: Config, tensors: Arrays, *, listed: bool) -> None:
    layers, family = config["num_hidden_layers"], config["model_type"]
    modules = len({name.split(".")[1] for name in tensors if name.startswith("blk.")}) - layers
    writer.add_block_count(layers + modules)
    if modules:
        writer.add_nextn_predict_layers(modules)
    for method, key in {**SIZES, **({"sliding_window": "sliding_window"} if family in GEMMA else {})}.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{method}")(config[key])
    if count := config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts"):
        writer.add_expert_count(count)
    if "routed_scaling_factor" in config:
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _write_family(writer, config)
    if family == "deepseek_v3":
        latent, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
        writer.add_head_count_kv(1)
        writer.add_key_length(latent + rotary)
        writer.add_value_length(latent)
        writer.add_key_length_mla(config["qk_nope_head_dim"] + rotary)
        writer.add_value_length_mla(config["v_head_dim"])
    if family in HYBRID:
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        every = config.get("full_attention_interval", 4)
        kinds = config.get("layer_types")
        linear = (
            [kind == "linear_attention" for kind in kinds] if kinds else [(i + 1) % every != 0 for i in range(layers)]
        )
        if listed:
            writer.add_array(f"{ARCH[family]}.attention.recurrent_layers", linear + [False] * modules)
        else:
            writer.add_uint32(f"{ARCH[family]}.full_attention_interval", every)


def _write_family(writer: gguf.GGUFWriter, config: Config) -> None:
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if "conv_L_cache" in config:
        _write_short_conv(writer, config)


def _write_short_conv(writer: gguf.GGUFWriter, config: Config) -> None:
    kinds = config.get("layer_types") or [
        "full_attention" if i in config["full_attn_idxs"] else "conv" for i in range(config["num_hidden_layers"])
    ]
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    if "num_dense_layers" in config:
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    elif config.get("block_auto_adjust_ff_dim", True):
        multiple = config["block_multiple_of"]
        writer.add_feed_forward_length(-(-int(2 * config["intermediate_size"] / 3) // multiple) * multiple)


def _write_rope(writer: gguf.GGUFWriter, config: Config, tensors: Arrays) -> None:
    outer = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if config.get(key) is not None}
    parameters = config.get("rope_parameters") or {}
    rope = {**outer, **(config.get("rope_scaling") or {}), **parameters.get("full_attention", parameters)}
    if local := parameters.get("sliding_attention", {}).get("rope_theta"):
        writer.add_rope_freq_base_swa(local)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rotary = config.get("qk_rope_head_dim") or int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(rotary)
    kind = rope.get("rope_type") or rope.get("type", "default")
    if kind == "llama3":
        tensors["rope_freqs.weight"] = llama3_factors(rope, rotary)
    if kind not in ("linear", "yarn"):
        return
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        arch = ARCH[config["model_type"]]
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if key in rope:
                writer.add_float32(f"{arch}.rope.scaling.yarn_{key.replace('attention', 'attn')}", rope[key])
        if "mscale_all_dim" in rope:
            writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def _write_gemma4(writer: gguf.GGUFWriter, config: Config, tensors: Arrays) -> None:
    """Writes sizes by kind of layer. Dimensions without rotation have large frequency divisors."""
    layers = config["num_hidden_layers"]
    kinds = config.get("layer_types") or ["sliding_attention"] * (layers - 1) + ["full_attention"]  # the small model's
    full = [kind == "full_attention" for kind in kinds]
    own = config.get("per_layer_config", {}).get(str(full.index(True)), {})
    wide = own.get("head_dim") or config["global_head_dim"]
    turning, shared = int(wide * 0.25) // 2, config.get("num_kv_shared_layers", 0)
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([not each for each in full])
    for each, size in (("", wide), ("_swa", config["head_dim"])):
        for part in ("key_length", "value_length"):
            getattr(writer, f"add_{part}{each}")(size)
    heads = config["num_key_value_heads"]
    global_heads = own.get("num_key_value_heads") or config.get("num_global_key_value_heads") or heads
    writer.add_head_count_kv([global_heads if each else heads for each in full])
    if config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length(
            [config["intermediate_size"] * (1 + (i >= layers - shared)) for i in range(layers)]
        )
    writer.add_rope_freq_base(1e6)
    writer.add_rope_dimension_count(wide)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    tensors["rope_freqs.weight"] = np.array([1] * turning + [1e30] * (wide // 2 - turning), np.float32)


def llama3_factors(rope: Mapping[str, Any], rotary: int) -> Any:
    """Divisors of the frequencies in Llama 3.1's RoPE scaling."""
    turns = (
        rope["original_max_position_embeddings"]
        / (2 * np.pi)
        * rope["rope_theta"] ** -(np.arange(0, rotary, 2) / rotary)
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32)


def llama_tensors(config: Config, arrays: Arrays) -> Arrays:
    """Tensors as by llama.cpp's converter: stacked experts, kv_b split per head, folded norms and decay."""
    family, last = config["model_type"], config["num_hidden_layers"]
    found: Arrays = {}
    for name, array in stacked(arrays).items():
        stem, _, end = name.rpartition(".")
        if family in (*HYBRID, "gemma3_text") and "norm" in name and "linear_attn" not in name:
            array = array + 1
        if stem in TOP:
            found[f"{f'blk.{last}.' if stem.startswith('mtp') else ''}{TOP[stem]}.{end}"] = array
            continue
        layer, part = re.sub(r"^model\.layers\.", "", name).split(".", 1)
        if name.startswith("mtp."):
            layer, part = name.removeprefix("mtp.layers.").split(".", 1)
            layer = str(int(layer) + last)
        part = re.sub(r"\bw([123])\b", lambda w: ("gate_proj", "down_proj", "up_proj")[int(w[1]) - 1], part)
        if match := re.fullmatch(r"(?:mlp|feed_forward)\.experts\.(gate|up|down)_proj\.weight", part):
            found[f"blk.{layer}.ffn_{match[1]}_exps.weight"] = array
            continue
        parts = _of_experts(part, array) or _of_layer(config, part, array)
        found |= {f"blk.{layer}.{new}": each for new, each in parts.items()}
    return found


def _of_experts(part: str, array: Any) -> Arrays:
    """A stack of gpt-oss: gate and up alternate, matrices are [experts, in, out]."""
    match = re.fullmatch(r"mlp\.experts\.(gate_up|down)_proj(_bias)?", part)
    if not match:
        return {}
    end = "bias" if match[2] else "weight"
    pieces = {"gate": array[..., ::2], "up": array[..., 1::2]} if match[1] == "gate_up" else {"down": array}
    return {f"ffn_{n}_exps.{end}": each if match[2] else each.swapaxes(1, 2) for n, each in pieces.items()}


def _of_layer(config: Config, part: str, array: Any) -> Arrays:
    """Converts one tensor of a layer."""
    family = config["model_type"]
    if part == "self_attn.kv_b_proj.weight":
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]
        heads = array.reshape(config["num_attention_heads"], nope + value, -1)
        return {"attn_k_b.weight": heads[:, :nope].swapaxes(1, 2), "attn_v_b.weight": heads[:, nope:]}
    if part == "linear_attn.in_proj_qkvz.weight":
        return dict(zip(("attn_qkv.weight", "attn_gate.weight"), split_qkvz(array, config), strict=True))
    if part.startswith("linear_attn.") and family != "qwen3_next":
        array = reordered(part.removeprefix("linear_attn."), array, config)
    if family in PERMUTED and (match := re.match(r"self_attn\.([qk])_proj\.", part)):
        array = in_rope_order(array, config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"])
    if part == "linear_attn.A_log":
        array = -np.exp(array)
    if part in ("linear_attn.conv1d.weight", "conv.conv.weight"):
        array = array[:, 0]
    if part in NAMES:
        return {NAMES[part]: array}
    stem, _, end = part.rpartition(".")
    if family in GEMMA and stem in SANDWICH:
        return {f"{SANDWICH[stem]}.{end}": array}
    if stem == "post_attention_layernorm":
        return {f"{'post_attention_norm' if family in (*HYBRID, 'glm4_moe') else 'ffn_norm'}.{end}": array}
    return {f"{NAMES[stem]}.{end}": array}


def tiled(array: Any, config: Config, axis: int, head_dim: int) -> Any:
    """Value heads grouped by key head, in llama.cpp's order: the first of each key head, then the second."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    shape = array.shape
    parts = array.reshape(*shape[:axis], keys, heads // keys, head_dim, *shape[axis + 1 :])
    return np.ascontiguousarray(parts.swapaxes(axis, axis + 1)).reshape(shape)


def reordered(part: str, array: Any, config: Config) -> Any:
    """Reorders a tensor of Qwen3.5's linear attention as llama.cpp's converter."""
    value, keys = config["linear_value_head_dim"], 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return np.concatenate((array[:keys], tiled(array[keys:], config, 0, value)))
    if part == "in_proj_z.weight":
        return tiled(array, config, 0, value)
    if part == "out_proj.weight":
        return tiled(array, config, 1, value)
    return array if part == "norm.weight" else tiled(array, config, 0, 1)


def split_qkvz(array: Any, config: Config) -> tuple[Any, Any]:
    """Qwen3-Next's joint projection -> [q, k, v] and z, each by head."""
    keys, per_key = config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"]
    key, value = config["linear_key_head_dim"], per_key * config["linear_value_head_dim"]
    q, k, v, z = np.split(array.reshape(keys, -1, array.shape[1]), np.cumsum([key, key, value]), axis=1)
    q, k, v, z = (np.ascontiguousarray(each).reshape(-1, array.shape[1]) for each in (q, k, v, z))
    return np.concatenate((q, k, v)), z
