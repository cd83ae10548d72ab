"""Which heads a checkpoint holds: the config's word against the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.formats.base import Tensor
from headstart.formats.head import BlockConfig, HeadConfig, write_head
from headstart.kernels.ops import AttentionSpec, RopeSpec
from headstart.tools import inspect
from headstart.tools.inspect import find_heads, part_of, text_config
from headstart.tools.tiny import write_tiny


def tensor(name: str) -> Tensor:
    return Tensor(name, (2, 2), "BF16", np.zeros((2, 4), np.uint8))


@pytest.mark.parametrize(
    ("config", "names", "expected"),
    [
        ({}, [], ("none", 0, {})),
        ({"num_nextn_predict_layers": 1}, [], ("missing", 1, {})),
        (
            {"num_nextn_predict_layers": 1},
            ["model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight"],
            ("present", 1, {"model.layers.4.*": 2}),
        ),
        (
            {"num_nextn_predict_layers": 1},
            ["model.mtp_layers.0.input_proj.weight"],
            ("present", 1, {"model.mtp_layers.0.*": 1}),
        ),
        ({"text_config": {"mtp_num_hidden_layers": 1}}, ["mtp.fc.weight"], ("present", 1, {"mtp.*": 1})),
        ({}, ["mtp.layers.0.mlp.gate_proj.weight"], ("present", 0, {"mtp.layers.0.*": 1})),
    ],
)
def test_declared_against_found(config: dict[str, Any], names: list[str], expected: tuple[str, int, Any]) -> None:
    assert all(part_of(name, 4) == "mtp" for name in names)
    heads = find_heads(text_config(config), [tensor(name) for name in names], 4)
    assert (heads["status"], heads["declared"], heads["found"]) == expected


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "layers"),
        ("layers.0.self_attn.q_proj.weight", "layers"),
        ("model.visual.blocks.0.attn.qkv.weight", "other modalities"),
        ("lm_head.weight", "lm_head"),
        ("model.norm.weight", "norms and rest"),
    ],
)
def test_parts(name: str, part: str) -> None:
    assert part_of(name, 4) == part


def test_head_of_its_own(tmp_path: Path) -> None:
    block = BlockConfig(intermediate_size=8, attention=AttentionSpec(2, 1, 4, 0.5), rope=RopeSpec((1.0,), 2), eps=1e-5)
    config = HeadConfig(hidden_size=8, vocab_size=131, block=block, trunk="a", trunk_fingerprint="")
    write_head(tmp_path / "head", config, {"mtp.0.norm.weight": np.ones(8, np.float32)}, np.arange(5, dtype=np.int64))
    report = inspect.run(str(write_tiny("llama", tmp_path / "trunk")), head=str(tmp_path / "head"))
    assert report.data["attached_head"]["draft_vocab_size"] == 5
    assert report.data["attached_head"]["parameters"] == 8
    assert "5 draft tokens" in "\n".join(report.lines)
