"""The model inside the package: same text in transformers, acceptance of its head, size and model card."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams

TINY = [name for name in hub.builtin_names() if name not in hub.BUILTIN]
PROMPT = "def read(self):\n"
MOST_BYTES = 6_000_000


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_text_equals_transformers(name: str) -> None:
    path = hub.resolve(name)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt").input_ids
    with torch.inference_mode():
        written = model.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    llm = LLM(name, EngineConfig(backend="reference", depth=3, max_model_len=256))
    (found,) = llm.generate([ids[0].tolist()], SamplingParams(max_tokens=40, ignore_eos=True))
    assert found.token_ids == written[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("name", TINY)
def test_head_has_a_high_acceptance_length(name: str) -> None:
    llm = LLM(name, EngineConfig(depth=3, max_model_len=512))
    (found,) = llm.generate([PROMPT], SamplingParams(max_tokens=200, ignore_eos=True))
    assert llm.method == "mtp" and found.speculation.acceptance_length > 1.3


@pytest.mark.parametrize("name", TINY)
def test_model_is_small_and_has_a_card(name: str) -> None:
    files = list(Path(hub.resolve(name)).iterdir())
    assert sum(file.stat().st_size for file in files) <= MOST_BYTES
    card = (hub.resolve(name) / "README.md").read_text("utf-8")
    assert all(word in card for word in ("Data", "Licence", "Command"))
