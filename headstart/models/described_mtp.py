"""MTP modules of families that the engine cannot run: the tensors that other engines load, as far as known.

Sources: vLLM 0.33 (vllm/model_executor/models/*_mtp.py, vllm/models/*), transformers 5.23, SGLang 0.5.23, llama.cpp
b11434 (src/models, conversion/).
"""

from collections.abc import Callable, Mapping

from headstart.formats.sizes import Sizes
from headstart.heads.published import DeclaredShapes, Present, attention_shapes, latent_shapes
from headstart.models.mtp import MAX_EXPERTS, MTPLayout

SHARED_COUNTS = ("n_shared_experts", "num_shared_experts")
LAYER = "layers.{layer}."
Part = Callable[[str, Sizes, Present], DeclaredShapes]
"""(prefix of names, sizes, names in the files) -> declared shapes of some tensors of a module."""


def _module(at: str, *parts: Part, first: Part | None = None) -> Callable[[Sizes, int, int, Present], DeclaredShapes]:
    """Makes MTPLayout.tensors from parts under the prefix `at`; {i} stands for the module's number, {layer} for its
    layer number after the trunk's layers. first: tensors that all modules share, declared with module 0."""

    def tensors(s: Sizes, i: int, layer: int, present: Present) -> DeclaredShapes:
        shapes = first("", s, present) if first and not i else {}
        for part in parts:
            shapes |= part(at.format(i=i, layer=layer), s, present)
        return shapes

    return tensors


def _vectors(*names: str) -> Part:
    return lambda at, s, present: {f"{at}{name}.weight": (s["hidden"],) for name in names}


_norms = _vectors("input_layernorm", "post_attention_layernorm")
_final_norm = _vectors("final_layernorm")


def _fusion(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    return {f"{at}eh_proj.weight": (s["hidden"], 2 * s["hidden"]), **_vectors("enorm", "hnorm")(at, s, present)}


def _deepseek(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    """Projection, norms and copies of DeepSeek-V3's module."""
    hidden, vocabulary = s["hidden"], s["vocabulary"]
    return {
        **_fusion(at, s, present),
        f"{at}shared_head.norm.weight": (hidden,),
        f"?{at}embed_tokens.weight": (vocabulary, hidden),
        f"?{at}shared_head.head.weight": (vocabulary, hidden),
    }


def _latent(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    """Latent attention with optional gate and sinks."""
    at = f"{at}self_attn."
    return {
        **latent_shapes(at, s, compressed=bool(s.config.get("q_lora_rank"))),
        f"?{at}g_proj.weight": (None, s["hidden"]),
        f"?{at}gate_proj.weight": (None, s["hidden"]),
        f"?{at}sinks": (s["heads"],),
        f"?{at}learnable_sink_param": (None,),
    }


def _attention(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    return attention_shapes(f"{at}self_attn.", s, present)


def _windowed(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    """MiMo-V2's sliding-window attention, whose head sizes differ from those of full attention, and its sinks."""
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    own = {"num_key_value_heads": 2 * s["kv_heads"]}
    own |= {key: s.config[f"swa_{key}"] for key in keys if s.config.get(f"swa_{key}") is not None}
    sizes = s.replaced(own)
    names = [name for name in ("attention_sink_bias", "sinks") if f"{at}self_attn.{name}" in present]
    optional = "" if s.config.get("add_swa_attention_sink_bias") else "?"
    sinks = {f"{optional}{at}self_attn.{(names or ['attention_sink_bias'])[0]}": (sizes["heads"],)}
    return _attention(at, sizes, present) | sinks


def _mlp(at: str, hidden: object, inner: object) -> DeclaredShapes:
    up, down = (inner, hidden), (hidden, inner)
    return {f"{at}gate_proj.weight": up, f"{at}up_proj.weight": up, f"{at}down_proj.weight": down}


def _dense(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    return _mlp(f"{at}mlp.", s["hidden"], s["inner"])


def _experts(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    """Router and experts; experts as single matrices, or stacked in either orientation."""
    hidden, inner, count = s["hidden"], s["expert_inner"], s["experts"]
    found: DeclaredShapes = {f"{at}mlp.gate.weight": (count, hidden)}
    if f"{at}mlp.experts.gate_up_proj" in present:
        return found | {f"{at}mlp.experts.{name}": (count, None, None) for name in ("gate_up_proj", "down_proj")}
    for expert in range(min(count, MAX_EXPERTS) if isinstance(count, int) else 0):
        found |= _mlp(f"{at}mlp.experts.{expert}.", hidden, inner)
    return found


def _deepseek_experts(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    found = _experts(at, s, present) | {f"{at}mlp.gate.e_score_correction_bias": (s["experts"],)}
    shared = any(s.config.get(key) for key in SHARED_COUNTS)
    return found | (_mlp(f"{at}mlp.shared_experts.", s["hidden"], s["shared_inner"]) if shared else {})


def _dots3_embedding(at: str, s: Sizes, present: Present) -> DeclaredShapes:
    return {"mtp.embed_tokens.weight": (s["vocabulary"], s["hidden"])}


LAYOUTS: Mapping[str, MTPLayout] = {
    "glm_ocr": MTPLayout(title="GLM-OCR", tensors=_module(LAYER, _deepseek, _norms, _attention)),
    "mimo_v2": MTPLayout(
        title="MiMo-V2 (Flash, Pro, Omni)",
        architectures=("mimov2",),
        released=3,
        rope="sliding",
        not_xllm="its modules are under model.mtp.layers and have another formula",
        trailing=False,
        tensors=_module(
            "mtp.layers.{i}.", _fusion, _final_norm, _vectors("input_layernorm", "pre_mlp_layernorm"), _windowed, _dense
        ),
        closed=True,
    ),
    "pangu_ultra_moe": MTPLayout(
        title="openPangu", tensors=_module(LAYER, _deepseek, _norms, _latent, _deepseek_experts)
    ),
    "dots3_note": MTPLayout(
        title="dots3_note",
        own=("embedding",),
        default=1,
        per_module=("mtp_layer_types",),
        tensors=_module(LAYER, _fusion, _vectors("shared_head.norm"), first=_dots3_embedding),
    ),
}
"""Name of a family in described.py -> its MTP modules."""
