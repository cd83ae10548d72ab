"""Engines, recognized by what they say of themselves, and what is known of how exact they are.

Only what their own documents, maintainers or source say; each with where that stands.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from headstart.tools.client import Server, get
from headstart.tools.probe.tally import Condition


@dataclass(frozen=True)
class Fault:
    """`conditions`: where it shows."""

    conditions: tuple[Condition, ...]
    says: str
    source: str


@dataclass(frozen=True)
class Engine:
    """`owner`: what `owned_by` of its models says. `page`, `member`: where its version stands."""

    name: str
    owner: str
    page: str
    member: str
    faults: tuple[Fault, ...] = ()


ENGINES = (
    Engine("headstart", "headstart", "/version", "version"),
    Engine(
        "vLLM", "vllm", "/version", "version",
        (
            Fault(("company", "warm", "drafting"),
                  "results are not reproducible by default; online only with VLLM_BATCH_INVARIANT=1, not on CPUs",
                  "https://docs.vllm.ai/en/latest/usage/reproducibility/"),
            Fault(("company",), "batch invariance: beta, GPUs and XPUs only",
                  "https://docs.vllm.ai/en/v0.32.0/features/batch_invariance/"),
            Fault(("drafting",), "speculative decoding is lossless up to numerics: batch size and rounding may show",
                  "https://docs.vllm.ai/en/v0.17.0/features/speculative_decoding/"),
            Fault(("again", "drafting", "company"), "on CPUs a request that is sampled with drafts "
                  "reads a temperature that nobody wrote, and so do greedy ones beside it (open)",
                  "https://github.com/vllm-project/vllm/issues/55005"),
            Fault(("drafting",), "n-gram drafting changed greedy output (closed as stale)",
                  "https://github.com/vllm-project/vllm/issues/41758"),
        ),
    ),
    Engine(
        "llama.cpp", "llamacpp", "/props", "build_info",
        (
            Fault(("warm",), "cache_prompt can cause nondeterministic results, as logits depend on the batch size; "
                  "--no-cache-prompt where that matters",
                  "https://github.com/ggml-org/llama.cpp/blob/master/tools/server/README.md"),
            Fault(("company",), "several slots: texts of the same seed differ, as results depend on the batch size",
                  "https://github.com/ggml-org/llama.cpp/pull/6950"),
            Fault(("drafting",), "other kernels for other batch sizes: expected, say the maintainers",
                  "https://github.com/ggml-org/llama.cpp/issues/23335"),
        ),
    ),
    Engine(
        "SGLang", "sglang", "/server_info", "version",
        (
            Fault(("company", "warm"), "dynamic batching and the radix cache change texts, unless "
                  "--enable-deterministic-inference",
                  "https://docs.sglang.io/advanced_features/deterministic_inference.html"),
            Fault(("again",), "a request's seed was not enough for the same text (open)",
                  "https://github.com/sgl-project/sglang/issues/5377"),
        ),
    ),
    Engine(
        "Ollama", "library", "/api/version", "version",
        (
            Fault(("again", "warm", "company"), "prompt caching and parallel requests change texts of one seed",
                  "https://github.com/ollama/ollama/pull/10064"),
        ),
    ),
    Engine(
        "OpenVINO Model Server", "OVMS", "/v2", "version",
        (
            Fault(("drafting",), "greedy speculative decoding changed the text (open)",
                  "https://github.com/openvinotoolkit/openvino.genai/issues/4476"),
        ),
    ),
)  # fmt: skip
SLOTS = "total_slots"
"""Of llama.cpp's /props: how many requests run at a time."""


@dataclass(frozen=True)
class Recognized:
    """`slots` None: it does not tell, or has no such limit."""

    engine: Engine | None
    version: str | None = None
    slots: int | None = None

    @property
    def name(self) -> str | None:
        return self.engine.name if self.engine else None

    @property
    def faults(self) -> tuple[Fault, ...]:
        return self.engine.faults if self.engine else ()

    def __str__(self) -> str:
        return " ".join(each for each in (self.name, self.version) if each) or "an engine that does not say its name"


def recognize(server: Server, listed: dict[str, Any]) -> Recognized:
    """By the model's entry in /v1/models, and a page that only this engine has."""
    engine = next((each for each in ENGINES if each.owner == listed.get("owned_by")), None)
    if engine is None:
        return Recognized(None)
    page = _page(server, engine.page)
    version, slots = page.get(engine.member), page.get(SLOTS)
    return Recognized(engine, version if isinstance(version, str) else None, slots if isinstance(slots, int) else None)


def _page(server: Server, path: str) -> dict[str, Any]:
    """Its JSON object; empty where there is none."""
    try:
        found = json.loads(asyncio.run(get(server, path)).body)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
