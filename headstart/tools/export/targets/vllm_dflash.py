"""A block drafter in DFlash's layout, for vLLM, SGLang and llama.cpp's converter."""

from __future__ import annotations

from headstart.heads.layouts.writing import as_dflash
from headstart.tools.export.blocks import block_plan
from headstart.tools.export.plan import Plan
from headstart.tools.export.source import Request

USE = (
    "vllm serve MODEL --speculative-config "
    """'{{"method": "dflash", "model": "{out}", "num_speculative_tokens": DEPTH}}'"""
)


def plan(request: Request) -> Plan:
    """Raises ModelError for a head that DFlash's layout has no place for."""
    return block_plan(request.source("block"), as_dflash, USE)


EXPORT = plan
