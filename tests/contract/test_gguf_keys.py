"""Keys and tensors of GGUF files are read, ignored if they have no effect, or refused by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf_files import write_gguf
from support import family_of

from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.errors import ModelError
from headstart.formats import gguf as gguf_format
from headstart.models.small import Arrays

Write = Callable[[gguf.GGUFWriter], None]
REFUSED: dict[str, tuple[Write, str]] = {
    "another scale": (lambda w: w.add_logit_scale(0.5), "logit_scale is 0.5, which is not known for llama models"),
    "experts": (lambda w: w.add_expert_count(8), "num_experts_per_tok is missing"),
    "a window": (lambda w: w.add_sliding_window(16), "sliding_window is 16, which is not known"),
    "both directions": (lambda w: w.add_causal_attention(False), "is_causal is False, which is not known"),
    "a new key": (lambda w: w.add_float32("llama.attention.new", 0.5), r"llama\.attention\.new is 0\.5, which is not"),
    "a list": (lambda w: w.add_array("llama.new", list(range(500))), r"llama\.new is \[0, 1, .*\.\.\., which is not"),
    "wide values": (lambda w: w.add_value_length(16), "v_head_dim is 16, which is not known for llama models"),
    "a factor on top": (lambda w: w.add_rope_scaling_attn_factors(1.3), "attn_factor is 1.29.* which is not supported"),
    "a word for a factor": (lambda w: w.add_string("llama.rope.scaling.factor", "x"), "is 'x', but must be a number"),
    "a number for a kind": (lambda w: w.add_uint32("llama.rope.scaling.type", 3), "is 3, but must be a word"),
}
TENSORS: dict[str, tuple[Arrays, str]] = {
    "a bias": ({"blk.0.attn_norm.bias": np.ones(48, np.float32)}, r"no place for layers\.0\.input_layernorm\.bias"),
    "a class": ({"cls.output.weight": np.ones((2, 48), np.float32)}, r"no place for cls\.output\.weight"),
    "factors for long texts": ({"rope_factors_long.weight": np.ones(4, np.float32)}, r"no place for rope_factors_long"),
    "too few factors": ({"rope_freqs.weight": np.full(3, 2, np.float32)}, "factors of the rope must be 4 numbers"),
    "factors of 0": ({"rope_freqs.weight": np.zeros(4, np.float32)}, "must be a number above 0"),
}
HARMLESS: dict[str, Write] = {
    "scale of 1": lambda w: w.add_logit_scale(1.0),
    "no experts": lambda w: w.add_expert_count(0),
    "a note of another program": lambda w: w.add_float32("someone.note", 0.5),
    "sections": lambda w: w.add_rope_dimension_sections([2, 1, 1, 0]),
    "vocabulary": lambda w: w.add_vocab_size(131),
}


def load(path: Path, more: Write) -> None:
    write_gguf(path, *family_of("llama").tiny(), more=more)
    load_model(str(path), EngineConfig(backend="reference", threads=1))


def add_all(tensors: Arrays, writer: gguf.GGUFWriter) -> None:
    for name, array in tensors.items():
        writer.add_tensor(name, array)


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_keys_are_refused_by_name(case: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=REFUSED[case][1]):
        load(tmp_path / "model.gguf", REFUSED[case][0])


@pytest.mark.parametrize("case", TENSORS)
def test_unknown_tensors_are_refused(case: str, tmp_path: Path) -> None:
    (tensors, message), path = TENSORS[case], tmp_path / "model.gguf"
    with pytest.raises(ModelError, match=message):
        load(path, partial(add_all, tensors))


@pytest.mark.parametrize("case", HARMLESS)
def test_keys_without_effect_are_accepted(case: str, tmp_path: Path) -> None:
    load(tmp_path / "model.gguf", HARMLESS[case])


def test_config_of_a_gguf_file_is_readable_as_config_json(tmp_path: Path) -> None:
    """As in a copy converted to another format."""
    found, path = family_of("llama"), tmp_path / "model.gguf"
    write_gguf(path, *found.tiny())
    found.read(gguf_format.open_checkpoint(path).config)
