"""Reads published block drafters: config.json and tensors -> HeadCheckpoint (see heads/block.py).

Sources: z-lab/dflash `model.py`; deepseek-ai/DeepSpec `modeling/dspark`; sgl-project/SpecForge `modeling/draft`;
vllm-project/speculators `models/{dflash,dspark}`; vLLM 0.32 `models/qwen3_d{flash,spark}.py`, for keys that only it
reads; transformers 5.23 `muse_glimmer_assistant`. Where they disagree, a file means what its publisher trained:

                 layer ids               rows of a block see each other            the anchor drafts
  z-lab, DFlash  outputs, from 0         both ways; causally in windowed layers    no
  SpecForge      outputs, from 0         likewise                                  DSpark only
  DeepSpec       outputs, from 0         both ways                                 yes (DSpark)
  speculators    inputs (z-lab's + 1)    both ways; causally in windowed layers,   DSpark only
                                         unless `sliding_window_non_causal`
  transformers   outputs, from 0         both ways, in windowed layers too         no

DFlash2 (z-lab/dflash, vLLM 0.33 `models/qwen3_dflash2.py`) equals DFlash in all of these, except that windowed layers
of speculators' files are not causal by default. `is_causal` and `dflash_config.causal` overrule the table. RoPE is
half-split unless `is_neox_style` is false.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.config import MAX_DEPTH
from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.sizes import FULL, SLIDING
from headstart.heads.base import BlockSpec, HeadSpec
from headstart.heads.kind import HeadCheckpoint, head_kind, reading_config
from headstart.heads.layouts.names import canonical, check_whole, draft_ids
from headstart.heads.published import Document, identify
from headstart.kernels.ops import AttentionSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import LayerConfig, SumTaps
from headstart.layers.mla import MLAConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import rope_spec, score_scale

SPECULATORS = "speculators_model_type"
SECTIONS = ("dflash_config", "eagle_config", "dspark_config")
"""Objects of config.json whose keys take precedence over those of the top level."""
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id")
BLOCK_KEYS = ("block_size", "dspark_block_size")
TAP_KEYS = ("target_layer_ids", "dspark_target_layer_ids")
RANK_KEYS = ("markov_rank", "dspark_markov_rank")
DFLASH2, DSPARK, KIMI = "dflash2", "dspark", "k3_dspark"
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"), "projector_type": ("dflash", "dspark"),
    "markov_head_type": ("vanilla", "gated", "rnn"),
    "use_aux_hidden_state": (True,), "attention_value_scale": (1, 1.0), "mlp_bias": (False,),
    **dict.fromkeys(("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm"), (False,)),
}  # fmt: skip
"""Keys that change the formula -> their supported values."""
THETA, KIMI_THETA, WINDOW, BLOCK = 1e6, 5e4, 4096, 8
"""Defaults: RoPE bases of a Qwen3 drafter and of Kimi-K3's in vLLM, Qwen3's sliding window, speculators' block_size."""


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    """DrafterFormat.read. Raises ModelError naming the missing, wrong or unsupported key or tensor."""
    drafter = _Drafter.of(document, path)
    where = canonical(tensors)
    named = {ours: tensors[name] for ours, name in where.items()}
    if not named:
        raise ModelError(f"{path} holds no tensors of a drafter", "download the drafter again")
    with reading_config(path, "is this a DFlash or DSpark drafter?"):
        vocab_size = drafter.number(drafter.inner, "vocab_size")
        ids = draft_ids(tensors.get("d2t"), vocab_size, path)
        rows = vocab_size if ids is None else len(ids)
        spec = drafter.spec(named, vocab_size, rows)
        hidden = drafter.number(drafter.inner, "hidden_size")
        drafter.check_target(hidden)
        optional = {"embed_tokens.weight": (vocab_size, hidden), "lm_head.weight": (rows, hidden)}
        optional_shapes = {name: shape for name, shape in optional.items() if name in named}
        check_whole(named, {**head_kind("block").shapes(spec, hidden), **optional_shapes}, path)
        verifier = (document.get("speculators_config") or {}).get("verifier") or {}
        return HeadCheckpoint(
            spec=spec, hidden_size=hidden, vocab_size=vocab_size, draft_token_ids=ids, tensors=named,
            trunk=str(verifier.get("name_or_path") or ""),
            trunk_layers=0 if drafter.kind == KIMI else int(document.get("num_target_layers") or 0),
        )  # fmt: skip


@dataclass(frozen=True)
class _Drafter:
    """The config.json of a published block drafter."""

    kind: str  # key of its DrafterFormat: dflash, dflash2, dspark or k3_dspark
    document: Document  # the whole config.json
    inner: Document  # top level, overridden by the object with the layers' sizes
    flash: Document  # merged SECTIONS
    path: Path  # its directory

    @classmethod
    def of(cls, document: Document, path: Path) -> "_Drafter":
        published = identify(document)
        kind = published.key if published else "dflash"
        flash: dict[str, Any] = {}
        for section in reversed(SECTIONS):
            if isinstance(part := document.get(section), dict):
                flash |= part
        inner = document.get("transformer_layer_config") or document.get("text_config") or {}
        return cls(kind, document, {**document, **inner}, flash, path)

    def value(self, *keys: str, default: Any = None) -> Any:
        """Value of the first of these keys that SECTIONS or else the top level contain."""
        found = (part[key] for key in keys for part in (self.flash, self.inner) if part.get(key) is not None)
        return next(found, default)

    def number(self, part: Document, key: str, default: int | None = None) -> int:
        value = part.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ModelError(f"{self.path / 'config.json'}: {key} is {value!r}, but must be a whole number above 0")
        return value

    @property
    def speculators(self) -> bool:
        return SPECULATORS in self.document

    def spec(self, named: Mapping[str, Tensor], vocab_size: int, draft_vocab_size: int) -> HeadSpec:
        """HeadSpec of the config and, for optional parts, of the tensors' presence."""
        for key, values in REFUSED.items():
            if (value := self.value(key)) is not None and value not in values:
                raise ModelError(f"{self.path}: {key} {value!r} of a {self.kind} drafter is not run here")
        anchor, causal, windows = self._anchor(), self._causal(), self._windows()
        markov, confidence = named.get("markov.out.weight"), named.get("confidence.weight")
        hidden, key = self.number(self.inner, "hidden_size"), "selector_rank" if self.selects else "markov_rank"
        rank = self.number({key: self.value(key)}, key) if self.selects else self.value(*RANK_KEYS, default=0)
        if (markov.shape[1] if markov else 0) != rank:
            what = f"of rank {markov.shape[1]}" if markov else "missing"
            of = "selector's" if self.selects else "Markov head's"
            raise ModelError(f"{self.path}: {key} is {rank}, but the {of} tensors are {what}")
        return HeadSpec(
            kind="block",
            layer=self._layer(named),
            tap=self._taps(),
            block=BlockSpec(
                block_size=self._drafts(anchor),
                num_layers=self.number(self.inner, "num_hidden_layers"),
                mask_token_id=self._mask(vocab_size),
                causal=causal[0],
                causal_windows=causal[1] and any(windows),
                anchor_predicts=anchor,
                windows=windows,
                sinks="layers.0.self_attn.sinks" in named,
                interleaved=self.value("is_neox_style", default=True) is False,
                mask_embedding="mask_embedding" in named,
                markov_rank=rank,
                markov_kind="selector" if self.selects else self.value("markov_head_type", default="vanilla"),
                confidence=confidence is not None,
                confidence_markov=confidence is None or confidence.shape[-1] != hidden,
                embedding_scale=float(self.value("input_embedding_scale", default=1.0)),
                logit_scale=float(self.value("logit_scale", "output_multiplier", default=1.0)),
                logit_softcap=float(self.value("final_logit_softcapping", default=0.0)),
                vocab_size=vocab_size,
                draft_vocab_size=draft_vocab_size,
                **(self._convolutions(hidden) if self.selects else {}),
            ),
        )

    @property
    def selects(self) -> bool:
        """True for DFlash2, which has a selector and convolutions."""
        return self.kind == DFLASH2

    def _convolutions(self, hidden: int) -> dict[str, Any]:
        keys = {"top_k": "selector_top_k", "conv_taps": "conv_kernel_size", "conv_group": "conv_group_size"}
        sizes = {name: self.number({key: self.value(key)}, key) for name, key in keys.items()}
        if hidden % sizes["conv_group"]:
            where = self.path / "config.json"
            raise ModelError(f"{where}: conv_group_size {sizes['conv_group']} does not divide hidden_size {hidden}")
        return sizes

    def _anchor(self) -> bool:
        """BlockSpec.anchor_predicts."""
        from_anchor = self.value("sample_from_anchor")
        if from_anchor is None and (bonus := self.value("dspark_bonus_anchor")) is not None:
            from_anchor = not bonus
        return self.kind in (DSPARK, KIMI) if from_anchor is None else bool(from_anchor)

    def _drafts(self, anchor: bool) -> int:
        """Number of tokens that one pass drafts: its rows, without the anchor's if that drafts none."""
        rows = self.value(*BLOCK_KEYS, default=BLOCK if self.speculators else None)
        if rows is None:
            raise ModelError(f"{self.path / 'config.json'} has no block_size", "is this a DFlash or DSpark drafter?")
        least = 1 if anchor else 2
        if type(rows) is not int or not least <= rows <= MAX_DEPTH + least - 1:
            why = f"must be {least} to {MAX_DEPTH + least - 1} rows of one pass"
            raise ModelError(f"{self.path / 'config.json'}: block_size is {rows!r}, but {why}")
        return rows - least + 1

    def _mask(self, vocab_size: int) -> int:
        mask = self.value(*MASK_KEYS)
        if type(mask) is not int or not 0 <= mask < vocab_size:
            why = f"must be a token below {vocab_size}, the drafter's vocabulary"
            raise ModelError(f"{self.path / 'config.json'}: mask_token_id is {mask!r}, but {why}")
        return mask

    def _taps(self) -> tuple[int, ...]:
        """HeadSpec.tap: layers whose inputs are read. Most publishers name layers whose outputs are read (+ 1)."""
        if self.speculators:
            ids, first = self.document.get("aux_hidden_state_layer_ids"), 0
        else:
            ids, first = self.value(*TAP_KEYS), 1
            ids = self._default_taps() if ids is None else ids
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            raise ModelError(f"{self.path / 'config.json'}: the layers that the drafter reads are {ids!r}, not a list")
        taps = [each + first for each in ids]
        return SumTaps(taps) if self.kind == KIMI else tuple(taps)

    def _default_taps(self) -> list[int]:
        """z-lab's default: as many layers as the drafter has, spread from the second to the third last."""
        layers, trunk = self.number(self.inner, "num_hidden_layers"), self.number(self.document, "num_target_layers")
        if layers == 1:
            return [trunk // 2]
        return [round(1 + i * (trunk - 4) / (layers - 1)) for i in range(layers)]

    def _causal(self) -> tuple[bool, bool]:
        """(BlockSpec.causal, BlockSpec.causal_windows)."""
        causal = self.document.get("is_causal")
        causal = self.flash.get("causal") if causal is None else causal
        if causal is not None:
            return bool(causal), bool(causal)
        if self.speculators:
            both = self.document.get("sliding_window_non_causal")
            return False, not (self.selects if both is None else both)
        own = "muse_glimmer_assistant" not in str(self.document.get("model_type"))
        return False, own and any(each == SLIDING for each in self._types())

    def _types(self) -> list[str]:
        count = self.number(self.inner, "num_hidden_layers")
        types = self.inner.get("layer_types")
        if types is None:
            first = int(self.inner.get("max_window_layers", 28)) if self.inner.get("use_sliding_window") else count
            types = [FULL if i < first else SLIDING for i in range(count)]
        unknown = {*types} - {FULL, SLIDING}
        if len(types) != count or unknown:
            raise ModelError(f"{self.path / 'config.json'}: layer_types is {types}, for {count} layers of attention")
        return list(types)

    def _windows(self) -> tuple[int, ...]:
        """BlockSpec.windows: of each layer; empty if no layer has a window."""
        types = self._types()
        sliding = [each == SLIDING for each in types]
        if self.value("use_swa") and not any(sliding):
            sliding = [True] * len(types)
        if not any(sliding):
            return ()
        default = self.inner.get("sliding_window") or (WINDOW if self.speculators else None)
        window = self.number({"sliding_window": self.flash.get("swa_window_size", default)}, "sliding_window")
        return tuple(window if each else 0 for each in sliding)

    def _layer(self, named: Mapping[str, Tensor]) -> LayerConfig:
        """The config of a layer: Qwen3's block, with norms of q and k, and attention biases everywhere or nowhere; of
        Kimi-K3's drafter latent attention."""
        if self.kind == KIMI:
            return self._latent_layer()
        heads = self.number(self.inner, "num_attention_heads")
        norm = named.get("layers.0.self_attn.q_norm.weight")
        dim = self.number(self.inner, "head_dim", norm.shape[0] if norm else None)
        bias = bool(self.inner.get("attention_bias", False))
        rope = (
            self.inner
            if self.inner.get("rope_theta") or self.inner.get("rope_parameters")
            else {**self.inner, "rope_theta": THETA}
        )
        keys = self.number(self.inner, "num_key_value_heads", heads)
        return LayerConfig(
            mixer=AttentionConfig(
                spec=AttentionSpec(heads, keys, dim, dim**-0.5),
                rope=rope_spec(rope, dim),
                qkv_bias=bias,
                o_bias=bias,
                qk_norm=True,
            ),
            mlp=MLPConfig(inner=self.number(self.inner, "intermediate_size")),
            eps=float(self.inner.get("rms_norm_eps", 1e-6)),
        )

    def _latent_layer(self) -> LayerConfig:
        if self._causal()[0] or any(self._windows()):
            raise ModelError(f"{self.path}: windows and causal blocks of latent attention are not run here")
        names = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rank, latent, nope, rotary, value = (self.number(self.inner, name) for name in names)
        eps = float(self.inner.get("rms_norm_eps", 1e-6))
        return LayerConfig(
            mixer=MLAConfig(
                num_heads=self.number(self.inner, "num_attention_heads"), query_rank=rank, latent=latent, nope=nope,
                rotary=rotary, value=value, rope=rope_spec({"rope_theta": KIMI_THETA, **self.inner}, rotary),
                scale=(nope + rotary) ** -0.5 * score_scale(self.inner), eps=eps,
            ),
            mlp=MLPConfig(inner=self.number(self.inner, "intermediate_size")),
            eps=eps,
        )  # fmt: skip

    def check_target(self, hidden: int) -> None:
        """Raises ModelError if the drafter's hidden size differs from its trunk's."""
        target = self.document.get("target_hidden_size") or hidden
        if target != hidden:
            what = f"its hidden_size is {hidden}, its trunk's {target}: they must be the same here"
            raise ModelError(f"{self.path}: {what}")
