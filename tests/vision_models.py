"""Tiny random vision models saved by transformers, with a tokenizer and a chat template."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import new_folder
from tiny_models import tiny_tokenizer
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from headstart.formats import safetensors
from headstart.models.families import family_named
from headstart.text.images import Image

VOCAB = 140
MARKERS = ("<start_of_image>", "<end_of_image>")
TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<start_of_image>{%- else -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


@cache
def gemma3(head_dim: int = 8) -> tuple[Any, Path]:
    """(transformers' model, its directory): images of 32 x 32 pixels with 64 patches and 16 tokens, which exceed the
    sliding window."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens([*MARKERS, "<image>"])
    image = tokenizer.token_to_id("<image>")
    torch.manual_seed(3)
    config = Gemma3Config(
        text_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCAB, "max_position_embeddings": 512,
            "sliding_window": 11, "initializer_range": 0.2, "query_pre_attn_scalar": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        vision_config={
            "hidden_size": 3 * head_dim, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 32, "patch_size": 4,
        },
        mm_tokens_per_image=16, image_token_index=image, initializer_range=0.2,
        boi_token_index=tokenizer.token_to_id(MARKERS[0]), eoi_token_index=tokenizer.token_to_id(MARKERS[1]),
    )  # fmt: skip
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_matrix = tensor.dim() > 1
            scale = np.prod(tensor.shape[1:]) ** -0.5 if is_matrix else 0.1
            offset = 1 if name.endswith(("layer_norm1.weight", "layer_norm2.weight", "post_layernorm.weight")) else 0
            tensor.copy_(torch.randn(tensor.shape) * scale + offset)
        model.model.multi_modal_projector.mm_input_projection_weight.mul_(7)  # as large as scaled embeddings
    folder = new_folder()
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, "<start_of_image>")
    return model, folder


GEMMA4_MARKERS = ("<|image|>", "<|image>", "<image|>")
FILLED = {"patch_size": 4, "max_soft_tokens": 20, "pooling_kernel_size": 2, "resample": 3}
"""preprocessor_config.json of GEMMA4."""
GEMMA4 = {
    "gemma4": (  # as 26B-A4B and 31B
        {"use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "attention_k_eq_v": True,
         "num_global_key_value_heads": 1},
        {"standardize": True},
    ),
    "gemma4_e": (  # as E2B and E4B
        {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 2,
         "use_double_wide_mlp": True},
        {"use_clipped_linears": True},
    ),
}  # fmt: skip
"""Kind -> keys of its text and vision configs."""


@cache
def gemma4(kind: str) -> tuple[Any, Path]:
    """(transformers' model, its directory) of a kind in GEMMA4: images of up to 20 tokens of 8 x 8 pixels."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens(list(GEMMA4_MARKERS))
    text, tower = GEMMA4[kind]
    torch.manual_seed(11)
    config = Gemma4Config(
        text_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 24, "vocab_size": VOCAB,
            "max_position_embeddings": 512, "sliding_window": 11, "initializer_range": 0.2,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "final_logit_softcapping": 4.0,
            "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **text,
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "num_key_value_heads": 3, "head_dim": 8, "patch_size": 4, "pooling_kernel_size": 2,
            "position_embedding_size": 48, **tower,
        },
        image_token_id=tokenizer.token_to_id(GEMMA4_MARKERS[0]), boi_token_id=tokenizer.token_to_id(GEMMA4_MARKERS[1]),
        eoi_token_id=tokenizer.token_to_id(GEMMA4_MARKERS[2]), audio_token_id=VOCAB - 1, video_token_id=VOCAB - 2,
    )  # fmt: skip
    model = Gemma4ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model, "")
    with torch.no_grad():
        model.model.embed_vision.embedding_projection.weight.mul_(7)  # as large as scaled embeddings
        for name, buffer in model.named_buffers():
            part = name.rpartition(".")[2]
            if part in ("std_bias", "std_scale"):
                buffer.copy_(torch.randn(buffer.shape) * 0.3 + (part == "std_scale"))
            elif part.endswith(("put_min", "put_max")) and "layers.1.mlp.up" not in name:  # has no clipping bounds
                buffer.copy_(
                    torch.rand(()) * (0.5 if "min" not in part else -0.5) + (0.4 if "min" not in part else -0.4)
                )
    folder = new_folder()
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, GEMMA4_MARKERS[0])
    (folder / "preprocessor_config.json").write_text(json.dumps(FILLED))
    return model, folder


QWEN_MARKERS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
QWEN_TEXT = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 512,
    "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
QWEN_TOWER = {
    "depth": 3, "hidden_size": 24, "intermediate_size": 40, "num_heads": 3, "patch_size": 4, "out_hidden_size": 48,
    "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
QWEN = {
    "qwen2_5_vl": (
        Qwen2_5_VLForConditionalGeneration,
        {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1]}},
        {"hidden_act": "silu", "window_size": 16, "fullatt_block_indexes": [1]},
    ),
    "qwen3_vl": (
        Qwen3VLForConditionalGeneration,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5],
                             "mrope_interleaved": True}},
        {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 1]},
    ),
    "qwen3_5": (
        Qwen3_5ForConditionalGeneration,
        {**family_named("qwen3_5").tiny_config(head_dim=32, num_hidden_layers=4), **QWEN_TEXT,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2],
                             "mrope_interleaved": True, "partial_rotary_factor": 0.5}},
        {"num_position_embeddings": 25},
    ),
}  # fmt: skip
"""model_type -> transformers' class, and keys of its text and vision configs."""
PREPARATION = {
    "size": {"shortest_edge": 256, "longest_edge": 2048}, "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
    "image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.25, 0.2], "resample": 3,
}  # fmt: skip


@cache
def qwen(kind: str) -> tuple[Any, Path]:
    """(transformers' model, its directory) of a model type in QWEN: images of 256 to 2048 pixels, 4 to 32 tokens.
    qwen3_5 has a random MTP module."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens(list(QWEN_MARKERS))
    ids = {name: tokenizer.token_to_id(each) for name, each in zip(("start", "pad", "end"), QWEN_MARKERS, strict=True)}
    build, text, tower = QWEN[kind]
    torch.manual_seed(5)
    config = build.config_class(
        text_config={**QWEN_TEXT, **text}, vision_config={**QWEN_TOWER, **tower}, image_token_id=ids["pad"],
        vision_start_token_id=ids["start"], vision_end_token_id=ids["end"], video_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = build._from_config(config, attn_implementation="eager").eval()
    randomize(model, "visual")
    folder = new_folder()
    model.save_pretrained(folder)
    if kind == "qwen3_5":
        written = json.loads((folder / "config.json").read_text())
        written["text_config"]["mtp_num_hidden_layers"] = 1
        (folder / "config.json").write_text(json.dumps(written))
        family = family_named(kind)
        arrays = family.tiny(**{**text, "mtp_num_hidden_layers": 1})[1]
        safetensors.save(folder / "mtp.safetensors", {n: a for n, a in arrays.items() if n.startswith("mtp.")})
    write_tokenizer(folder, tokenizer, "".join(QWEN_MARKERS))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPARATION))
    return model, folder


LONGEST = {"size": {"longest_edge": 48}, "patch_size": 4, "image_mean": [0.4, 0.5, 0.6], "resample": 3}
"""preprocessor_config.json of `mistral3`."""


@cache
def mistral3() -> tuple[Any, Path]:
    """(transformers' model, its directory): images of at most 48 x 48 pixels, 36 tokens and 5 row ends."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens(["[IMG]", "[IMG_BREAK]", "[IMG_END]"])
    torch.manual_seed(9)
    config = Mistral3Config(
        text_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 512,
            "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "model_type": "mistral",
            "sliding_window": None, "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 48, "patch_size": 4, "hidden_act": "silu", "model_type": "pixtral",
        },
        image_token_index=tokenizer.token_to_id("[IMG]"), tie_word_embeddings=False,
    )  # fmt: skip
    model = Mistral3ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model, "vision_tower", "multi_modal_projector")
    folder = new_folder()
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, "[IMG]")
    (folder / "preprocessor_config.json").write_text(json.dumps(LONGEST))
    return model, folder


SQUARES = ("<fake_token_around_image>", "<global-img>", *(f"<row_{r}_col_{c}>" for r in (1, 2, 3) for c in (1, 2, 3)))
CUT = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}, "do_image_splitting": True, "resample": 1}
"""preprocessor_config.json of `smolvlm`."""


@cache
def smolvlm() -> tuple[Any, Path]:
    """(transformers' model, its directory): squares of 16 x 16 pixels with 16 patches and 4 tokens."""
    tokenizer = tiny_tokenizer(VOCAB)
    tokenizer.add_special_tokens([*SQUARES, "<image>"])
    torch.manual_seed(7)
    config = SmolVLMConfig(
        text_config={
            "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": VOCAB, "max_position_embeddings": 512,
            "initializer_range": 0.2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "model_type": "llama",
        },
        vision_config={
            "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3,
            "image_size": 16, "patch_size": 4,
        },
        scale_factor=2, image_token_id=tokenizer.token_to_id("<image>"), pad_token_id=0,
    )  # fmt: skip
    model = SmolVLMForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    randomize(model, "vision_model", "connector")
    folder = new_folder()
    model.save_pretrained(folder)
    write_tokenizer(folder, tokenizer, "<image>")
    (folder / "preprocessor_config.json").write_text(json.dumps(CUT))
    return model, folder


def copied(source: Path, target: Path, without: str = "", **changes: Any) -> None:
    """Copies a model without tensors whose names contain `without`, and changes keys of its config."""
    arrays = {name: tensor.float32() for name, tensor in safetensors.open_checkpoint(source).tensors.items()}
    for file in source.glob("*.json"):
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    kept = {name: array for name, array in arrays.items() if not without or without not in name}
    safetensors.save(target / "model.safetensors", kept)


def randomize(model: Any, *parts: str) -> None:
    """Fills the given parts of a model with random tensors whose outputs have a usual scale."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if any(part in name for part in parts):
                is_matrix, is_norm = tensor.dim() > 1, "norm" in name or "ln_" in name
                scale = np.prod(tensor.shape[1:]) ** -0.5 if is_matrix else 0.1
                tensor.copy_(torch.randn(tensor.shape) * scale + (is_norm and name.endswith("weight")))


def write_tokenizer(folder: Path, tokenizer: Any, placeholder: str) -> None:
    """Writes tokenizer.json, and tokenizer_config.json with a chat template that writes `placeholder` for an image."""
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    template = TEMPLATE.replace("<start_of_image>", placeholder)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))


def random_image(seed: int, width: int = 50, height: int = 41) -> Image:
    """A random image of large squares, so that resizing keeps its content."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    rows, columns = np.arange(height) * 5 // height, np.arange(width) * 6 // width
    return Image.of(coarse[rows][:, columns])


KINDS = ("gemma3", "smolvlm", "mistral3", *QWEN, *GEMMA4)


def published(kind: str) -> tuple[Any, Path]:
    """(transformers' model, its directory) of a kind in KINDS."""
    if kind in GEMMA4:
        return gemma4(kind)
    return qwen(kind) if kind in QWEN else {"gemma3": gemma3, "smolvlm": smolvlm, "mistral3": mistral3}[kind]()
