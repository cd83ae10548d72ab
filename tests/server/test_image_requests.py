"""Images in the requests of all APIs, with a tiny model."""

import base64
import json
import re
from collections.abc import Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from image_files import bomb, data_url, file_of, message_of, png, prompt_tokens, requests, text_of
from inside import ENGINE, LlmServer, serve_llm
from PIL import Image as Pillow
from vision_models import KINDS, copied, published

from headstart.api import LLM
from headstart.cli.main import main
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.server import limits
from headstart.server.journal import Journal
from headstart.server.records import RecordFiles, TextRecorder

CAT = png()
PLACEHOLDER = "<start_of_image>"


@pytest.fixture(scope="module")
def served(vision_llm: LLM) -> Iterator[LlmServer]:
    with serve_llm(vision_llm, served_model_name=("eye",)) as found:
        yield found


@pytest.fixture(scope="module", params=KINDS)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[LLM, LlmServer]]:
    """A model of each kind of vision tower and its server."""
    llm = LLM(str(published(request.param)[1]), replace(ENGINE, max_model_len=512))
    with serve_llm(llm, served_model_name=("eye",)) as server:
        yield llm, server
    llm.close()


def ask(server: LlmServer, api: str, files: Seq[bytes], text: str = "What is it?", **more: Any) -> Any:
    path, body = requests(files, text, model="eye", temperature=1, seed=1, **more)[api]
    return server.client.post(path, json=body).json()


def test_texts_of_apis_agree(family: tuple[LLM, LlmServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (llm, served), files = family, [CAT, png(1, kind="BMP")]
    answers = {api: ask(served, api, files, max_tokens=24) for api in requests(files, "", model="eye")}
    texts = {api: text_of(api, answer) for api, answer in answers.items()}
    assert len(set(texts.values())) == 1 and texts["openai"]
    counts = {prompt_tokens(api, answer) for api, answer in answers.items()}
    parts = [{"type": "image", "image": each} for each in files] + [{"type": "text", "text": "What is it?"}]
    (own,) = llm.chat([{"role": "user", "content": parts}], SamplingParams(max_tokens=24, temperature=1, seed=1))
    assert own.text == texts["openai"] and counts == {len(own.prompt_token_ids)}
    (same,) = llm.generate("What is it?", SamplingParams(max_tokens=8, seed=1), images=files)
    assert same.prompt_token_ids == own.prompt_token_ids
    assert text_of("openai", ask(served, "openai", files[::-1], max_tokens=24)) != texts["openai"]
    rows = sum(each.end - each.first for each in llm.encode_prompt("What is it?", files).images)
    assert len(own.prompt_token_ids) > len(llm.encode_prompt("What is it?").ids) + rows
    words = ["generate", str(llm.model.checkpoint.path), "-p", "What is it?", "--max-tokens", "24", "--seed", "1"]
    for number, data in enumerate(files):
        (tmp_path / f"{number}").write_bytes(data)
        words += ["--image", str(tmp_path / f"{number}")]
    assert main([*words, "--temperature", "1", "--json", "--threads", "1", "--max-model-len", "512"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == own.text


def test_token_counts_include_images(served: LlmServer) -> None:
    """/tokenize, count_tokens of the Anthropic API and rendered prompts agree with the usage."""
    _, body = requests([CAT], "Hi", model="eye")["openai"]
    tokens = served.client.post("/tokenize", json={name: body[name] for name in ("model", "messages")}).json()
    rendered = served.client.post("/v1/chat/completions/render", json=body).json()
    assert rendered["token_ids"] == tokens["tokens"]
    path, anthropic = requests([CAT], "Hi", model="eye")["anthropic"]
    del anthropic["max_tokens"]
    assert served.client.post(f"{path}/count_tokens", json=anthropic).json() == {"input_tokens": tokens["count"]}
    assert prompt_tokens("openai", ask(served, "openai", [CAT], "Hi", max_tokens=1)) == tokens["count"]


def test_images_in_tool_results_and_raw_prompts(served: LlmServer, vision_llm: LLM) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": source}]}
    call = {"type": "tool_use", "id": "1", "name": "look", "input": {}}
    messages = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    body = {"model": "eye", "max_tokens": 4, "messages": [{"role": "user", "content": "Look"}, *messages]}
    assert served.client.post("/v1/messages", json=body).status_code == 200
    for text, count in (("One", 0), (f"One {PLACEHOLDER}", 1)):
        found = vision_llm.encode_prompt(text, [CAT], raw=True)
        assert len(found.images) == 1 and PLACEHOLDER in found.text
        assert found.text.endswith(text) and found.text.count(PLACEHOLDER) == 1, count
    with pytest.raises(UsageError, match="put all images into the messages"):
        vision_llm.encode_prompt([{"role": "user", "content": [{"type": "image", "image": CAT}]}], [CAT])


def test_placeholder_names_in_messages_are_plain_text(served: LlmServer) -> None:
    answer = ask(served, "openai", [CAT], f"{PLACEHOLDER} and {PLACEHOLDER}")
    assert answer["choices"], answer


TOO_MANY = [CAT] * (limits.IMAGES + 1)
BAD_FILES = {
    "no image": (b"just text " * 9, "image 2 of 2: the image cannot be read: it is no image"),
    "truncated": (CAT[: len(CAT) // 2], "damaged or cut off"),
    "bomb": (bomb(), "60000 x 60000 pixels"),
    "empty": (b"", "source"),
}


@pytest.mark.parametrize("api", ["openai", "responses", "anthropic", "ollama", "ollama generate"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_image_files_are_refused(served: LlmServer, api: str, name: str) -> None:
    data, message = BAD_FILES[name]
    path, body = requests([CAT, data], "What?", model="eye")[api]
    answer = served.client.post(path, json=body)
    assert answer.status_code == 400
    if api == "anthropic" or name != "empty":
        assert message in message_of(answer.json())


@pytest.mark.parametrize("data", [
    file_of(Pillow.new("RGBA", (9, 9))), file_of(Pillow.new("CMYK", (9, 9)), "JPEG"), file_of(Pillow.new("P", (1, 1))),
])  # fmt: skip
def test_unusual_pixel_formats_are_accepted(served: LlmServer, data: bytes) -> None:
    assert ask(served, "openai", [data])["choices"]


def part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


@pytest.mark.parametrize(("content", "message"), [
    ([part({"url": "data:image/png;base64,abc!"})], "image 1 of 1: its base64 is not valid"),
    ([part("data:image/png,abc")], "has no ;base64, part"), ([part({"url": "/etc/passwd"})], "is no data URL"),
    ([{"type": "image", "path": "/etc/passwd"}], "is no data URL"), ([part({})], "image_url"),
    ([part({"url": ""})], "has no image"), ([{"type": "image_url"}], "has no image"),
    ([{"type": "input_audio"}], "a part of type 'input_audio'"),
    ([part({"url": "http://example.org/a.png"})], "this server downloads no images"),
    ([part({"url": data_url(CAT)})] * (limits.IMAGES + 1), "has 17 images, and 16 are allowed"),
])  # fmt: skip
def test_invalid_image_parts_name_the_problem(served: LlmServer, content: Any, message: str) -> None:
    body = {"model": "eye", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    answer = served.client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, message in message_of(answer.json())) == (400, True), answer.text


def test_truncation_and_image_size_limits(served: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "could cut an image" in message_of(ask(served, "openai", [CAT], truncate_prompt_tokens=5))
    monkeypatch.setattr(limits, "IMAGE_BYTES", 100)
    assert "100 are allowed" in message_of(ask(served, "openai", [CAT]))


def test_images_beyond_the_context_are_refused(vision_llm: LLM) -> None:
    small = LLM(vision_llm.model, replace(ENGINE, max_model_len=256))
    with serve_llm(small, served_model_name=("eye",)) as server:
        assert ask(server, "anthropic", [CAT], max_tokens=1)["content"]
        for path, body in requests([CAT] * limits.IMAGES, "What?", model="eye").values():
            answer = server.client.post(path, json=body)
            said = r"the prompt with its 16 images has \d+ tokens, but the context holds 256"
            assert answer.status_code == 400 and re.search(said, message_of(answer.json()))
    small.close()


def test_bad_images_do_not_change_concurrent_answers(family: tuple[LLM, LlmServer]) -> None:
    served = family[1]
    before = text_of("openai", ask(served, "openai", [CAT], max_tokens=24))
    bad = [each for data, _ in BAD_FILES.values() for each in requests([CAT, data], "What?", model="eye").values()]
    with ThreadPoolExecutor() as pool:
        good = [pool.submit(ask, served, "openai", [CAT], max_tokens=24) for _ in range(4)]
        wrong = [pool.submit(served.client.post, path, json=body) for path, body in bad]
        assert {text_of("openai", each.result()) for each in good} == {before}
        assert {each.result().status_code for each in wrong} == {400}


def test_text_model_refuses_images(llm: LLM) -> None:
    with serve_llm(llm) as server:
        for path, body in requests([CAT], "Hi", model=None).values():
            body["model"] = llm.model.name
            answer = server.client.post(path, json=body)
            assert answer.status_code == 400
            assert f"{llm.model.name} reads text only" in message_of(answer.json())
        with pytest.raises(UsageError, match="reads text only"):
            llm.generate("Hi", images=[CAT])
        assert "vision" not in server.client.post("/api/show", json={"model": llm.model.name}).json()["capabilities"]
        text_body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 2}
        assert server.client.post("/v1/chat/completions", json=text_body).status_code == 200


def test_incomplete_vision_tower_serves_text_only(tmp_path: Path) -> None:
    """Requests with images are refused with the name of the missing tensor."""
    copied(published("qwen3_vl")[1], tmp_path, "blocks.1.mlp.linear_fc1.bias")
    llm = LLM(str(tmp_path), replace(ENGINE, max_model_len=512))
    with serve_llm(llm, served_model_name=("eye",)) as server:
        for path, body in requests([CAT], "Hi", model="eye").values():
            answer = server.client.post(path, json=body)
            said = "reads text only: tensor model.visual.blocks.1.mlp.linear_fc1.bias of the vision tower is missing"
            assert answer.status_code == 400 and said in message_of(answer.json())
        for path, body in requests([], "Hi", model="eye").values():
            assert server.client.post(path, json=body).status_code == 200
    llm.close()


def test_image_urls_equal_image_data(vision_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A downloaded image gives the same text as the same image in the request."""
    asked = list[str]()

    async def download(urls: Any, policy: Any) -> dict[str, bytes]:
        for url in urls:
            policy.check(url)
        asked.extend(urls)
        return dict.fromkeys(urls, CAT)

    monkeypatch.setattr("headstart.server.pipeline.download", download)
    url = "https://example.org/cat.png"
    with serve_llm(vision_llm, served_model_name=("eye",), allowed_media_domains=("example.org",)) as server:
        sent = ask(server, "anthropic", [CAT])
        path, body = requests([CAT], "What is it?", model="eye", temperature=1, seed=1)["anthropic"]
        body["messages"][0]["content"][0]["source"] = {"type": "url", "url": url}
        found = server.client.post(path, json=body).json()
        assert (text_of("anthropic", found), asked) == (text_of("anthropic", sent), [url])
        body["messages"][0]["content"][0]["source"]["url"] = "https://example.com/cat.png"
        assert "not of an allowed domain" in message_of(server.client.post(path, json=body).json())
        counted = {name: body[name] for name in ("model", "messages")}
        assert "is no data URL" in message_of(server.client.post(f"{path}/count_tokens", json=counted).json())


def test_journal_contains_downloaded_images() -> None:
    journal = Journal(f"{'0' * 32}-1", write=None)
    journal.note_images({"http://a/b": CAT})
    assert journal.take() == b""  # nothing is recorded without a relay

    async def write() -> None: ...

    journal = Journal(f"{'0' * 32}-1", write=write)
    journal.note_images({"http://a/b": CAT})
    resumed = Journal(f"{'0' * 32}-1", journal.take(), write)
    assert (resumed.images, resumed.history) == ({"http://a/b": CAT}, [])


def test_texts_about_images_are_not_recorded(vision_llm: LLM, tmp_path: Path) -> None:
    recorder = TextRecorder(RecordFiles(tmp_path, 2**20))
    recorder.start()
    for images in ([CAT], []):
        recorder.offer(vision_llm.request("What?", SamplingParams(), images=images), [1, 2])
    recorder.stop()
    assert recorder.kept == 1


def test_vision_capability_and_openapi_schema(served: LlmServer) -> None:
    assert "vision" in served.client.post("/api/show", json={"model": "eye"}).json()["capabilities"]
    assert "ImageUrl" in served.client.get("/openapi.json").text
