"""Valid and invalid requests generated from the OpenAPI description cause no server error."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from process import running
from support import PATIENCE
from tiny_models import write_tiny

from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.server.schema import ChatRequest, CompletionRequest

schemathesis = pytest.importorskip("schemathesis")

pytestmark = pytest.mark.slow  # a server process
PATHS = {
    "/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/{name}", "/tokenize", "/detokenize",
    "/health", "/ping", "/ready", "/version", "/metrics", "/api/tags", "/api/ps", "/api/version", "/replicas",
}  # fmt: skip
TRANSLATED = {
    "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/api/chat", "/api/generate", "/api/show",
    "/api/pull", "/v1/embeddings", "/api/embed", "/api/embeddings", "/v1/completions/render",
    "/v1/chat/completions/render", "/v1/responses/render", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/v1/responses/input_tokens",
}  # fmt: skip
POSTED = {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", *TRANSLATED}
EXAMPLES, FEW = 25, 4


@pytest.fixture(scope="module")
def operations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Path -> operation of a server with a tiny model with a context for long generated prompts."""
    model = write_tiny("mimo", tmp_path_factory.mktemp("model"), vocab_size=512, max_position_embeddings=32768)
    with running(str(model), "--chat-template", "chatml", "--threads", "1", "--max-num-seqs", "16") as server:
        api = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        yield {found.ok().path: found.ok() for found in api.get_all_operations()}


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        (path, mode)
        for mode in schemathesis.GenerationMode
        for path in sorted(PATHS | TRANSLATED if mode.is_positive else POSTED)
    ],
)
def test_generated_requests_cause_no_server_error(operations: dict[str, Any], path: str, mode: Any) -> None:
    assert set(operations) == PATHS | TRANSLATED

    @given(case=operations[path].as_strategy(generation_mode=mode))
    @settings(
        max_examples=FEW if path in TRANSLATED else EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck)
    )
    def check(case: Any) -> None:
        if isinstance(case.body, dict):  # short answers suffice
            limits = {
                name: case.body.get(name, 8) for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
            }
            case.body |= {name: min(value, 8) for name, value in limits.items() if type(value) is int}
            if path.startswith("/api/"):
                case.body["options"] = {"num_predict": 8}
        answer = case.call(timeout=PATIENCE)
        assert answer.status_code < 500, answer.text
        if answer.status_code >= 400:
            assert "error" in answer.json()

    check()


def test_openapi_bounds_equal_the_checked_bounds() -> None:
    found = set()
    for model in (ChatRequest, CompletionRequest):
        for name, field in model.model_json_schema()["properties"].items():
            bounds = next((option for option in field.get("anyOf", ()) if "minimum" in option), None)
            if bounds is None or name not in SamplingParams.__dataclass_fields__:
                continue
            found.add(name)
            for beyond in (bounds["minimum"] - 1, bounds.get("maximum", math.inf) + 1):
                with pytest.raises(UsageError, match=name):
                    SamplingParams(**{name: beyond})
    assert {"temperature", "top_p", "n", "seed", "prompt_logprobs"} <= found
