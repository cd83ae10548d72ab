"""DeepSeek-V3's MTP module as an EAGLE drafter for vLLM: {"method": "eagle", "model": DIR}.

vLLM 0.32 `model_executor/models/deepseek_eagle.py` has the module's own formula: fc[enorm(e) ; hnorm(h)], the block,
norm, and the normed vector for logits and next step. Embedding and LM head are the target's. Tensors keep their types:
vLLM builds the drafter with the target's quantization.

EAGLE drafters of other families (`llama_eagle.py` and its kin) have no norms before the projection or after the block,
so they cannot hold an MTP module.
"""

from headstart.errors import ModelError
from headstart.formats.safetensors import copied
from headstart.tools.export.module import architectures, count_modules, cut_module, find_module
from headstart.tools.export.plan import Plan, single_file, vllm_use
from headstart.tools.export.source import ExportRequest

NAMES = {"eh_proj": "fc", "shared_head.norm": "norm", "enorm": "enorm", "hnorm": "hnorm"}
SHARED = ("embed_tokens.", "shared_head.head.")


def plan(request: ExportRequest) -> Plan:
    """Plans the directory. Raises ModelError if no EAGLE class of vLLM has the module's formula."""
    if request.has_own_head:
        hint = "--to vllm-mimo writes an MTP head, --to vllm-eagle3 an EAGLE-3 head"
        raise ModelError("an EAGLE drafter has no norms around its projection, but heads trained here have", hint)
    source = request.directory
    place = find_module(source.config)
    if place is None or not place.layout.vllm_eagle:
        model_type = place.model_type if place else source.config.get("model_type")
        what = f"vLLM has no EAGLE drafter with the formula of {model_type}'s MTP module (norms, own block)"
        hint = """vLLM reads the module out of the model itself: --speculative-config '{"method": "mtp"}'"""
        raise ModelError(what, hint)
    count_modules(place)
    planned = []
    for name, stored in cut_module(source, place).tensors.items():
        rest = place.inside(name)
        if rest is None or rest.startswith(SHARED):
            continue
        part = next((part for part in NAMES if rest.startswith(f"{part}.")), None)
        planned.append(copied(NAMES[part] + rest.removeprefix(part) if part else f"layers.0.{rest}", stored))
    config = {
        **source.config, "architectures": architectures(source.config) or ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 1, "num_nextn_predict_layers": 1, "first_k_dense_replace": 0,
    }  # fmt: skip
    return single_file(planned, config, vllm_use("eagle"))


EXPORT = plan
