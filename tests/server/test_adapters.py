"""LoRA adapters over HTTP: selected by model name in every API, loaded at start or by a client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inside import LlmServer, serve_llm
from lora_files import random_adapter
from support import new_folder
from tiny_models import write_tiny

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams

ENGINE = EngineConfig(threads=1, max_num_seqs=4)
PARAMS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
PROMPT = [5, 9, 21, 33, 8, 70, 12]


@pytest.fixture(scope="module")
def folders() -> list[Path]:
    """A model and two adapters."""
    model = Path(str(write_tiny("mimo", new_folder() / "model")))
    return [model, random_adapter(model, 1), random_adapter(model, 2)]


@pytest.fixture(scope="module")
def server(folders: list[Path]) -> Iterator[LlmServer]:
    with (
        LLM(folders[0], ENGINE, lora={"one": folders[1]}) as llm,
        serve_llm(llm, served_model_name=["base"], allow_lora_updates=True) as found,
    ):
        yield found


def completion(server: LlmServer, model: str, prompt: Any = PROMPT) -> list[int]:
    body = {"model": model, "prompt": prompt, "return_token_ids": True, **PARAMS}
    response = server.client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.json()["model"] == model
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def test_adapter_is_selected_by_model_name(server: LlmServer, folders: list[Path]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(folders[0], ENGINE, lora=folders[1]) as llm:
        expected = {
            name: list(llm.generate([PROMPT], params, lora=lora)[0].token_ids)
            for name, lora in (("one", None), ("base", ""))
        }
    found = {name: completion(server, name) for name in ("one", "base")}
    assert found == expected and found["one"] != found["base"]


def test_adapter_answers_in_every_api(server: LlmServer) -> None:

    def posted(path: str, **body: Any) -> Any:
        return server.client.post(path, json=body).json()

    messages, texts = [{"role": "user", "content": "the sky"}], {}
    options = {"temperature": 0, "num_predict": 8}
    for model, tagged in (("one", "one:latest"), ("base", "base:latest")):
        chat = posted("/v1/chat/completions", model=model, messages=messages, **PARAMS)
        claude = posted("/v1/messages", model=model, messages=messages, max_tokens=8, temperature=0)
        ollama = posted("/api/chat", model=tagged, messages=messages, stream=False, options=options)
        vector = posted("/v1/embeddings", model=model, input="the sky")["data"][0]["embedding"]
        texts[model] = (chat["choices"][0]["message"], claude["content"], ollama["message"], vector)
        assert [chat["model"], claude["model"], ollama["model"]] == [model, model, tagged]
    assert all(one != base for one, base in zip(texts["one"], texts["base"], strict=True))


def test_model_list_contains_adapters(server: LlmServer, folders: list[Path]) -> None:
    data = {each["id"]: each for each in server.client.get("/v1/models").json()["data"]}
    assert data["one"]["parent"] == "base" and data["one"]["root"] == str(folders[1]) and data["base"]["parent"] is None
    assert server.client.get("/v1/models/one").json()["id"] == "one"
    names = [each["name"] for each in server.client.get("/api/tags").json()["models"]]
    assert {"base:latest", "one:latest"} <= set(names)


def test_clients_load_and_unload_adapters(server: LlmServer, folders: list[Path]) -> None:
    load = {"lora_name": "two", "lora_path": str(folders[2])}
    assert server.client.post("/v1/completions", json={"model": "two", "prompt": PROMPT}).status_code == 404
    response = server.client.post("/v1/load_lora_adapter", json=load)
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    assert completion(server, "two") not in (completion(server, "one"), completion(server, "base"))
    assert server.client.post("/v1/load_lora_adapter", json=load).status_code == 400
    text = completion(server, "two")
    again = load | {"load_inplace": True, "is_3d_lora_weight": False}  # vLLM's fields
    assert server.client.post("/v1/load_lora_adapter", json=again).status_code == 200
    assert completion(server, "two") == text
    replaced = again | {"lora_path": str(folders[1])}
    assert server.client.post("/v1/load_lora_adapter", json=replaced).status_code == 200
    assert completion(server, "two") == completion(server, "one") != text
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
    assert server.client.post("/v1/completions", json={"model": "two", "prompt": PROMPT}).status_code == 404
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 404


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, "does not exist"),
        ({"lora_name": "base", "lora_path": "MODEL"}, "the name 'base' is in use"),
        ({"lora_name": "x", "lora_path": "MODEL"}, "it has no adapter_config.json"),
        ({"lora_name": "", "lora_path": "MODEL"}, "lora_name"),
        ({"lora_name": " ", "lora_path": "ADAPTER"}, "the adapter's name is ' '"),
        ({"lora_name": "x", "lora_path": ""}, "lora_path"),
        ({"lora_name": "x", "lora_path": "~no-such-user/x"}, "does not exist"),
        ({"lora_path": "MODEL"}, "lora_name"),
        ({"lora_name": "x", "lora_path": "ADAPTER", "scale": 2}, "scale is not supported"),
        ({"lora_name": "x", "lora_path": "ADAPTER", "is_3d_lora_weight": True}, "LoRA of routed experts"),
        ({"lora_name": "base", "lora_path": "ADAPTER", "load_inplace": True}, "the name 'base' is in use"),
    ],
)
def test_invalid_loads_are_refused(server: LlmServer, folders: list[Path], body: dict[str, Any], message: str) -> None:
    paths = {"MODEL": str(folders[0]), "ADAPTER": str(folders[1])}
    body = {key: paths.get(value, value) for key, value in body.items()}
    response = server.client.post("/v1/load_lora_adapter", json=body)
    assert response.status_code in (400, 404) and message in response.text
    assert completion(server, "one")


def test_loading_adapters_is_off_by_default(folders: list[Path]) -> None:
    with LLM(folders[0], ENGINE) as llm, serve_llm(llm) as server:
        body = {"lora_name": "two", "lora_path": str(folders[2])}
        response = server.client.post("/v1/load_lora_adapter", json=body)
        assert response.status_code == 400 and "--allow-lora-updates" in response.text
