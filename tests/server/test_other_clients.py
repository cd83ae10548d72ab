"""Clients that others have written over the official ones, where they are installed (`pip install litellm
langchain-openai instructor`)."""

from __future__ import annotations

from typing import Any

import pytest
from process import CITY, MODEL, QUESTION, Server
from pydantic import BaseModel, Field

pytestmark = [
    pytest.mark.slow,  # a server process
    pytest.mark.filterwarnings("default"),  # theirs
]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": CITY,
    },
}


class Person(BaseModel):
    """A person."""

    age: int = Field(ge=1, le=99)


@pytest.fixture(scope="module")
def text(server: Server) -> str:
    said = server.post("/v1/chat/completions", messages=QUESTION, max_tokens=20, temperature=0).json()
    return str(said["choices"][0]["message"]["content"])


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "ollama_chat", "anthropic"])
def test_litellm(server: Server, text: str, provider: str) -> None:
    litellm = pytest.importorskip("litellm")
    base = f"{server.url}/v1" if provider in ("openai", "hosted_vllm") else server.url
    asked: dict[str, Any] = {"model": f"{provider}/{MODEL}", "messages": QUESTION, "api_base": base, "api_key": "none"}
    asked |= {"max_tokens": 20, "temperature": 0}
    whole = litellm.completion(**asked)
    assert whole.choices[0].message.content == text
    assert whole.usage.completion_tokens == 20
    pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(pieces) == text
    asked |= {"tools": [WEATHER], "max_tokens": 80}
    if provider != "ollama_chat":  # which has no tool_choice
        called = litellm.completion(**asked, tool_choice="required", parallel_tool_calls=False)
        assert called.choices[0].message.tool_calls[0].function.name == "get_weather"


def test_litellm_responses_and_embeddings(server: Server, text: str) -> None:
    litellm = pytest.importorskip("litellm")
    asked = {"model": f"openai/{MODEL}", "api_base": f"{server.url}/v1", "api_key": "none"}
    said = litellm.responses(**asked, input=QUESTION[0]["content"], max_output_tokens=20, temperature=0)
    assert said.output[0].content[0].text == text
    assert len(litellm.embedding(**asked, input=["a", "b"], encoding_format="float").data) == 2
    ollama = {"model": f"ollama/{MODEL}", "api_base": server.url}
    assert len(litellm.embedding(**ollama, input=["a", "b"]).data) == 2


@pytest.mark.parametrize("responses", [False, True])
def test_langchain(server: Server, text: str, responses: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    asked = {"model": MODEL, "base_url": f"{server.url}/v1", "api_key": "none", "use_responses_api": responses}
    model = langchain.ChatOpenAI(**asked, temperature=0, max_tokens=20)
    assert model.invoke(QUESTION).text == text
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == text
    wide = langchain.ChatOpenAI(**asked, temperature=0, max_tokens=80)
    called = wide.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False).invoke(QUESTION)
    assert [call["name"] for call in called.tool_calls] == ["get_weather"]
    turns = [("user", "Weather?"), called, {"role": "tool", "tool_call_id": called.tool_calls[0]["id"], "content": "1"}]
    assert wide.bind_tools([WEATHER]).invoke(turns).usage_metadata["output_tokens"]
    assert 1 <= wide.with_structured_output(Person, method="json_schema").invoke(QUESTION).age <= 99
    del asked["use_responses_api"]
    vectors = langchain.OpenAIEmbeddings(**asked, check_embedding_ctx_length=False).embed_documents(["a", "b"])
    assert len(vectors) == 2


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "ANTHROPIC_TOOLS"])
def test_instructor(server: Server, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    if mode == "ANTHROPIC_TOOLS":
        anthropic = pytest.importorskip("anthropic").Anthropic(base_url=server.url, api_key="none")
        client = instructor.from_anthropic(anthropic, mode=instructor.Mode[mode])
    else:
        openai = pytest.importorskip("openai").OpenAI(base_url=f"{server.url}/v1", api_key="none")
        client = instructor.from_openai(openai, mode=instructor.Mode[mode])
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Anna is 30."}], "max_tokens": 200}
    asked |= {"response_model": Person, "extra_body": {"temperature": 0}}
    assert 1 <= client.chat.completions.create(**asked, max_retries=1).age <= 99
