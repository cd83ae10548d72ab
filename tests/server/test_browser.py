"""The playground and the dashboard in Chromium, with one server that requires an API key."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import Server, running
from support import family_of
from tiny_models import write_model, write_tiny

from headstart import hub

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"]
KEY = "a-key-for-tests"
WAIT_MS = 300_000
HISTORY = 1000
MAX_DRAWN = 250  # rendered messages of a long conversation
FRAME_MS = 5_000  # maximal time between two frames; generous, for busy machines
PAINT_MS, PAGE_BYTES, TRIES = 3_000, 300_000, 5
FIRST_PAINT = """() => {
  const [paint] = performance.getEntriesByName("first-contentful-paint");
  const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return paint && document.querySelector("nav")
    && [paint.startTime, entries.reduce((total, each) => total + each.decodedBodySize, 0)];
}"""
LONG = "Tell a long story about a river, a bridge and a clock."
SAVE_CONVERSATION = """
async (count) => {
  const { fresh, save } = await import("/web/conversations.js");
  const { newAnswer, take } = await import("/web/answer.js");
  const token = (id) => ({ id, text: `word${id} `, accepted: id % 2 === 0, score: 0.5 });
  const messages = Array.from({ length: count }, (_, i) => {
    if (i % 2 === 0) return { role: "user", content: `Question ${i}` };
    const answer = newAnswer(true, i, false);
    const tokens = Array.from({ length: 60 }, (_, id) => token(id));
    const pass = { drafter: "mtp", drafted: 1, accepted: 1, tokens, rejected: [] };
    take(answer, { choices: [{ delta: { content: `**Answer ${i}** ` }, finish_reason: "stop", speculation: [pass] }] });
    answer.text += tokens.map((each) => each.text).join("");
    return { role: "assistant", answer };
  });
  await save({ ...fresh(), title: "A long one", messages }, 0);
}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Server]:
    if hub.cached_trunk() is None:
        pytest.skip("the default model is not in the cache: headstart pull")
    arguments = ("--threads", "1", "--depth", "2", "--api-key", KEY, "--no-shared-lookup")
    with running(*arguments) as found:
        found.client.headers["Authorization"] = f"Bearer {KEY}"
        yield found


@pytest.fixture(scope="module")
def browser(served: Server) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, served: Server) -> Iterator[Any]:
    """A page in a fresh profile with the API key, temperature 0 and 24 tokens. Script errors and requests to other
    hosts fail the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, base_url=served.url, color_scheme="light")
    settings = json.dumps({"temperature": "0", "max_tokens": "24"})
    context.add_init_script(
        f"sessionStorage.getItem('headstart.key') ?? sessionStorage.setItem('headstart.key', '{KEY}');"
        f"localStorage.getItem('headstart.settings') ?? localStorage.setItem('headstart.settings', '{settings}');"
    )
    context.set_default_timeout(WAIT_MS)
    found, wrong = context.new_page(), list[str]()
    found.on("pageerror", lambda error: wrong.append(str(error)))
    found.on("console", lambda said: wrong.append(said.text) if "Security" in said.text else None)
    found.on("request", lambda asked: None if asked.url.startswith((served.url, "blob:")) else wrong.append(asked.url))
    found.goto("/")
    yield found
    context.close()
    assert not wrong


def ask(page: Any, text: str) -> None:
    """Sends a message with the keyboard and waits for the end of the answer."""
    box = page.get_by_label("Message", exact=True)
    box.fill(text)
    box.press("Enter")
    page.locator(".after").last.wait_for()


def counters(page: Any, place: str = ".counts") -> dict[str, int]:
    """The counters below the last answer."""
    text = page.locator(place).last.inner_text()
    patterns = {"tokens": r"(\d+) tokens(?!/)", "passes": r"(\d+) passes", "accepted": r"(\d+) of \d+ drafted"}
    return {name: int(found[1]) if (found := re.search(pattern, text)) else 0 for name, pattern in patterns.items()}


def drafted_tokens(page: Any, place: str = ".reply") -> set[tuple[str, str]]:
    """Classes and indices of the coloured tokens of the last answer."""
    spans = page.locator(place).last.locator("span.t[class*='k-']")
    return set(map(tuple, spans.evaluate_all("all => all.map(each => [each.className.split(' ')[1], each.dataset.i])")))


def test_api_key_is_requested_and_not_stored(browser: Any, served: Server) -> None:
    context = browser.new_context(base_url=served.url)
    page = context.new_page()
    page.goto("/")
    page.get_by_label("API key", exact=True).fill("another")
    page.keyboard.press("Enter")
    page.get_by_text("rejects this key").wait_for()
    page.get_by_label("API key", exact=True).fill(KEY)
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for(state="detached")
    page.get_by_text("smollm2-135m-mtp", exact=True).wait_for()
    assert KEY not in page.evaluate("JSON.stringify({...localStorage})")
    context.close()


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_first_paint_is_fast_and_the_page_is_small(browser: Any, served: Server, path: str) -> None:
    """The browser's cache is empty. The fastest of several tries counts, as the machine may be busy."""
    paints = []
    while len(paints) < TRIES and min(paints, default=PAINT_MS) >= PAINT_MS:
        context = browser.new_context(base_url=served.url)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        page.goto(path)
        paint, size = page.wait_for_function(FIRST_PAINT).json_value()
        paints.append(paint)
        assert 20_000 < size < PAGE_BYTES
        context.close()
    assert min(paints) < PAINT_MS, paints


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_accessibility_has_no_serious_violation(page: Any, scheme: str) -> None:
    """axe-core's rules on both pages, with an answer with and one without drafting."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page.emulate_media(color_scheme=scheme)
    page.get_by_label("Log probabilities").check()
    page.get_by_label("Both").check()
    ask(page, "Write a Markdown list, a table and some `code`.")
    found = axe.Axe().run(page).response["violations"]
    page.set_viewport_size({"width": 360, "height": 700})
    page.get_by_role("button", name="Settings").click()
    found += axe.Axe().run(page).response["violations"]
    page.goto("/dashboard")
    page.locator(".tile").first.wait_for()
    found += axe.Axe().run(page).response["violations"]
    assert not [(each["id"], each["nodes"][0]["html"]) for each in found if each["impact"] in ("serious", "critical")]


def test_accepted_tokens_are_coloured_and_counted(page: Any, served: Server) -> None:
    """JSON output shows every character, so every accepted token is visible."""
    page.get_by_label("Format").select_option("schema")
    schema = {"type": "object", "properties": {"colour": {"enum": ["red"]}, "why": {"type": "string"}},
              "required": ["colour", "why"], "additionalProperties": False}  # fmt: skip
    page.get_by_label("JSON schema").fill("{")
    page.get_by_text("This is not JSON").first.wait_for()
    page.get_by_label("JSON schema").fill(json.dumps(schema))
    page.get_by_label("Log probabilities").check()
    before = served.metric("vllm:spec_decode_num_accepted_tokens_total")
    ask(page, "Which colour?")
    accepted = served.metric("vllm:spec_decode_num_accepted_tokens_total") - before
    shown, coloured = counters(page), drafted_tokens(page)
    assert accepted > 0
    assert len(coloured) == shown["accepted"] >= accepted  # the metric leaves out tokens forced by the schema
    text = page.locator(".reply pre").inner_text()
    assert '"colour": "red"' in text
    page.locator("span.t").nth(3).hover()
    page.get_by_text("Probability").wait_for()


def test_both_mode_shows_equal_texts(page: Any) -> None:
    page.get_by_label("Max tokens").fill("60")
    page.get_by_label("Temperature").fill("0.8")
    page.get_by_label("Both").check()
    ask(page, "Write a Markdown list of three animals, with **bold** names, and some code.")
    said = page.locator(".verdict").inner_text()
    assert said.startswith("Equal, byte for byte"), said
    texts = page.locator(".pair .text").all_inner_texts()
    assert texts[0] == texts[1] != ""
    made, plain = map(int, re.findall(r"(\d+) passes instead of (\d+)", said)[0])
    assert made < plain
    assert not drafted_tokens(page, ".pair .answer:last-child")


def test_stop_and_retry(page: Any, served: Server) -> None:
    page.get_by_label("Max tokens").fill("2000")
    box = page.get_by_label("Message", exact=True)
    box.fill(LONG)
    box.press("Enter")
    page.locator("span.t").nth(5).wait_for()
    page.get_by_role("button", name="Stop").dispatch_event("click")  # no wait for a stable button
    page.get_by_text("Stopped.").wait_for()
    served.wait_idle()
    assert page.locator(".reply .text").inner_text()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("cut at max tokens").wait_for()
    assert page.locator(".reply").count() == 1
    assert counters(page)["tokens"] == 8


def test_question_is_restored_after_reload(page: Any) -> None:
    page.get_by_label("Max tokens").fill("2000")
    box = page.get_by_label("Message", exact=True)
    box.fill(LONG)
    box.press("Enter")
    page.locator("span.t").nth(5).wait_for()
    page.reload()
    page.get_by_role("button", name=LONG, exact=True).click()
    page.get_by_text("This page was closed before").wait_for()
    page.get_by_label("Max tokens").fill("8")
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("cut at max tokens").wait_for()
    assert page.locator(".said").inner_text() == LONG


def test_editing_an_earlier_question_restarts_the_conversation(page: Any) -> None:
    ask(page, "Name a fruit.")
    ask(page, "And an animal?")
    page.get_by_role("button", name="Edit").first.click()
    page.get_by_label("Edited message").fill("Name a colour.")
    page.locator("form.message").get_by_role("button", name="Send").click()
    page.locator(".said", has_text="Name a colour.").wait_for()
    page.locator(".after").wait_for()
    assert page.locator(".said").all_inner_texts() == ["Name a colour."]
    assert page.locator(".reply").count() == 1


def test_code_is_highlighted_and_two_number_fields_are_visible(page: Any) -> None:
    assert page.locator(".numbers input:visible").count() == 2
    page.evaluate(SAVE_CONVERSATION.replace("**Answer ${i}** ", "~~~python\\n# all\\nreturn 1\\n~~~\\n\\n"), 2)
    page.reload()
    page.get_by_role("button", name="A long one", exact=True).click()
    assert page.locator(".code-comment").inner_text() == "# all"
    assert page.locator(".code-word").inner_text() == "return"


def test_keyboard_navigation_and_stored_history(page: Any) -> None:
    page.locator("textarea:focus").wait_for()
    page.keyboard.type("Name a fruit.")
    page.keyboard.press("Enter")
    page.locator(".after").wait_for()
    for _ in range(20):
        page.keyboard.press("Shift+Tab")
        if page.evaluate("document.activeElement.matches('.text')"):
            break
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "token" in page.locator(".tip").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".tip").is_hidden()
    text = page.locator(".reply .text").inner_text()
    entry = page.get_by_role("button", name="Name a fruit.", exact=True)
    entry.wait_for()  # the history lists stored conversations only
    page.reload()
    entry.click()
    shown = page.locator(".reply .text:not(:empty)")
    playwright.expect(shown).to_have_text(text, use_inner_text=True)  # rendered one frame later
    with page.expect_download() as download:
        page.get_by_role("button", name="JSON", exact=True).click()
    kept = json.loads(Path(download.value.path()).read_text("utf-8"))
    assert [each["role"] for each in kept["messages"]] == ["user", "assistant"]


def test_dark_theme_narrow_screen_and_dashboard(page: Any, served: Server) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Use the dark theme").click()
    dark = page.evaluate(ground)
    assert dark != light
    page.set_viewport_size({"width": 360, "height": 700})
    wide = "document.documentElement.scrollWidth"
    assert page.evaluate(wide) == 360
    page.get_by_role("button", name="Settings").click()
    edge = "document.getElementById('settings').getBoundingClientRect().right"
    for _ in range(2000):  # the panel slides in; the content security policy forbids wait_for_function
        if page.evaluate(edge) == 360:
            break
        page.wait_for_timeout(50)
    assert page.evaluate(edge) == 360
    page.get_by_label("Max tokens").fill("12")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="History").click()
    page.keyboard.press("Escape")  # with the focus outside the panel
    page.locator("#history").wait_for(state="hidden")
    ask(page, "Write `a_very_long_name_of_a_variable_that_does_not_fit_into_a_line = another_very_long_name`.")
    assert page.evaluate(wide) == 360
    page.goto("/dashboard")
    page.get_by_text("Charts appear with the next request").wait_for()
    assert not page.locator(".chart").count()  # no empty charts
    served.client.post("/v1/completions", json={"prompt": "One", "max_tokens": 4}).raise_for_status()
    page.locator(".chart canvas").first.wait_for()
    assert page.evaluate(ground) == dark
    assert page.evaluate(wide) == 360
    ended = int(served.metric("vllm:request_success_total"))
    page.get_by_text(f"{ended} ended").wait_for()


def test_long_history_stays_responsive(page: Any) -> None:
    page.evaluate(SAVE_CONVERSATION, HISTORY)
    page.reload()
    page.get_by_role("button", name="A long one", exact=True).click()
    page.get_by_text(f"Answer {HISTORY - 1}").wait_for()
    page.get_by_role("button", name="Show earlier messages").click()
    page.get_by_text(f"Question {HISTORY - 100}", exact=True).wait_for()
    assert page.locator("article").count() < MAX_DRAWN
    page.evaluate(
        """() => { let last = performance.now(); globalThis.worst = 0;
        const frame = (now) => { worst = Math.max(worst, now - last); last = now; requestAnimationFrame(frame); };
        requestAnimationFrame((now) => { last = now; frame(now); }); }"""
    )
    page.get_by_label("Message", exact=True).press_sequentially("Is it still fluid?", delay=10)
    assert page.evaluate("worst") < FRAME_MS


def test_killed_server_is_reported(page: Any, served: Server) -> None:
    """Last test with this server: it kills the process."""
    page.get_by_label("Max tokens").fill("2000")
    box = page.get_by_label("Message", exact=True)
    box.fill(LONG)
    box.press("Enter")
    page.locator("span.t").nth(5).wait_for()
    board = page.context.new_page()
    board.goto("/dashboard")
    board.locator(".chart").first.wait_for()
    served.process.kill()
    page.get_by_text("The connection was lost").wait_for()
    board.get_by_text("has not answered since").wait_for()
    assert set(board.locator(".chart b").all_inner_texts()) == {"\u2013"}
    assert page.locator(".reply .text").inner_text()
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("The server does not answer").wait_for()


def test_model_selection_with_several_models(browser: Any, tmp_path: Path) -> None:
    for name in ("one", other := "another-model-with-a-long-name"):
        write_tiny("mimo", tmp_path / name)
    (tmp_path / "one" / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')  # no chat template
    with running("--models", str(tmp_path), "--threads", "1") as several:
        page = browser.new_page(base_url=several.url, viewport={"width": 360, "height": 700})
        page.set_default_timeout(WAIT_MS)
        page.goto("/")
        page.locator("select.models").select_option(other)
        ask(page, "Hi")
        assert [each["name"] for each in several.client.get("/api/ps").json()["models"]] == [f"{other}:latest"]
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.locator("select.models").bounding_box()["width"] > 200  # wide enough for the name
        page.locator("select.models").select_option("one")
        page.get_by_text("No chat template: the model continues your text").wait_for()
        ask(page, "the")
        assert counters(page)["tokens"]
        page.goto("/dashboard")
        page.locator("select.models").select_option(other)
        page.locator(".tile").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.close()


def test_dashboard_names_the_missing_tensor_of_an_incomplete_head(browser: Any, tmp_path: Path) -> None:
    config, arrays = family_of("qwen3_5").tiny()
    write_model(tmp_path / "m", config, {name: each for name, each in arrays.items() if name != "mtp.norm.weight"})
    names = ("--served-model-name", "first", "--served-model-name", "second")
    with running(str(tmp_path / "m"), "--threads", "1", *names) as server:
        page = browser.new_page(base_url=server.url)
        page.set_default_timeout(WAIT_MS)
        page.goto("/dashboard")
        page.get_by_text("runs without its MTP head").get_by_text("mtp.norm.weight").wait_for()
        page.goto("/")
        page.locator(".model", has_text="first").wait_for()  # an alias is not listed as a second model
        page.close()
