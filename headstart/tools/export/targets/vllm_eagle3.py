"""An EAGLE-3 head in its own layout, for vLLM, SGLang, llama.cpp's converter and OpenVINO."""

from headstart.errors import ModelError
from headstart.tools.export.plan import Plan, vllm_use
from headstart.tools.export.source import Request

USE = vllm_use("eagle3", 3)


def plan(request: Request) -> Plan:
    """Plans copies of the head's files. Raises ModelError for a head of another kind."""
    source = request.source("eagle3")
    if source.head.spec.kind != "eagle3":
        hint = "headstart train --kind eagle3 makes one; an MTP head goes with --to vllm-mimo"
        raise ModelError(f"the head {source.head_path} is of kind {source.head.spec.kind}, not eagle3", hint)
    names = ("config.json", "model.safetensors")
    return Plan(copies={name: source.head_path / name for name in names}, use=USE)


EXPORT = plan
