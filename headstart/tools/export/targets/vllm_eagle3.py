"""An EAGLE-3 head in its published layout, for vLLM, SGLang, llama.cpp's converter and OpenVINO."""

from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import Planned, copied
from headstart.formats.safetensors_file import read_file
from headstart.heads.eagle3 import TAPS, published
from headstart.heads.published import MARK
from headstart.layers.decoder import tapped_layers
from headstart.tools.export.blocks import planned_tensors
from headstart.tools.export.plan import Plan, single_file, vllm_use
from headstart.tools.export.source import ExportRequest, ExportSource

USE = vllm_use("eagle3")


def plan(request: ExportRequest) -> Plan:
    """Plans the directory. Raises ModelError for a head of another kind."""
    source = request.source("eagle3")
    if source.head.spec.kind != "eagle3":
        hint = "headstart train --kind eagle3 makes one; an MTP head goes with --to vllm-mimo"
        raise ModelError(f"the head {source.head_path} is of kind {source.head.spec.kind}, not eagle3", hint)
    document, planned = published_files(source)
    return single_file(planned, dict(document), USE)


def published_files(source: ExportSource) -> tuple[Mapping[str, Any], list[Planned]]:
    """Returns config.json and tensors of an EAGLE-3 head under published names. A published directory gets only a list
    of layers: vLLM reads the one in `eagle_config` with other numbers than SpecForge (see heads/eagle3.py)."""
    document = read_object(source.head_path / "config.json")
    if MARK in document:
        document, named = published(source.head, source.head_tensors, source.sizes.max_length)
        return document, planned_tensors(named)
    if taps := tapped_layers(source.head.spec.tap):
        document = {**document, TAPS: list(taps)}
    return document, [copied(*each) for each in read_file(source.head_path / "model.safetensors").items()]


EXPORT = plan
