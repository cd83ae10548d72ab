"""Heads for a model with a LoRA adapter are trained on the adapted trunk and draft for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support
from lora_files import random_adapter, write_adapter

from headstart.api import LLM
from headstart.core import SamplingParams
from headstart.errors import HeadstartError
from headstart.heads.files import read_head
from headstart.train.frozen_model import load_frozen_model
from headstart.train.options import TrainOptions
from headstart.train.records import Example
from headstart.train.run import run

PROMPT, LENGTH = support.prompt_of(12, 3), 40
GREEDY = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def common(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapted")
    model = support.write_model(folder / "model", *support.family_of("llama").tiny())
    adapter, texts = random_adapter(model, 1), folder / "texts.jsonl"
    llm = LLM(model, lora=adapter, depth=0, drafter="none", threads=1)
    prompts = [support.prompt_of(12, seed) for seed in range(40)]
    answers = llm.generate(prompts, GREEDY)
    records = [
        {"kind": "own", "prompt_ids": prompt, "response_ids": list(answer.token_ids)}
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"model": str(model), "lora": adapter, "data": (texts,), "threads": 1, "draft_vocab": 100}


def test_hidden_states_are_those_of_the_adapted_trunk(common: dict[str, Any], tmp_path: Path) -> None:
    """The argmax at each token of the engine's greedy text is its next token."""
    options = TrainOptions(out=tmp_path / "head", tokens=100, **common)
    with LLM(common["model"], lora=common["lora"], depth=0, drafter="none", threads=1) as llm:
        texts = {name: llm.generate([PROMPT], GREEDY, lora=name)[0].token_ids for name in ("", "adapter")}
    assert texts[""] != texts["adapter"]
    tokens = np.array([*PROMPT, *texts["adapter"]], np.int32)
    loss = np.arange(len(tokens)) >= len(PROMPT) - 1
    loss[-1] = False
    frozen_model, plain = load_frozen_model(options), load_frozen_model(replace(options, lora=None))
    (features,) = frozen_model.feature_extractor().features([Example("own", tokens, loss)])
    assert features.best[loss].tolist() == list(texts["adapter"])
    assert frozen_model.answers != plain.answers, "answers of the unadapted model are not the adapted one's text"


@pytest.mark.slow
def test_head_for_an_adapter_is_trained_and_drafts_for_it(common: dict[str, Any], tmp_path: Path) -> None:
    report = run(TrainOptions(out=tmp_path / "head", tokens=1_000, **common))
    assert "--lora adapter" in read_head(tmp_path / "head").training["command"]
    assert report.data["gain"] is not None
    assert f"--lora {common['lora']} --head" in report.lines[-1]
    with LLM(common["model"], lora=common["lora"], head=str(tmp_path / "head"), depth=2, threads=1) as llm:
        pair = llm.decode_pair(PROMPT, GREEDY, 0)
    assert pair[True].token_ids == pair[False].token_ids and pair[True].speculation.drafted


def test_unsupported_adapters_are_refused(common: dict[str, Any], tmp_path: Path) -> None:
    name, width = "base_model.model.lm_head", 48
    arrays = {f"{name}.lora_A.weight": np.ones((2, width), np.float32)}
    arrays[f"{name}.lora_B.weight"] = np.ones((support.VOCAB, 2), np.float32)
    of_lm_head = write_adapter(arrays, {"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    for changes, message in (
        ({"lora": of_lm_head}, "lm_head"),
        ({"lora": tmp_path}, "adapter_config.json"),
        ({"device": "cuda"}, "--lora trains on the CPU only"),
    ):
        with pytest.raises(HeadstartError, match=message):
            run(TrainOptions(out=tmp_path / "head", tokens=100, **{**common, **changes}))
