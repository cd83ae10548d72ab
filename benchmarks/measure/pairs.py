"""A small trunk and small block drafters trained on its texts, in the layouts that others read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from engines.published import trunk_of
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from headstart.heads.files import read_head, write_head
from headstart.heads.kind import HeadCheckpoint
from headstart.tools.export import run as export
from headstart.tools.tiny import write_model

H, V, LAYERS, TAPS, MASK, RANK = 128, 160, 8, (1, 3, 5), 5, 16
SIZES = {
    "hidden_size": H, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXTS, PROMPT, LENGTH = 96, 12, 44
QUIET = 0.1
"""How much of their output the trunk's blocks add: texts that a small drafter can learn in a minute."""


@dataclass(frozen=True)
class Pair:
    """Directories: the trunk; the DFlash drafter as transformers saves it; by `headstart export` target, both drafters
    as that writes them. Prompts they were not trained on."""

    trunk: Path
    muse: Path
    dflash: dict[str, Path]
    dspark: dict[str, Path]
    prompts: list[list[int]]


def make_pair(work: Path, *, block: int, steps: int) -> Pair:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    trunk = _trunk(work / "trunk")
    model = trunk_of(trunk)
    prompts = torch.randint(6, V, (TEXTS + 8, PROMPT))
    with torch.no_grad():
        texts = model.generate(prompts[:TEXTS], max_new_tokens=LENGTH - PROMPT, do_sample=False, eos_token_id=None)
        states = model(texts, output_hidden_states=True).hidden_states
    features = torch.cat([states[layer + 1] for layer in TAPS], -1)
    muse, own = work / "muse", work / "own"
    for anchored in (True, False):  # the last one stays in transformers' layout
        drafter, markov = _trained(model, texts, features, block - anchored, steps, anchored=anchored)
        drafter.save_pretrained(muse)
        _add_vocabulary(muse / "config.json")
        if anchored:
            head = _with_markov(read_head(muse), block - 1)
            sure = {
                "confidence.weight": np.zeros((1, H + RANK), np.float32),
                "confidence.bias": np.zeros(1, np.float32),
            }
            write_head(own, head, {name: each.float32() for name, each in head.tensors.items()} | markov | sure)
    dflash, dspark = (
        {target: _exported(trunk, head, target, work) for target in targets}
        for head, targets in ((muse, ("vllm-dflash", "speculators")), (own, ("vllm-dspark", "speculators")))
    )
    return Pair(trunk, muse, dflash, dspark, prompts[TEXTS:].tolist())


def _exported(trunk: Path, head: Path, target: str, work: Path) -> Path:
    path = work / f"{head.name}-{target}"
    export.run(export.ExportOptions(model=str(trunk), head=head, to=target, out=path, force=True))
    return path


def _trunk(path: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=V, num_hidden_layers=LAYERS, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, **SIZES
    )
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            scale = QUIET if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(weight, std=1.0 if "embed" in name else scale * weight.shape[1] ** -0.5)
    arrays = {name: each.detach().numpy() for name, each in model.state_dict().items()}
    return write_model(path, {**config.to_dict(), "architectures": ["LlamaForCausalLM"]}, arrays)


def _trained(
    model: Any, texts: Any, features: Any, rows: int, steps: int, *, anchored: bool
) -> tuple[Any, dict[str, Any]]:
    """transformers' own drafter module; row k learns the token at its position, or `anchored` the one behind it."""
    config = MuseGlimmerAssistantConfig(
        **SIZES, num_hidden_layers=2, layer_types=["full_attention"] * 2, block_size=rows, mask_token_id=MASK,
        target_layer_ids=list(TAPS), rope_parameters=ROPE, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    drafter = MuseGlimmerAssistantModel(config).float()
    for weight in drafter.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    first, last = torch.nn.Parameter(torch.randn(V, RANK)), torch.nn.Parameter(0.1 * torch.randn(V, RANK))
    optimizer = torch.optim.AdamW([*drafter.parameters(), first, last], lr=2e-3)
    rng = torch.Generator().manual_seed(1)
    for _ in range(steps):
        picked = torch.randint(TEXTS, (32,), generator=rng)
        start = int(torch.randint(PROMPT, LENGTH - rows - 1, (), generator=rng))
        tokens = texts[picked, start : start + rows + 1]
        ids = torch.full((len(picked), rows), MASK)
        ids[:, 0] = tokens[:, 0]
        positions = torch.arange(start + rows)[None].expand(len(picked), -1)
        hidden = drafter(
            noise_embeds=model.model.embed_tokens(ids), context_hidden_states=features[picked, :start],
            position_ids=positions, attention_mask={"full_attention": None},
        ).last_hidden_state  # fmt: skip
        logits, labels = model.lm_head(hidden), tokens[:, 1:] if anchored else tokens[:, :-1]
        if anchored:
            logits = logits + first[tokens[:, :-1]] @ last.T
        keep = slice(0 if anchored else 1, None)
        loss = torch.nn.functional.cross_entropy(logits[:, keep].flatten(0, 1), labels[:, keep].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter, {"markov.embed.weight": first.detach().numpy(), "markov.out.weight": last.detach().numpy()}


def _with_markov(head: HeadCheckpoint, drafts: int) -> HeadCheckpoint:
    assert head.spec.block
    block = replace(head.spec.block, anchor_predicts=True, block_size=drafts, markov_rank=RANK, confidence=True)
    return replace(head, spec=replace(head.spec, block=block))


def _add_vocabulary(config: Path) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": V, "num_target_layers": LAYERS}))
