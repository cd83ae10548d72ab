"""Medusa heads: the paper's formula and their depth. contract/test_exact.py checks that they keep the text."""

from dataclasses import replace

import pytest
import support
import torch

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.train.objective import unroll


def test_modules_match_the_formula() -> None:
    model = support.tiny_model("llama")
    head = support.make_medusa(model, 3)
    hidden = torch.randn(2, 5, model.config.hidden_size, dtype=torch.float64)
    tokens = torch.randint(0, support.VOCAB, (2, 5))
    outputs = unroll(head.modules, head.spec, model.decoder.embedding, hidden, tokens, 3)
    for module, y in zip(head.modules, outputs, strict=True):
        w, b = module.layer.weight, module.layer.bias
        torch.testing.assert_close(y, hidden + torch.nn.functional.silu(hidden @ w.T + b))


def test_depth_is_the_number_of_heads() -> None:
    model = support.tiny_model("llama")
    model = replace(model, head=support.make_medusa(model, 2))
    config = EngineConfig(backend="reference", dtype="float64", threads=1, max_model_len=64, depth=2)
    llm = LLM(model, config)
    (answer,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=20, ignore_eos=True))
    assert llm.method == "medusa" and len(answer.speculation.drafted_at) == 2
    with pytest.raises(UsageError, match="goes to 2 at most"):
        LLM(model, replace(config, depth=3))
