"""Small random models as Hugging Face directories, for tests.

The tokenizer is byte-level with one id per common byte and a few merges, so that text, multi-byte characters and stop
strings across tokens can be tested with a vocabulary of about a hundred ids.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headstart import registry
from headstart.formats import safetensors
from headstart.models.base import Family
from headstart.models.small import Arrays
from headstart.text.token_bytes import byte_alphabet

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # ids 0, 1 (beginning of text) and 2 (end of text)
MERGES = (
    ("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("a", "n"), ("o", "u"), (" ", "t"), (" t", "he"), (" ", "a"),
    ("\n", "\n"), (" ", " "), ("in", "g"),
)  # fmt: skip

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""


def write_tiny(family: str, folder: Path, **config_changes: Any) -> Path:
    """Writes the tiny model of a family, by name, into `folder`. Keyword arguments change keys of its config. Returns
    the folder. Raises ModelError for an unknown family."""
    declared: Family = registry.find("models", family).FAMILY
    return write_model(folder, *declared.tiny(**config_changes))


def write_model(folder: Path, config: dict[str, Any], arrays: Arrays) -> Path:
    """Writes config.json, weights, tokenizer and chat template. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.save(folder / "model.safetensors", arrays, {"format": "pt"})
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config}
    pad, start, end = SPECIAL
    tokens = {"bos_token": start, "eos_token": end, "pad_token": pad}
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, "chat_template": CHAT_TEMPLATE}
    documents = {"config": config, "generation_config": ends, "tokenizer_config": tokenizer}
    for name, content in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tiny_tokenizer(int(config["vocab_size"])).save(str(folder / "tokenizer.json"))
    return folder


def tiny_tokenizer(vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE tokenizer of at most `vocab_size` ids. It has all 256 bytes if they fit, else only
    common ones, and drops other bytes from texts. The last ids may be unused, as in many models."""
    of_byte = {byte: char for char, byte in byte_alphabet().items()}
    common = [*b"\n", *range(0x20, 0x7F), *"äöüßé€".encode()]
    rare = [byte for byte in range(256) if byte not in common]
    pairs = [tuple("".join(of_byte[byte] for byte in half.encode()) for half in merge) for merge in MERGES]
    names = [*SPECIAL, *(of_byte[byte] for byte in dict.fromkeys(common)), *map("".join, pairs)]
    if len(names) + len(rare) <= vocab_size:
        names += [of_byte[byte] for byte in rare]
    vocab = {name: index for index, name in enumerate(names[:vocab_size])}
    merges = [(left, right) for left, right in pairs if {left, right, left + right} <= vocab.keys()]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([name for name in SPECIAL if name in vocab])
    return tokenizer
