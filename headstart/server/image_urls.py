"""Images from the web, for `serve --allow-image-urls`: downloads that cannot reach private networks.

The addresses of a host are resolved once and checked, and the connection goes to the checked address. Each redirect is
checked in the same way. Size and time are limited, proxies of the environment are not used.
"""

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from urllib.parse import SplitResult, urljoin, urlsplit

import httptools

from headstart.server import limits
from headstart.server.options import media_domains
from headstart.text.images import ImageError
from headstart.version import __version__

SCHEMES = ("http://", "https://")
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
NAT64 = ipaddress.ip_network("64:ff9b::/96")
HINT = "send the image as a data URL: data:image/png;base64,..."


@dataclass(frozen=True)
class UrlPolicy:
    """Which URLs of images are downloaded. `domains`: hosts that are allowed; empty: every public one."""

    allowed: bool = False
    domains: tuple[str, ...] = ()

    def check(self, url: str) -> SplitResult:
        """The parts of a URL that may be downloaded. Raises ImageError."""
        if not self.allowed:
            raise ImageError("this server downloads no images", f"{HINT}; or start it with --allow-image-urls")
        shown = limits.shortened(url)
        try:
            parts = urlsplit(url)
            host, _ = (parts.hostname or "").encode("idna").decode(), parts.port
        except ValueError:
            host = ""
        is_plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= limits.IMAGE_URL
        if not host or not is_plain or parts.scheme not in PORTS or "@" in parts.netloc:
            raise ImageError(f"{shown!r} is no http or https URL that can be downloaded", HINT)
        if self.domains and host not in self.domains:
            raise ImageError(f"{shown!r} is not of an allowed domain", f"allowed: {', '.join(self.domains)}")
        return parts


def is_url(source: str) -> bool:
    """Whether the source of an image is a URL to download."""
    return source.lower().startswith(SCHEMES)


async def download(urls: Iterable[str], policy: UrlPolicy) -> dict[str, bytes]:
    """The bytes behind URLs of images. Raises ImageError for the first one that fails."""
    wanted = list(dict.fromkeys(urls))
    tasks = [asyncio.create_task(_download(url, policy)) for url in wanted]
    try:
        return dict(zip(wanted, await asyncio.gather(*tasks), strict=True))
    finally:
        for task in tasks:
            task.cancel()


async def _download(url: str, policy: UrlPolicy) -> bytes:
    shown, place = limits.shortened(url), url
    try:
        async with asyncio.timeout(limits.IMAGE_SECONDS):
            for _ in range(limits.IMAGE_REDIRECTS + 1):
                response = await _get(policy.check(place))
                if response.status not in REDIRECTS:
                    break
                place = urljoin(place, response.headers.get("location", ""))
    except TimeoutError:
        raise ImageError(f"{shown!r} did not come within {limits.IMAGE_SECONDS:g} s", HINT) from None
    except (OSError, httptools.HttpParserError, asyncio.IncompleteReadError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise ImageError(f"{shown!r} cannot be downloaded: {reason}", HINT) from None
    if response.status != 200:
        what = "too many redirects" if response.status in REDIRECTS else f"status {response.status}"
        raise ImageError(f"{shown!r} cannot be downloaded: {what}", HINT)
    return bytes(response.body)


async def _get(parts: SplitResult) -> "_Response":
    """The response to a GET request, whose body is of at most IMAGE_BYTES."""
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    address = await _public_address(host, port)
    secure = _tls() if parts.scheme == "https" else None
    name = host if secure else None
    reader, writer = await asyncio.open_connection(address, port, ssl=secure, server_hostname=name)
    try:
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        head = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nUser-Agent: headstart/{__version__}\r\n"
        writer.write(f"{head}Accept: image/*\r\nConnection: close\r\n\r\n".encode("ascii"))
        return await _read(reader)
    finally:
        writer.transport.abort()


async def _read(reader: asyncio.StreamReader) -> "_Response":
    response = _Response()
    parser = httptools.HttpResponseParser(response)
    while not response.is_complete:
        data = await reader.read(2**16)
        if not data:
            break  # without a content-length, the body ends with the connection
        parser.feed_data(data)
        response.status = parser.get_status_code()
        if response.num_header_bytes > limits.HEADER_BYTES or len(response.body) > limits.IMAGE_BYTES:
            raise ImageError(f"the image of a URL is larger than {limits.IMAGE_BYTES} bytes", "make it smaller")
    if not response.is_complete and ("content-length" in response.headers or not response.status):
        raise asyncio.IncompleteReadError(bytes(response.body), None)
    return response


@dataclass
class _Response:
    """A response, as httptools' parser fills it."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    num_header_bytes: int = 0
    is_complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.num_header_bytes += len(name) + len(value)
        if self.num_header_bytes <= limits.HEADER_BYTES:
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_complete = True


async def _public_address(host: str, port: int) -> str:
    """An address of a host. Raises ImageError unless all its addresses are public."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [str(each[4][0]) for each in found]
    if not addresses or not all(map(is_public, addresses)):
        shown = limits.shortened(host)
        raise ImageError(f"{shown!r} is not a public address, and nothing is downloaded from others", HINT)
    return addresses[0]


def is_public(address: str) -> bool:
    """Whether an IP address is public, and so is the IPv4 address that an IPv6 address embeds."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in NAT64:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None or found.is_site_local:
            return False
    return found.is_global and not (found.is_multicast or found.is_unspecified or found.is_reserved)


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def url_policy(allowed: bool, domains: Iterable[str] | None) -> UrlPolicy:
    """The policy of the server's options. Raises UsageError for a domain that is none."""
    names = media_domains(domains)
    return UrlPolicy(allowed or bool(names), names)
