"""The table of sampling parameters, request bodies derived from it, and its copy in docs/server.md.

`python tests/server/test_parameters.py` writes the copy."""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

from headstart.params import Parameter, SamplingParams, names_in, parameters
from headstart.server.apis.messages import MessagesRequest
from headstart.server.apis.responses import ResponsesRequest
from headstart.server.pages import _controls
from headstart.server.schema import ChatRequest, CompletionRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "server.md"
BEGIN, END = "<!-- sampling parameters -->\n", "<!-- /sampling parameters -->\n"
KINDS = {
    "number": "number", "integer": "integer", "boolean": "true or false", "texts": "texts", "token_ids": "token ids",
    "token_numbers": "object",
}  # fmt: skip


def markdown_table() -> str:
    """The table as Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in _rows())


def _rows() -> Iterator[list[str]]:
    yield ["field", "type", "default", "meaning", "elsewhere"]
    yield ["---"] * 5
    for row in parameters().values():
        yield [f"`{row.name}`", _type(row), _default(row), row.help.removesuffix("."), _elsewhere(row)]


def _type(row: Parameter) -> str:
    low = row.low if row.http_low is None else row.http_low
    shown = low if isinstance(low, int) else f"{low:g}"
    bounds = "" if math.isinf(low) else f", from {shown}" if math.isinf(row.high) else f", {shown} to {row.high}"
    return KINDS[row.kind] + bounds


def _default(row: Parameter) -> str:
    default = row.default if row.http_default is None else row.http_default
    if row.name == "max_tokens":
        return "chats: the context; completions: 16"
    shown = json.dumps(default) if isinstance(default, bool | int | float) else "none"
    return "the model's, else " * row.in_generation_config + shown.removesuffix(".0")


def _elsewhere(row: Parameter) -> str:
    titles = {"anthropic": "Anthropic", "responses": "Responses", "ollama": "Ollama"}
    own = [f"{titles[api]} `{name}`" for api, name in row.names.items() if name != row.name]
    return ", ".join([f"`{row.flag}`"] * (row.flag is not None) + own)


def test_docs_contain_the_table() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == markdown_table(), f"run python {Path(__file__).name}"


def test_request_bodies_have_all_parameters() -> None:
    assert set(SamplingParams.__dataclass_fields__) == set(parameters())
    for model in (ChatRequest, CompletionRequest):
        assert set(parameters()) <= set(model.model_fields)
    assert set(names_in("anthropic").values()) <= set(MessagesRequest.model_fields)
    assert set(names_in("responses").values()) <= set(ResponsesRequest.model_fields)


def test_playground_has_the_parameters_with_a_control() -> None:
    (shown,) = re.findall(r"^export const PARAMETERS = (.*);$", _controls().decode(), re.MULTILINE)
    assert [each["name"] for each in json.loads(shown)] == [row.name for row in parameters().values() if row.control]


if __name__ == "__main__":
    before, _, rest = DOCUMENT.read_text("utf-8").partition(BEGIN)
    DOCUMENT.write_text(before + BEGIN + markdown_table() + END + rest.partition(END)[2], "utf-8")
