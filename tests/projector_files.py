"""The models of vision_models.py in the form of llama.cpp's converter: a text model and a projector file.

Tensor names are those of gguf's table; keys and changes to tensors are those of llama.cpp's conversion/gemma.py,
smolvlm.py, llava.py, qwenvl.py and qwen3vl.py. Unlike here, published Gemma 4 files have no pixel limit.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import in_rope_order, write_gguf, written

from headstart.formats import safetensors
from headstart.models.small import Arrays

TYPES = {
    "gemma3": "gemma3", "smolvlm": "idefics3", "mistral3": "pixtral", "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger", "qwen3_5": "qwen3vl_merger", "gemma4": "gemma4v",
}  # fmt: skip
SUFFIXES = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
TOWERS = r"(model\.)?(vision_tower|multi_modal_projector|visual|vision_model|connector|embed_vision)\."


def write_both(source: Path, folder: Path, **options: Any) -> Path:
    """Writes the text model and its vision tower (mmproj-F32.gguf). Returns the text model's path. `options` are for
    `write_projector`."""
    config = json.loads((source / "config.json").read_text())
    arrays = {name: each.float32() for name, each in safetensors.open_checkpoint(source).tensors.items()}
    towers = {name.removeprefix("model."): arrays.pop(name) for name in [*arrays] if re.match(TOWERS, name)}
    folder.mkdir(exist_ok=True)
    write_projector(source, config, towers, folder / "mmproj-F32.gguf", **options)
    text = config["text_config"]
    text["model_type"] = {"mistral": "llama"}.get(text["model_type"], text["model_type"])
    prefix = r"^(model\.)?(language_model|text_model)\.(model\.)?"
    rest = {re.sub(prefix, "model.", name).replace("model.lm_head", "lm_head"): each for name, each in arrays.items()}
    sections = (text.get("rope_parameters") or {}).get("mrope_section")

    def more(writer: gguf.GGUFWriter) -> None:
        if sections:
            writer.add_rope_dimension_sections([*sections, 0])
        if "qwen3_vl" in text["model_type"]:
            writer.add_num_deepstack_layers(2)
        writer.add_chat_template(json.loads((source / "tokenizer_config.json").read_text())["chat_template"])

    return write_gguf(folder / "model.gguf", text, rest, more=more, vocabulary=lambda each: _vocabulary(each, source))


def _vocabulary(writer: gguf.GGUFWriter, source: Path) -> None:
    file = json.loads((source / "tokenizer.json").read_text())
    special = {each["id"]: each["content"] for each in file["added_tokens"]}
    tokens = {number: name for name, number in file["model"]["vocab"].items()} | special
    size = max(tokens) + 1
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens.get(i, f"<unused{i}>") for i in range(size)])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(size)])
    writer.add_token_merges([" ".join(each) for each in file["model"]["merges"]])
    about = json.loads((source / "tokenizer_config.json").read_text())
    ids = {name: number for number, name in tokens.items()}
    writer.add_bos_token_id(ids[about["bos_token"]])
    writer.add_eos_token_id(ids[about["eos_token"]])


def write_projector(
    source: Path, config: dict[str, Any], arrays: Arrays, path: Path, *, dtype: type = np.float32,
    rename: Callable[[str], str] = str, kind: str = "",
) -> Path:  # fmt: skip
    """Writes a projector file. `rename` changes tensor names, "" drops a tensor; `kind`: another projector type."""
    vision, model = config["vision_config"], config["model_type"]
    prepared = source / "preprocessor_config.json"
    preparation = json.loads(prepared.read_text()) if prepared.exists() else {}
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type(kind or TYPES[model])
    positions = round(vision.get("num_position_embeddings", 0) ** 0.5)
    writer.add_vision_image_size(vision.get("image_size") or positions * vision["patch_size"] or 560)
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_block_count(depth := vision.get("depth") or vision["num_hidden_layers"])
    writer.add_vision_head_count(vision.get("num_heads") or vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(vision.get("layer_norm_eps", 1e-6))
    usual = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
    writer.add_vision_image_mean(preparation.get("image_mean", usual[0]))
    writer.add_vision_image_std(preparation.get("image_std", usual[1]))
    deep = vision.get("deepstack_visual_indexes", [])
    _write_kind(writer, config, preparation, deep)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(depth, 3))
    for name, array in arrays.items():
        for theirs, each in _converted(name, array, config, deep):
            is_final = theirs.startswith(("v.", "mm."))
            known = theirs if is_final else names.get_name(theirs, try_suffixes=SUFFIXES)
            if known and (new := rename(known)):
                writer.add_tensor(new, np.ascontiguousarray(each, dtype if each.ndim > 1 else np.float32))
    return written(writer, path)


def _write_kind(writer: gguf.GGUFWriter, config: dict[str, Any], preparation: dict[str, Any], deep: list[int]) -> None:
    """Writes the keys of a projector type."""
    vision, model = config["vision_config"], config["model_type"]
    if model != "gemma4":
        (writer.add_vision_use_silu if vision["hidden_act"] == "silu" else writer.add_vision_use_gelu)(True)
    if model == "gemma4":
        side = vision["pooling_kernel_size"]
        writer.add_vision_projector_scale_factor(side)
        writer.add_vision_max_pixels(preparation["max_soft_tokens"] * (side * vision["patch_size"]) ** 2)
    elif model == "gemma3":
        side = round(config["mm_tokens_per_image"] ** 0.5)
        writer.add_vision_projector_scale_factor(vision["image_size"] // vision["patch_size"] // side)
    elif model == "smolvlm":
        writer.add_vision_projector_scale_factor(config["scale_factor"])
        writer.add_vision_preproc_image_size(preparation["size"]["longest_edge"])
    else:
        writer.add_vision_spatial_merge_size(config.get("spatial_merge_size") or vision["spatial_merge_size"])
    if model == "qwen2_5_vl":
        writer.add_vision_n_wa_pattern(vision["fullatt_block_indexes"][0] + 1)
        writer.add_vision_window_size(vision["window_size"])
    if model in ("qwen3_vl", "qwen3_5"):
        writer.add_vision_is_deepstack_layers([i in deep for i in range(vision["depth"])])
    if model.startswith("qwen"):
        writer.add_vision_min_pixels(preparation["size"]["shortest_edge"])
        writer.add_vision_max_pixels(preparation["size"]["longest_edge"])


def _converted(name: str, array: Any, config: dict[str, Any], deep: list[int]) -> Iterator[tuple[str, Any]]:
    """The converter's tensors for one of Hugging Face's, under names of gguf's table or final names."""
    model = config["model_type"]
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
    elif model == "qwen2_5_vl" and ".qkv." in name:
        yield from ((name.replace("qkv", part), each) for part, each in zip("qkv", np.split(array, 3), strict=True))
    elif match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d)\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        yield f"v.deepstack.{deep[int(match[1])]}.{match[2].removeprefix('linear_')}.{match[3]}", array
    elif match := re.fullmatch(r"visual\.merger\.(norm|linear_fc1|linear_fc2)\.(\w+)", name):
        new = {"norm": "v.post_ln", "linear_fc1": "mm.0", "linear_fc2": "mm.2"}
        yield f"{new[match[1]]}.{match[2]}", array
    elif model == "mistral3" and name.endswith(("q_proj.weight", "k_proj.weight")):
        yield name, in_rope_order(array, config["vision_config"]["num_attention_heads"])
    elif model == "gemma4":
        name = re.sub(r"^vision_tower\.encoder\.", "vision_model.model.", name).replace(".linear.weight", ".weight")
        if name.endswith("position_embedding_table"):
            name += ".weight"
        if name.endswith("input_proj.weight"):
            side = config["vision_config"]["patch_size"]
            array = array.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        prefix = "model." if name.startswith(("vision_tower", "embed_vision")) else ""
        yield prefix + name, array.reshape(array.shape or (1,))
    elif model == "gemma3":
        name = re.sub(r"^vision_tower\.", "vision_tower.vision_model.", name.replace("_weight", ".weight"))
        yield from () if ".head." in name else [(name, array + 1 if "soft_emb_norm" in name else array)]
    else:
        yield name if model != "smolvlm" else f"model.{name}", array
