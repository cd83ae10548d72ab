"""The default model's weights: logits and text of transformers, drafted text equal to plain decoding."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import PATIENCE

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.tools.prompts import builtin_prompts

trunk = hub.cached_trunk()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(trunk is None, reason="the default model is not in the cache: headstart pull"),
]

LOGPROB_TOLERANCE = 2e-4
"""|log-softmax difference| to transformers in float32 over 30 layers; measured 3e-5 over 486 tokens."""
MORE_PROMPTS = [
    "What is the capital of France?", "Write a haiku about the sea.", "List three uses of a paper clip.",
    "Explain what a prime number is.", "Translate to English: Guten Morgen, wie geht es dir?",
    "Write a Python function that adds two numbers.", "What is 17 + 25? Show your work.",
    "Give me a short recipe for pancakes.",
]  # fmt: skip


@pytest.fixture(scope="module")
def llm() -> LLM:
    """The default model on the reference backend in float32."""
    return LLM(None, EngineConfig(backend="reference", max_model_len=2048, threads=1))


@pytest.fixture(scope="module")
def served() -> LLM:
    """The default model with default settings."""
    return LLM(None, EngineConfig(max_model_len=2048))


@pytest.fixture(scope="module")
def oracle() -> Any:
    transformers = pytest.importorskip("transformers")
    assert trunk is not None
    return transformers.AutoModelForCausalLM.from_pretrained(trunk.parent, gguf_file=trunk.name, dtype="float32")


def test_logits_equal_transformers(llm: LLM, oracle: Any) -> None:
    import torch

    for _, prompt in builtin_prompts()[:3]:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        completion = llm.generate([prompt], params)[0]
        ids = completion.prompt_token_ids
        with torch.inference_mode():
            theirs = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected = [float(theirs[i, token]) for i, token in enumerate(ids[1:])]
        found = [each.logprob for each in completion.prompt_logprobs]
        np.testing.assert_allclose(found, expected, atol=LOGPROB_TOLERANCE)


def test_greedy_text_equals_transformers(llm: LLM, oracle: Any) -> None:
    import torch

    prompts = [prompt for _, prompt in builtin_prompts()][:4] + MORE_PROMPTS
    ours = llm.generate(prompts, SamplingParams(max_tokens=16))
    assert len(ours) == 12
    for completion in ours:  # one pass suffices: the greedy text is the same if each of our tokens is the argmax
        ids, written = completion.prompt_token_ids, completion.token_ids
        with torch.inference_mode():
            theirs = oracle(torch.tensor([[*ids, *written]])).logits[0, len(ids) - 1 : -1].argmax(-1)
        assert written == theirs.tolist()
        assert len(written) == 16 or written[-1] == 2


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafted_text_equals_plain_decoding(served: LLM, temperature: float) -> None:
    llm = served
    prompts = [prompt for _, prompt in builtin_prompts()]
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=i) for i in range(len(prompts))]
    plain, drafted = (llm.generate(prompts, params, depth=depth) for depth in (0, 3))
    assert [each.token_ids for each in drafted] == [each.token_ids for each in plain]
    assert sum(each.speculation.accepted for each in drafted) > 0
    assert sum(each.speculation.passes for each in drafted) < sum(each.speculation.passes for each in plain)


def test_long_prompts_in_a_batch_equal_each_alone() -> None:
    """Contexts beyond 512 positions, which threads split when rows are few; also with tree drafts."""
    words = " ".join(prompt for _, prompt in builtin_prompts())
    prompts = [f"{words}\n" * 3 + end for end in ("Summarize this.", "Which of these questions is the hardest?")]
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
    found = {}
    for drafter, settings in {"none": {}, "mtp": {"depth": 1, "draft_width": 2}}.items():
        config = EngineConfig(drafter=drafter, threads=2, max_model_len=2048, enable_prefix_caching=False, **settings)
        with LLM(None, config) as llm:
            groups = {"together": [prompts]} | ({"alone": [[each] for each in prompts]} if drafter == "none" else {})
            for name, each in groups.items():
                answers = [answer for group in each for answer in llm.generate(group, params)]
                found[drafter, name] = [[(one.token, one.logprob) for one in answer.logprobs] for answer in answers]
            assert min(len(answer.prompt_token_ids) for answer in answers) > 512
    assert all(each == found["none", "alone"] for each in found.values())


def test_generate_prints_one_json_document() -> None:
    options = ["--prompt", "Say hello.", "--max-tokens", "8", "--threads", "1", "--json"]
    command = [sys.executable, "-m", "headstart.cli.main", "generate", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert set(document) == {"text", "token_ids", "finish_reason", "seed", "usage", "speculation", "timing"}
    assert document["usage"]["completion_tokens"] == len(document["token_ids"])
    assert document["speculation"]["method"] in {"eagle3", "ngram"}
