"""Images in the playground: adding, removing, sending, and no image controls with a text model."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from image_files import png
from inside import LlmServer, serve_llm
from test_browser import CHROMIUM, FLAGS

from headstart.api import LLM

playwright = pytest.importorskip("playwright.sync_api")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
FILES = [{"name": f"{seed}.png", "mimeType": "image/png", "buffer": png(seed)} for seed in (1, 2)]
SEND_EVENT = """([kind, data]) => {
  const transfer = new DataTransfer(), bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  transfer.items.add(new File([bytes], "picture.png", { type: "image/png" }));
  const given = kind === "drop" ? { dataTransfer: transfer } : { clipboardData: transfer };
  const Event = kind === "drop" ? DragEvent : ClipboardEvent;
  const event = new Event(kind, { ...given, bubbles: true, cancelable: true });
  document.querySelector(".composer textarea").dispatchEvent(event);
}"""


@pytest.fixture(scope="module")
def open_page() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)

        def opened(server: LlmServer) -> Any:
            page = browser.new_context(base_url=server.url).new_page()
            page.goto("/")
            page.locator(".starters").wait_for()
            return page

        yield opened
        browser.close()


def test_images_are_added_removed_and_sent(open_page: Any, vision_llm: LLM) -> None:
    with serve_llm(vision_llm) as server:
        page = open_page(server)
        page.get_by_label("Add images").wait_for()
        page.get_by_label("Image files").set_input_files(FILES)
        for kind, seed in (("paste", 3), ("drop", 4)):
            page.evaluate(SEND_EVENT, [kind, base64.b64encode(png(seed)).decode()])
        mine = page.locator(".composer .images img")
        playwright.expect(mine).to_have_count(4)
        page.get_by_label("Remove image 1").click()
        playwright.expect(mine).to_have_count(3)
        assert mine.first.evaluate("(img) => img.naturalWidth") == 40
        box = page.get_by_label("Message", exact=True)
        box.fill("What are they?")
        with page.expect_request("**/v1/chat/completions") as sent:
            box.press("Enter")
        content = sent.value.post_data_json["messages"][-1]["content"]
        assert [part["type"] for part in content] == ["image_url"] * 3 + ["text"]
        data = [base64.b64decode(part["image_url"]["url"].partition(",")[2]) for part in content[:3]]
        assert data == [png(seed) for seed in (2, 3, 4)]
        page.locator(".after").last.wait_for()
        assert page.locator(".message.user .images img").count() == 3
        assert mine.count() == page.locator(".answer .wrong").count() == 0
        page.locator(".message.user .edit button").click()  # an edited question keeps its images
        with page.expect_request("**/v1/chat/completions") as again:
            page.get_by_label("Edited message").locator("xpath=..").locator("button.main").click()
        assert again.value.post_data_json["messages"][-1]["content"] == content


def test_text_model_has_no_image_controls(open_page: Any, llm: LLM) -> None:
    with serve_llm(llm) as server:
        page = open_page(server)
        page.evaluate(SEND_EVENT, ["drop", base64.b64encode(png()).decode()])
        assert page.get_by_label("Add images").count() == page.locator(".images").count() == 0
