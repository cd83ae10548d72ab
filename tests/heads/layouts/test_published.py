"""Block drafters as five projects publish them: read, run on a trunk, and written back with equal tensors."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import support

from headstart.engine.load import attach_head
from headstart.errors import ModelError
from headstart.formats.safetensors import save
from headstart.formats.safetensors_file import read_file
from headstart.heads.base import BlockSpec
from headstart.heads.files import is_head, read_head
from headstart.heads.layouts.writing import as_dflash, as_dspark, as_speculators
from headstart.models.small import random_arrays

H, V, TRUNK, LAYERS, RANK, DRAFT = 48, support.VOCAB, 8, 2, 6, 40
INNER = {
    "model_type": "qwen3", "hidden_size": H, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "attention_bias": False, "max_position_embeddings": 512, "vocab_size": V,
    "layer_types": ["full_attention"] * LAYERS, "sliding_window": None, "use_sliding_window": False,
    "tie_word_embeddings": False,
}  # fmt: skip
"""What SpecForge's configs/*.json and z-lab's files have in common."""
SWA = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12, "use_sliding_window": True}
MARKOV = {"markov_rank": RANK, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}
FACTS = BlockSpec(
    block_size=4, num_layers=LAYERS, mask_token_id=7, causal=False, anchor_predicts=True, markov_rank=RANK,
    confidence=True, vocab_size=V, draft_vocab_size=V,
)  # fmt: skip
PLAIN = replace(FACTS, anchor_predicts=False, markov_rank=0, confidence=False)
NAMES = {
    "fc.weight": (H, 3 * H), "hidden_norm.weight": (H,), "norm.weight": (H,),
    **{
        f"layers.{i}.{name}.weight": shape
        for i in range(LAYERS)
        for name, shape in {
            "input_layernorm": (H,), "post_attention_layernorm": (H,), "self_attn.q_proj": (48, H),
            "self_attn.k_proj": (16, H), "self_attn.v_proj": (16, H), "self_attn.o_proj": (H, 48),
            "self_attn.q_norm": (8,), "self_attn.k_norm": (8,), "mlp.gate_proj": (80, H), "mlp.up_proj": (80, H),
            "mlp.down_proj": (H, 80),
        }.items()},
}  # fmt: skip
"""Tensors of every publisher."""
MARKOV_NAMES = {"markov_head.markov_w1.weight": (V, RANK), "markov_head.markov_w2.weight": (V, RANK)}
CONFIDENCE_NAMES = {"confidence_head.proj.weight": (1, H + RANK), "confidence_head.proj.bias": (1,)}
SELECTOR = {"selector_rank": RANK, "selector_top_k": 9, "conv_kernel_size": 2, "conv_group_size": 16}
SELECTING = replace(PLAIN, markov_rank=RANK, markov_kind="selector", top_k=9, conv_taps=2, conv_group=16)
SELECTS = {
    "candidate_selector.predecessor_codebook": (V, RANK), "candidate_selector.successor_codebook": (V, RANK),
    "candidate_selector.hidden_projection.weight": (RANK, H),
}  # fmt: skip
CONVS = {
    f"layers.{i}.{part}_conv.{name}": shape
    for i in range(LAYERS)
    for part in ("attention", "mlp")
    for name, shape in {"base_kernel": (2, 2, H), "kernel_projection.weight": (2 * 2 * (H // 16), H)}.items()
}
OWN = {"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}


@dataclass(frozen=True)
class Published:
    """A published form: config.json, tensors besides NAMES, the facts read, and the writer of its layout or None.
    Config keys in `same` are written back unchanged."""

    config: dict[str, Any]
    facts: BlockSpec
    write: Callable[..., Any] | None
    tensors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ids: np.ndarray | None = None
    same: tuple[str, ...] = ()


def speculators(kind: str, anchor: bool, **more: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind, "architectures": [f"D{'Spark' if kind == 'dspark' else 'Flash'}Speculator"],
        "aux_hidden_state_layer_ids": [2, 4, 6], "mask_token_id": 7, "block_size": 4 if anchor else 5,
        "draft_vocab_size": V, "sample_from_anchor": anchor, "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/model", "architectures": ["X"]}},
        "transformer_layer_config": INNER,
    } | more  # fmt: skip


ZLAB = {**INNER, "architectures": ["DFlashDraftModel"], "num_target_layers": TRUNK, "block_size": 5}
FLASH = {"mask_token_id": 7, "target_layer_ids": [1, 3, 5]}
DEEPSPEC = {**INNER, "architectures": ["Qwen3DSparkModel"], "num_target_layers": TRUNK, "block_size": 4, **FLASH}
TOP = ("architectures", "block_size", "num_target_layers")
PUBLISHED: dict[str, Published] = {
    "z-lab": Published(ZLAB | {"dflash_config": FLASH}, PLAIN, as_dflash, same=(*TOP, "dflash_config")),
    "SpecForge, windows": Published(
        ZLAB | SWA | {"dflash_config": FLASH}, replace(PLAIN, windows=(12, 0), causal_windows=True), as_dflash,
        same=(*TOP, "dflash_config", "layer_types", "sliding_window")),
    "SpecForge, DSpark": Published(
        ZLAB | {
            "architectures": ["DSparkDraftModel"], "block_size": 4,
            "dflash_config": FLASH | MARKOV | CONFIDENCE | {
                "projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}},
        FACTS, as_dspark, {**MARKOV_NAMES, **CONFIDENCE_NAMES}, same=("block_size", "num_target_layers")),
    "DeepSpec": Published(
        DEEPSPEC | MARKOV | CONFIDENCE | {"num_anchors": 512}, FACTS, as_dspark,
        {**MARKOV_NAMES, **CONFIDENCE_NAMES, **OWN}, same=(*TOP, *FLASH, *MARKOV, *CONFIDENCE)),
    "DeepSpec, gated": Published(
        DEEPSPEC | MARKOV | {"markov_head_type": "gated"},
        replace(FACTS, markov_kind="gated", confidence=False), as_dspark,
        MARKOV_NAMES | {"markov_head.gate_proj.weight": (RANK, H + RANK), "markov_head.gate_proj.bias": (RANK,)},
        same=("markov_rank", "markov_head_type")),
    "speculators, recurrent": Published(
        speculators("dspark", anchor=True, **MARKOV | {"markov_head_type": "rnn"}, **CONFIDENCE),
        replace(FACTS, markov_kind="rnn"), as_speculators,
        {**MARKOV_NAMES, **CONFIDENCE_NAMES, **OWN, "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H),
         "markov_head.joint_proj.bias": (3 * RANK,)},
        same=("markov_rank", "markov_head_type")),
    "z-lab, DFlash2": Published(
        ZLAB | {
            "architectures": ["DFlash2DraftModel"], "block_size": None,
            "dflash_config": FLASH | SELECTOR | {
                "block_size": 5, "input_embedding_scale": 2.0, "output_multiplier": 0.5,
                "final_logit_softcapping": 30.0}},
        replace(SELECTING, embedding_scale=2.0, logit_scale=0.5, logit_softcap=30.0), None,
        {**CONVS, **{name.replace("book", "book.weight"): shape for name, shape in SELECTS.items()}}),
    "speculators, DFlash2": Published(
        speculators("dflash2", anchor=False, **SELECTOR, transformer_layer_config=INNER | SWA)
        | {"sliding_window_non_causal": None},
        replace(SELECTING, windows=(12, 0)), None, {**CONVS, **SELECTS, **OWN}),
    "vLLM": Published(
        ZLAB | {
            "dflash_config": FLASH | {"causal": True, "attention_sink_bias": True}, "is_neox_style": False,
            "logit_scale": 0.5, "draft_vocab_size": DRAFT, "target_hidden_size": H},
        replace(PLAIN, causal=True, interleaved=True, sinks=True, logit_scale=0.5, draft_vocab_size=DRAFT), as_dflash,
        {f"layers.{i}.self_attn.attention_sink_bias": (6,) for i in range(LAYERS)} | {"lm_head.weight": (DRAFT, H)},
        ids=np.arange(1, 3 * DRAFT, 3),
        same=(*TOP, "dflash_config", "is_neox_style", "logit_scale", "draft_vocab_size", "target_hidden_size")),
    "speculators, DFlash": Published(
        speculators("dflash", anchor=False, draft_vocab_size=DRAFT), replace(PLAIN, draft_vocab_size=DRAFT),
        as_speculators, {"embed_tokens.weight": (V, H), "lm_head.weight": (DRAFT, H)}, np.arange(1, 3 * DRAFT, 3),
        same=("block_size", "draft_vocab_size", "aux_hidden_state_layer_ids", "mask_token_id", "sample_from_anchor")),
    "speculators, windows": Published(
        speculators("dflash", anchor=False, transformer_layer_config=INNER | SWA),
        replace(PLAIN, windows=(12, 0), causal_windows=True), as_speculators, OWN,
        same=("sliding_window_non_causal", "aux_hidden_state_layer_ids")),
    "speculators, DSpark": Published(
        speculators("dspark", anchor=True, **MARKOV, **CONFIDENCE), FACTS, as_speculators,
        {**MARKOV_NAMES, **CONFIDENCE_NAMES, **OWN},
        same=("architectures", "block_size", "sample_from_anchor", "speculators_model_type", *MARKOV, *CONFIDENCE)),
}  # fmt: skip


def write_published(path: Path, each: Published, **changes: Any) -> Path:
    """The folder of a published form, with random tensors."""
    arrays: dict[str, Any] = dict(random_arrays({**NAMES, **each.tensors}, seed=3))
    if each.ids is not None:
        mask = np.zeros(V, np.bool_)
        mask[each.ids] = True
        arrays |= {"d2t": each.ids - np.arange(len(each.ids)), "t2d": mask}
    return write_folder(path, {**each.config, **changes}, arrays)


trunk_of = partial(support.tiny_model, "llama", num_hidden_layers=TRUNK)


def write_folder(path: Path, config: dict[str, Any], arrays: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    save(path / "model.safetensors", arrays)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_forms_round_trip(tmp_path: Path, name: str) -> None:
    each = PUBLISHED[name]
    path = write_published(tmp_path / "a", each)
    assert is_head(path)
    head = read_head(path)
    assert (head.spec.kind, head.spec.block, head.spec.tap) == ("block", each.facts, (2, 4, 6))
    assert (head.hidden_size, head.vocab_size) == (H, V)
    attached = attach_head(trunk_of(), path)
    assert attached.spec.depth_limit == 4 and (attached.lm_head is None) == ("lm_head.weight" not in each.tensors)
    if each.write is None:
        return
    document, arrays = each.write(head, {name: tensor.float32() for name, tensor in head.tensors.items()})
    assert read_head(write_folder(tmp_path / "b", document, arrays)).spec == head.spec
    before, after = read_file(path / "model.safetensors"), read_file(tmp_path / "b" / "model.safetensors")
    assert before.keys() == after.keys() and all((before[name].data == after[name].data).all() for name in before)
    assert {key: document[key] for key in each.same} == {key: each.config[key] for key in each.same}


def test_layer_ids_of_speculators_are_offset_by_one(tmp_path: Path) -> None:
    """Equal ids mean other hidden states in the two layouts; `inspect --deep` detects a converter that ignores this."""
    flash, other = PUBLISHED["z-lab"], PUBLISHED["speculators, windows"]
    ids = {"aux_hidden_state_layer_ids": [1, 3, 5]}
    assert read_head(write_published(tmp_path / "a", flash)).spec.tap == (2, 4, 6)
    assert read_head(write_published(tmp_path / "b", other, **ids)).spec.tap == (1, 3, 5)


def test_alternative_tensor_names_and_default_layer_ids_are_read(tmp_path: Path) -> None:
    """Tensor names of vLLM and transformers; configs without layer ids."""
    each, arrays = PUBLISHED["z-lab"], random_arrays(NAMES, seed=3)
    renamed = {
        "model." + name.replace("fc.", "encoder.fc.").replace("layers.0.", "midlayer."): array
        for name, array in arrays.items() if name != "hidden_norm.weight"
    }  # fmt: skip
    renamed["encoder.output_norm_enc.weight"] = arrays["hidden_norm.weight"]
    renamed["verifier_norm.weight"] = arrays["norm.weight"]
    assert read_head(write_folder(tmp_path / "a", each.config, renamed)).tensors["fuse.weight"].shape == (H, 3 * H)
    config = {**each.config, "dflash_config": {"mask_token_id": 7}, "num_target_layers": 10}
    two = {**arrays, "fc.weight": np.ascontiguousarray(arrays["fc.weight"][:, : 2 * H])}
    assert read_head(write_folder(tmp_path / "b", config, two)).spec.tap == (2, 8)
    assistant = {**INNER, **SWA, **FLASH, "model_type": "muse_glimmer_assistant", "block_size": 5}
    assert read_head(write_folder(tmp_path / "c", assistant, renamed)).spec.block == replace(PLAIN, windows=(12, 0))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "block size 0": ("z-lab", {"block_size": 0}, "block_size is 0, but must be 2 to 17"),
    "only the anchor": ("z-lab", {"block_size": 1}, "block_size is 1, but"),
    "no draft": ("DeepSpec", {"block_size": 0}, "block_size is 0, but must be 1 to 16"),
    "long": ("DeepSpec", {"block_size": 17}, "block_size is 17, but"),
    "no block size": ("z-lab", {"block_size": None}, "has no block_size"),
    "mask": ("z-lab", {"dflash_config": FLASH | {"mask_token_id": V}}, f"mask_token_id is {V}, but must be"),
    "no mask": ("DeepSpec", {"mask_token_id": None}, "mask_token_id is None"),
    "taps": ("z-lab", {"dflash_config": FLASH | {"target_layer_ids": [1, "3", 5]}}, "layers that the drafter reads"),
    "fewer taps": ("z-lab", {"dflash_config": FLASH | {"target_layer_ids": [1, 3]}}, r"fc.weight is \[48, 144\], but"),
    "rank": ("DeepSpec", {"markov_rank": 8}, "markov_rank is 8, but the Markov head's tensors are of rank 6"),
    "gated": ("DeepSpec", {"markov_head_type": "gated"}, "holds no markov_head.gate_proj.weight and 1 more"),
    "another form": ("DeepSpec", {"markov_head_type": "lstm"}, "markov_head_type 'lstm' of a dspark drafter"),
    "domino": ("z-lab", {"dflash_config": FLASH | {"projector_type": "domino"}}, "projector_type 'domino'"),
    "no selector": ("z-lab", {"architectures": ["DFlash2DraftModel"]}, "selector_rank is None"),
    "groups": (
        "z-lab, DFlash2", {"dflash_config": FLASH | SELECTOR | {"block_size": 5, "conv_group_size": 7}},
        "conv_group_size 7 does not divide hidden_size 48"),
    "wide": ("z-lab", {"target_hidden_size": 64}, "hidden_size is 48, its trunk's 64"),
    "layer types": ("z-lab", {"layer_types": ["full_attention"]}, "for 2 layers of attention"),
    "no window": ("z-lab", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
    "no sizes": ("z-lab", {"intermediate_size": None}, "intermediate_size is None"),
    "rope": ("z-lab", {"rope_scaling": {"rope_type": "odd"}}, "rope scaling type 'odd' is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_invalid_configs_are_refused(tmp_path: Path, name: str) -> None:
    publisher, changes, message = WRONG[name]
    with pytest.raises(ModelError, match=message):
        read_head(write_published(tmp_path, PUBLISHED[publisher], **changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"fc.weight": None}, "holds no fc.weight"),
    ({"layers.1.self_attn.q_norm.weight": None, "norm.weight": None}, "holds no norm.weight and 1 more"),
    ({"norm.weight": np.ones(H + 1, np.float32)}, r"norm.weight is \[49\], but config.json asks for \[48\]"),
    ({"layers.0.self_attn.g_proj.weight": np.ones((H, H), np.float32)}, "holds layers.0.self_attn.g_proj.weight"),
    ({"d2t": np.full(DRAFT, V), "t2d": np.ones(V, np.bool_)}, "d2t does not give ascending ids below"),
])  # fmt: skip
def test_invalid_tensors_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    arrays = {**random_arrays(NAMES, seed=3), **changes}
    path = write_folder(
        tmp_path, PUBLISHED["z-lab"].config, {n: each for n, each in arrays.items() if each is not None}
    )
    with pytest.raises(ModelError, match=message):
        read_head(path)


def test_drafters_of_another_trunk_are_refused(tmp_path: Path) -> None:
    """The message names the size that differs."""
    for sizes, message in (
        ({"num_hidden_layers": 9}, "num_layers is 8, the model's is 9"),
        ({"hidden_size": 64}, "hidden_size is 48, the model's is 64"),
        ({"vocab_size": 100}, "vocab_size is 131, the model's is 100"),
    ):
        with pytest.raises(ModelError, match=f"its {message}"):
            attach_head(trunk_of(**sizes), write_published(tmp_path, PUBLISHED["z-lab"]))
    too_deep = {"dflash_config": FLASH | {"target_layer_ids": [1, 3, 7]}}
    with pytest.raises(ModelError, match=r"taps the streams before the layers \[2, 4, 8\]"):
        attach_head(trunk_of(), write_published(tmp_path / "far", PUBLISHED["z-lab"], **too_deep))


def test_writers_refuse_facts_without_a_place(tmp_path: Path) -> None:
    head = read_head(write_published(tmp_path, PUBLISHED["DeepSpec"]))
    for write, changes, message in (
        (as_dflash, {}, "DFlash has no Markov"),
        (as_speculators, {"interleaved": True}, "no place for an interleaved RoPE"),
    ):
        with pytest.raises(ModelError, match=message):
            write(replace(head, spec=replace(head.spec, block=replace(head.spec.block, **changes))), {})
