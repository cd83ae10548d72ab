"""Tiny random models that read pictures, as transformers writes them, with a tokenizer and a chat template."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import new_folder
from tiny_models import tiny_tokenizer
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

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
    """(transformers' model, its directory): pictures of 32 x 32 pixels with 64 patches and 16 tokens, which exceed the
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
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return model, folder


def picture(seed: int, width: int = 50, height: int = 41) -> Image:
    """A random picture, smooth enough to survive resizing."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    rows, columns = np.arange(height) * 5 // height, np.arange(width) * 6 // width
    return Image.of(coarse[rows][:, columns])
