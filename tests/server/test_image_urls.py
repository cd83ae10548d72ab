"""Image downloads: size and time limits, redirects, refused addresses and URLs."""

import asyncio
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headstart.errors import UsageError
from headstart.server import image_urls, limits
from headstart.server.image_urls import UrlPolicy, download, is_public, url_policy
from headstart.text.images import ImageError

ALL = UrlPolicy(allowed=True)


class Site(BaseHTTPRequestHandler):
    """Answers by path; `moved?to=URL` redirects to URL."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.strip("/").split("?")[0]
        if name.startswith("moved"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("to=")[2])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(404 if name == "missing" else 200)
        if name == "chunked":
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"3\r\nabc\r\n3\r\ndef\r\n0\r\n\r\n")
            return
        self.send_header("Content-Length", "900" if name == "short" else "6")
        self.end_headers()
        if name == "slow":
            stop.wait(5)
        self.wfile.write(b"abcdef")
        self.close_connection = True

    def log_message(self, *_: Any) -> None:
        pass


stop = threading.Event()


@contextmanager
def serving() -> Iterator[str]:
    site = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{site.server_port}"
    finally:
        stop.set()
        site.shutdown()
        site.server_close()


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with serving() as url:
        yield url


def fetch(*urls: str, policy: UrlPolicy = ALL) -> dict[str, bytes]:
    return asyncio.run(download(urls, policy))


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets downloads reach local addresses."""
    monkeypatch.setattr(image_urls, "is_public", lambda address: True)


@pytest.mark.usefixtures("private")
def test_downloads_follow_redirects_and_chunks(site: str) -> None:
    assert fetch(f"{site}/a?x=1", f"{site}/chunked", f"{site}/a?x=1") == {
        f"{site}/a?x=1": b"abcdef", f"{site}/chunked": b"abcdef",
    }  # fmt: skip
    assert fetch(f"{site}/moved?to=/moved?to={site}/a").popitem()[1] == b"abcdef"


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize(("path", "message"), [
    ("missing", "status 404"), ("short", "IncompleteReadError"), ("slow", "did not come within 0.3 s"),
    ("moved?to=file:///etc/passwd", "no http or https URL"),
    ("moved?to=" + "/moved?to=" * 4 + "/a", "too many redirects"),
])  # fmt: skip
def test_failed_downloads_name_the_reason(site: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGE_SECONDS", 0.3)
    with pytest.raises(ImageError, match=message):
        fetch(f"{site}/{path}")


@pytest.mark.usefixtures("private")
def test_download_size_is_limited(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "IMAGE_BYTES", 5)
    with pytest.raises(ImageError, match="larger than 5 bytes"):
        fetch(f"{site}/chunked")


def test_private_addresses_are_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Private addresses are refused directly, by host name and behind a redirect. The checked address is the one that
    is connected to."""
    for url in (site, site.replace("127.0.0.1", "localhost"), "http://[::1]/", "http://169.254.169.254/latest"):
        with pytest.raises(ImageError, match="is not a public address"):
            fetch(url)
    only_site = site.removeprefix("http://127.0.0.1:")
    monkeypatch.setattr(image_urls, "is_public", lambda address: address == "127.0.0.1")
    with pytest.raises(ImageError, match="is not a public address"):
        fetch(f"{site}/moved?to=http://127.0.0.2:{only_site}/a")
    asked = list[str]()

    async def record(address: str, *_: Any, **__: Any) -> Any:
        asked.append(address)
        raise OSError(1, "seen")

    async def resolved(self: Any, host: str, *_: Any, **__: Any) -> list[Any]:
        return [(0, 0, 0, "", ("93.184.216.34", 80))]

    monkeypatch.setattr(image_urls, "is_public", is_public)
    monkeypatch.setattr(asyncio, "open_connection", record)
    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", resolved)
    with pytest.raises(ImageError, match="seen"):
        fetch("http://example.org/a.png")
    assert asked == ["93.184.216.34"]


@pytest.mark.parametrize(("address", "public"), [
    ("93.184.216.34", True), ("2606:2800:220:1:248:1893:25c8:1946", True), ("::ffff:93.184.216.34", True),
    ("127.0.0.1", False), ("10.1.2.3", False), ("192.168.0.1", False), ("172.16.0.1", False), ("100.64.0.1", False),
    ("169.254.169.254", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False), ("::", False),
    ("::1", False), ("fe80::1%eth0", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("ff02::1", False),
    ("2002:0a00:0001::", False), ("64:ff9b::7f00:1", False), ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False),
])  # fmt: skip
def test_is_public(address: str, public: bool) -> None:
    assert is_public(address) == public


@pytest.mark.parametrize(("url", "policy", "message"), [
    ("http://example.org/a", UrlPolicy(), "downloads no images.*--allow-image-urls"),
    ("http://user:word@example.org/a", ALL, "no http or https URL"), ("http:///a", ALL, "no http or https URL"),
    ("http://example.org:99999/a", ALL, "no http or https URL"), ("http://a/ b", ALL, "no http or https URL"),
    ("http://a/\r\nX: y", ALL, "no http or https URL"), ("http://" + "a" * 70 + "/", ALL, "no http or https URL"),
    ("ftp://example.org/a", ALL, "no http or https URL"), ("http://a/" + "a" * 3000, ALL, "no http or https URL"),
    ("http://example.org/a", UrlPolicy(True, ("example.com",)), "not of an allowed domain.*example.com"),
])  # fmt: skip
def test_policy_refuses_urls(url: str, policy: UrlPolicy, message: str) -> None:
    with pytest.raises(ImageError) as caught:
        policy.check(url)
    assert re.search(message, str(caught.value))


def test_url_policy_from_options() -> None:
    assert url_policy(False, None) == UrlPolicy()
    assert url_policy(False, ["Example.org."]) == UrlPolicy(True, ("example.org",))
    for wrong in ("https://a.org", "", "*.a.org"):
        with pytest.raises(UsageError, match="which is no domain"):
            url_policy(False, [wrong])
