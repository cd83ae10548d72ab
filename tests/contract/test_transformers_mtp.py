"""Native MTP modules compared with transformers' `generate(use_mtp=True)`: equal text and draft logits.

Transformers finds the modules by layer numbers of the released models; the tiny model's number is set on the
instance."""

from typing import Any

import pytest
import torch
from family_rows import ROWS
from support import family_of, make, new_sequence, prompt_of, request, run, tiny_model
from test_families import ForcedDraw, hashable
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from headstart.drafters.base import DraftRequest

MAX_TOKENS = 40


class MtpRecorder:
    """Wraps MtpModel.forward and records draft logits by the number of known tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[int, Tensor] = {}
        forward = MtpModel.forward

        def recorded(model: Any, *args: Any, **kwargs: Any) -> Any:
            found = forward(model, *args, **kwargs)
            self.seen[kwargs["full_input_ids"].shape[1]] = found[1][0, 0]
            return found

        monkeypatch.setattr(MtpModel, "forward", recorded)


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name, row in ROWS.items() if row.transformers_mtp is not None])
def test_drafts_match_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family, dtype="float32", **hashable(dict(ROWS[family].transformers_mtp or {})))
    oracle = AutoModelForCausalLM.from_pretrained(model.checkpoint.path, dtype=torch.float32)
    if not family_of(family).names.of_modules:  # modules are layers after the trunk's
        oracle._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{model.config.num_layers}.*"]
    drafts, prompt = MtpRecorder(monkeypatch), prompt_of(9, 6)
    given = torch.tensor([prompt])
    with torch.inference_mode():
        found = oracle.generate(
            given, attention_mask=torch.ones_like(given), use_mtp=True, do_sample=False, max_new_tokens=MAX_TOKENS,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens = found[0].tolist()
    engine = make(model, dtype="float32", drafter="mtp", depth=1)
    assert run(engine, [request(prompt, max_tokens=MAX_TOKENS, stops=())])["r", 0].tokens == tokens[len(prompt) :]
    engine.runner.draw = forced = ForcedDraw([*tokens, 0])
    assert len(drafts.seen) > MAX_TOKENS // 2
    for length, expected in drafts.seen.items():
        sequence = new_sequence(engine, tokens, length, length - 1)
        engine.drafting.drafter.propose([DraftRequest(sequence, 1)])
        assert float((forced.seen[length, 0] - expected).abs().max()) <= 2e-4
        engine.memory.release(sequence)
