"""A small trunk and small block drafters trained on its texts, in the layouts that others read."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from engines.published import trunk_of
from safetensors.torch import save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint
from headstart.heads.layouts.writing import as_dflash, as_dspark, as_speculators
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
    """Directories: the trunk, the DFlash drafter in three layouts, the DSpark drafter; prompts they were not trained
    on."""

    trunk: Path
    muse: Path
    dflash: Path
    speculators: Path
    dspark: Path
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
    paths = {name: work / name for name in ("muse", "dflash", "speculators", "dspark")}
    for anchored in (True, False):  # the last one stays in transformers' layout
        drafter, markov = _trained(model, texts, features, block - anchored, steps, anchored=anchored)
        drafter.save_pretrained(paths["muse"])
        _add_vocabulary(paths["muse"] / "config.json")
        head = replace(read_head(paths["muse"]), trunk=str(trunk), trunk_layers=LAYERS)
        if anchored:
            _write(paths["dspark"], as_dspark, _with_markov(head, block - 1), _arrays(head) | markov)
        else:
            _write(paths["dflash"], as_dflash, head, _arrays(head))
            _write(paths["speculators"], as_speculators, head, _arrays(head))
    return Pair(trunk, **paths, prompts=prompts[TEXTS:].tolist())


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
    return drafter, {"markov.embed.weight": first.detach(), "markov.out.weight": last.detach()}


def _arrays(head: HeadCheckpoint) -> dict[str, Any]:
    return {name: torch.from_numpy(each.float32().copy()) for name, each in head.tensors.items()}


def _with_markov(head: HeadCheckpoint, drafts: int) -> HeadCheckpoint:
    assert head.spec.block
    block = replace(head.spec.block, anchor_predicts=True, block_size=drafts, markov_rank=RANK)
    return replace(head, spec=replace(head.spec, block=block))


def _add_vocabulary(config: Path) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": V, "num_target_layers": LAYERS}))


def _write(path: Path, write: Any, head: HeadCheckpoint, arrays: dict[str, Any]) -> None:
    document, named = write(head, arrays)
    path.mkdir(parents=True, exist_ok=True)
    document["max_position_embeddings"] = SIZES["max_position_embeddings"]
    save_file({name: each.contiguous() for name, each in named.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(document))
