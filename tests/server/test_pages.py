"""Browser pages: files, size, headers, content security policy, caching."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.responses import PlainTextResponse
from starlette.testclient import TestClient

import headstart
from headstart.server.accounts import Accounts
from headstart.server.guards import ApiKeyGuard
from headstart.server.pages import POLICY, Pages

WEB = Path(headstart.__file__).parent / "server" / "web"
PAGE_BYTES = 300_000
MAX_LINES = 400
OWN = sorted(path for path in WEB.rglob("*") if path.is_file() and path.parent.name != "vendor")


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The pages in front of an application that requires an API key."""
    guarded = ApiKeyGuard(PlainTextResponse("the application"), Accounts.of(["secret"], None))
    yield TestClient(Pages(guarded), headers={"Accept-Encoding": ""})


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_page_loads_small_local_files_without_a_key(client: TestClient, path: str) -> None:
    seen: dict[str, int] = {}
    left = [path]
    while left:
        name = left.pop()
        if name in seen:
            continue
        answer = client.get(name)
        hashes = re.findall(r" 'sha256-[^']+'", policy := answer.headers["content-security-policy"])
        assert (answer.status_code, re.sub(r" 'sha256-[^']+'", "", policy)) == (200, POLICY), name
        assert len(hashes) == 2 * (name == path) == 2 * answer.text.count("</style>")
        assert "no-cache" in answer.headers["cache-control"]
        seen[name] = len(answer.content)
        folder = name.rpartition("/")[0]
        if name == path:
            left += [f"/{found}" for found in re.findall(r'(?:href|src)="(web/[^"]+)"', answer.text)]
        elif name.endswith(".js"):
            left += [f"{folder}/{found}" for found in re.findall(r'from ?"\./([^"]+)"', answer.text)]
    assert len(seen) > 8
    assert sum(seen.values()) < PAGE_BYTES


def test_unchanged_files_have_status_304(client: TestClient) -> None:
    first = client.get("/web/ui.js", headers={"Accept-Encoding": "gzip"})
    assert first.headers["content-encoding"] == "gzip"
    assert first.text == (WEB / "ui.js").read_text("utf-8")
    again = client.get("/web/ui.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_other_paths_reach_the_application(client: TestClient) -> None:
    paths = ("/v1/models", "/web/", "/web/../app.py", "/web/vendor/README.md", "/metrics")
    assert [client.get(path).status_code for path in paths] == [401] * len(paths)
    assert client.post("/", json={}).status_code == 401
    assert client.get("/dashboard/").url.path == "/dashboard"


def test_sources_have_no_inline_code_or_external_urls() -> None:
    for path in OWN:
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= MAX_LINES, path
        if path.suffix == ".html":
            assert not re.search(r"<style|style=|<script(?![^>]* src=)| on\w+=", text), path
        assert not re.search(r"innerHTML|eval\(|document\.write", text), path
        assert set(re.findall(r"https?://[\w./]+", text)) <= {"http://www.w3.org/2000/svg"}, path


def test_vendored_libraries_match_their_table() -> None:
    table = (WEB / "vendor" / "README.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| (\S+\.\w+) \|.*\| (\d+) \|$", table, re.MULTILINE))
    files = {path.name: path.stat().st_size for path in (WEB / "vendor").iterdir() if path.suffix in (".js", ".css")}
    assert {name: int(size) for name, size in rows.items()} == files
    licences = (WEB / "vendor" / "LICENSES.txt").read_text("utf-8")
    assert all(name in licences for name in files)
