"""Block drafters run by the code that their publishers give: transformers, z-lab's model.py, DeepSpec's and
speculators' packages.

Each writes texts greedily, one at a time, and tells every draft by what was before it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

Told = dict[tuple[int, ...], list[int]]
Texts = list[list[int]]


def trunk_of(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def written(target: Any, taps: list[int], prompts: Texts, tokens: int) -> Iterator[tuple[Any, Any]]:
    """Greedy texts [1, T] with the target's streams before the layers `taps`, one behind the other [1, T, taps * H]."""
    for prompt in prompts:
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        text = target.generate(torch.tensor([prompt]), max_new_tokens=tokens, **options)
        states = target(text, output_hidden_states=True).hidden_states
        yield text, torch.cat([states[tap] for tap in taps], -1)


@contextmanager
def older_caches() -> Iterator[None]:
    """transformers before 5.20 cut a cache to a length; both publishers' code still asks for that."""
    cache = transformers.DynamicCache
    crop = cache.crop

    def to_length(self: Any, length: int) -> None:
        crop(self, length - self.get_seq_length() if length >= 0 else length)

    cache.crop = to_length
    try:
        yield
    finally:
        cache.crop = crop


def in_transformers(trunk: Path, head: Path, prompts: Texts, tokens: int) -> tuple[Told, Texts]:
    """generate(assistant_model=..., speculation_type="dflash") with the in-tree drafter."""
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator as Generator

    target, drafter = trunk_of(trunk), transformers.AutoModel.from_pretrained(head, dtype=torch.float32).eval()
    told, get = Told(), Generator.get_candidates

    def recorded(self: Any, input_ids: Any, *args: Any, **options: Any) -> Any:
        found = get(self, input_ids, *args, **options)
        if draft := found[0][0, input_ids.shape[1] :].tolist():
            told[tuple(input_ids[0].tolist())] = draft
        return found

    Generator.get_candidates = recorded
    try:
        texts = []
        for prompt in prompts:
            written = target.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), assistant_model=drafter,
                speculation_type="dflash", max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            texts.append(written[0].tolist())
    finally:
        Generator.get_candidates = get
    return told, texts


@older_caches()
def in_zlab(source: Path, trunk: Path, head: Path, prompts: Texts, tokens: int) -> tuple[Told, Texts]:
    """dflash_generate of z-lab's model.py."""
    spec = importlib.util.spec_from_file_location("zlab_dflash", source)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = transformers.Qwen3Config.from_pretrained(head, attn_implementation="eager")
    drafter = module.DFlashDraftModel(config).float().eval()
    drafter.load_state_dict(load_file(head / "model.safetensors"), strict=True)
    target, told, texts = trunk_of(trunk), Told(), []
    forward = target.forward

    def recorded(input_ids: Any, **options: Any) -> Any:
        """A pass over the last token and its draft."""
        start = int(options["position_ids"][0, 0])
        if start:
            told[(start, *input_ids[0].tolist())] = []
        return forward(input_ids, **options)

    target.forward = recorded
    for prompt in prompts:
        seen = set(told)
        written = module.dflash_generate(drafter, target, torch.tensor([prompt]), tokens, None, 0.0)[0].tolist()
        texts.append(written)
        for start, last, *draft in [key for key in told if key not in seen]:
            del told[start, last, *draft]
            if start < len(written):
                told[tuple(written[: start + 1])] = draft
    return told, texts


@older_caches()
def in_deepspec(source: Path, trunk: Path, head: Path, prompts: Texts, tokens: int) -> tuple[Told, Texts]:
    """DeepSpec's Qwen3DSparkModel and its proposals, each behind a context of its own."""
    sys.path.insert(0, str(source))
    from deepspec.eval.dspark.draft_ops import build_dspark_proposal, forward_dspark_draft_block
    from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

    config = transformers.Qwen3Config.from_pretrained(head, attn_implementation="eager")
    drafter = Qwen3DSparkModel(config).float().eval()
    missing = drafter.load_state_dict(load_file(head / "model.safetensors"), strict=False)
    target = trunk_of(trunk)
    assert not missing.unexpected_keys and {*missing.missing_keys} <= {"embed_tokens.weight", "lm_head.weight"}
    drafter.initialize_embeddings_and_head(embed_tokens=target.model.embed_tokens, lm_head=target.lm_head)
    told, texts, size = Told(), [], int(config.block_size)
    taps = [layer + 1 for layer in config.target_layer_ids]
    for text, features in written(target, taps, prompts, tokens):
        texts.append(text[0].tolist())
        for start in range(text.shape[1] - tokens, text.shape[1] - 1):
            block = torch.tensor([[int(text[0, start])] + [config.mask_token_id] * (size - 1)])
            with torch.inference_mode():
                hidden = forward_dspark_draft_block(
                    drafter, draft_input_ids=block, position_ids=torch.arange(512)[None], start=start, block_size=size,
                    past_key_values_draft=transformers.DynamicCache(), target_hidden_states=features[:, :start],
                )  # fmt: skip
                proposal = build_dspark_proposal(
                    drafter, draft_input_ids=block, block_hidden=hidden, block_size=size, temperature=0.0,
                    confidence_threshold=0.0,
                )  # fmt: skip
            told[tuple(text[0, : start + 1].tolist())] = proposal.verify_input_ids[0, 1:].tolist()
    return told, texts


def in_speculators(trunk: Path, head: Path, prompts: Texts, tokens: int) -> tuple[Told, Texts]:
    """Drafts of the speculators package's model behind each context: its training pass with one anchor, greedy."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config: Any = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"
    drafter: Any = SpeculatorModel.from_pretrained(head, config=config, dtype=torch.float32).eval()
    told, texts, size, anchored = Told(), [], int(config.block_size), bool(config.sample_from_anchor)
    markov = getattr(drafter, "markov_head", None)
    for text, features in written(trunk_of(trunk), config.aux_hidden_state_layer_ids, prompts, tokens):
        texts.append(text[0].tolist())
        ids = torch.nn.functional.pad(text, (0, size))  # no anchor may stand in the last block
        features = torch.nn.functional.pad(features, (0, 0, 0, size))
        for start in range(text.shape[1] - tokens, text.shape[1] - 1):
            mask = torch.zeros(ids.shape)
            mask[0, start] = 1
            with torch.inference_mode():
                _, logits, *_ = drafter._backbone_forward(
                    features, ids, mask, features[..., : config.transformer_layer_config.hidden_size],
                    torch.zeros_like(ids), max_anchors=1,
                )  # fmt: skip
                draft = [int(text[0, start])]
                for row in logits[0, 0 if anchored else 1 :]:
                    before = torch.tensor([draft[-1]])
                    draft.append(int((row + markov.markov_w2(markov.markov_w1(before))[0] if markov else row).argmax()))
            told[tuple(text[0, : start + 1].tolist())] = draft[1:]
    return told, texts
