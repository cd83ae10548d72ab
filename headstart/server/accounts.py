"""Accounts by API key: rate limits of requests and tokens, and OpenAI's x-ratelimit headers.

Each limit is a token bucket that refills at a constant rate. A request takes 1 from the request buckets, and its prompt
and output tokens from the token buckets. A running output is never cut off, so it may overdraw a token bucket.
Keys are stored and shown as hashes only.
"""

import hashlib
import hmac
import math
import re
import struct
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headstart.errors import CapacityError, LimitError, UsageError
from headstart.server.limits import PRIORITY
from headstart.system import exclusive_lock

MINUTE, DAY = 60.0, 86400.0
RATE_LIMIT_HEADERS = {
    unit: tuple(f"x-ratelimit-{fact}-{unit}" for fact in ("limit", "remaining", "reset"))
    for unit in ("requests", "tokens")
}
"""Unit -> names of the response headers with the limit, what remains of it, and the time until it is whole again."""
NAME_DIGITS = 8  # hexadecimal digits of an account's name, from the key's hash
MAX_SHARE = 1e6  # of AccountLimits.share; its reciprocal is the minimum
PLACES_PER_FREE_PLACE = 4  # queue places that one key may hold for each place that stays free
EXAMPLE = "a table for each key: [name], then a line key = '...'"  # of a file of keys


class AccountLimits(BaseModel):
    """Limits of one key; None: no limit."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    requests_per_minute: Annotated[float, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1)] | None = None
    tokens_per_day: Annotated[float, Field(ge=1)] | None = None
    # weight in the scheduler, relative to other keys that have waiting requests
    share: float = Field(default=1.0, ge=1 / MAX_SHARE, le=MAX_SHARE)
    # default priority of the key's requests; they cannot ask for a lower (earlier) one
    priority: int = Field(default=0, ge=-PRIORITY, le=PRIORITY)


class _KeyTable(AccountLimits):
    """One table of a key file."""

    key: str | None = None
    sha256: str | None = None  # of the key, hexadecimal


_ENTRY = struct.Struct("<dd")  # level, and the time.monotonic() at which it was written (one clock per machine)


@dataclass(frozen=True)
class SharedLevel:
    """A bucket's level in a file. All replicas of a server change it, under a file lock."""

    path: Path

    def change(self, full: float, by: Callable[[float, float], float]) -> float:
        """Set the level to by(level, seconds since the last change) and return it. `full`: the level of a new file."""
        with self.path.open("a+b", buffering=0) as file, exclusive_lock(file.fileno()):
            file.seek(0)
            found, now = file.read(_ENTRY.size), time.monotonic()
            level, then = _ENTRY.unpack(found) if len(found) == _ENTRY.size else (full, now)
            level = by(level, now - then)
            file.truncate(0)  # writes go to the end
            file.write(_ENTRY.pack(level, now))
            return level


class TokenBucket:
    """A rate limit: `capacity` units, refilled over `seconds`. The level may become negative."""

    def __init__(self, capacity: float, seconds: float) -> None:
        self.capacity, self.seconds, self._rate = capacity, seconds, capacity / seconds
        self._level, self._then = capacity, time.monotonic()
        self.shared: SharedLevel | None = None  # set where several processes use the bucket

    @property
    def level(self) -> float:
        """Units in the bucket now."""
        return self.take(0.0)

    def take(self, count: float) -> float:
        """Take units; returns the new level."""
        if self.shared is not None:
            return self.shared.change(self.capacity, lambda level, passed: self._filled(level, passed) - count)
        now = time.monotonic()
        self._level, self._then = self._filled(self._level, now - self._then) - count, now
        return self._level

    def _filled(self, level: float, passed: float) -> float:
        return min(self.capacity, level + passed * self._rate)

    def wait_s(self, count: float) -> float:
        """Seconds until the bucket has `count` units."""
        return max(0.0, (count - self.level) / self._rate)


@dataclass(eq=False)
class Account:
    """One API key, with counts since the start of the server."""

    name: str  # beginning of the key's hash; empty: callers without a key
    digest: bytes  # SHA-256 of the key
    limits: AccountLimits = field(default_factory=AccountLimits)
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0  # choices that are being prepared, wait or run

    def __post_init__(self) -> None:
        limits = self.limits
        requests = [(limits.requests_per_minute, MINUTE)]
        tokens = [(limits.tokens_per_minute, MINUTE), (limits.tokens_per_day, DAY)]
        self.buckets: dict[str, list[TokenBucket]] = {"requests": [], "tokens": []}  # by unit
        for unit, capacities in (("requests", requests), ("tokens", tokens)):
            self.buckets[unit] += [TokenBucket(count, seconds) for count, seconds in capacities if count]

    def check(self) -> None:
        """Raise LimitError if the key has no request or no token left now."""
        self._check("requests", 1)
        self._check("tokens", 1)

    def begin(self, prompt_tokens: int) -> None:
        """Charge a request and its prompt. Raises LimitError, or CapacityError for a prompt above the capacity."""
        for bucket in self.buckets["tokens"]:
            if prompt_tokens > bucket.capacity:
                what = f"the prompt has {prompt_tokens} tokens, but this API key has {bucket.capacity:g} at most"
                raise CapacityError(what, "shorten the prompt")
        self._check("requests", 1)
        self._check("tokens", prompt_tokens)
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self._take("requests", 1)
        self._take("tokens", prompt_tokens)

    def charge_output(self, tokens: int) -> None:
        """Charge the output tokens of a request that has ended."""
        self.generated_tokens += tokens
        self._take("tokens", tokens)

    def _take(self, unit: str, count: float) -> None:
        for bucket in self.buckets[unit]:
            bucket.take(count)

    def _check(self, unit: str, count: float) -> None:
        seconds = max((bucket.wait_s(count) for bucket in self.buckets[unit]), default=0.0)
        if seconds > 0:
            self.refused += 1
            what = f"this API key has no {unit} left for {seconds:.1f} s"
            raise LimitError(what, "try again then", seconds, self.headers())

    def headers(self) -> dict[str, str]:
        """x-ratelimit headers of requests and tokens, each from its bucket with the lowest level."""
        headers: dict[str, str] = {}
        for unit, buckets in self.buckets.items():
            if buckets:
                least = min(buckets, key=lambda bucket: bucket.level)
                limit, remaining = f"{least.capacity:.0f}", f"{max(0.0, math.floor(least.level)):.0f}"
                values = (limit, remaining, duration(least.wait_s(least.capacity)))
                headers |= zip(RATE_LIMIT_HEADERS[unit], values, strict=True)
        return headers

    def priority(self, wanted: int | None) -> int:
        """The priority of a request that asks for `wanted` (None: the account's default). A key's requests get no
        lower number than the account's; without keys any number is allowed."""
        own = self.limits.priority
        return own if wanted is None else wanted if not self.name else max(wanted, own)


def duration(seconds: float) -> str:
    """Seconds as OpenAI's headers write them: 6m0s, 1s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join(f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m")) if value) + f"{rest}s"


class Accounts:
    """All accounts of a server. Without keys, all callers share one account."""

    def __init__(self, keyed: Seq[Account] = ()) -> None:
        self._keyed = list(keyed)
        self._by_name = {account.name: account for account in keyed}
        self._open = Account("", b"")

    @classmethod
    def of(cls, keys: Seq[str], file: Path | None) -> "Accounts":
        """Accounts of `keys`, without limits, and of the keys in `file`. Raises UsageError for duplicate keys."""
        found = [_account(hashlib.sha256(key.encode()).digest(), AccountLimits()) for key in keys]
        found += read_file(file) if file is not None else []
        if len({account.name for account in found}) < len(found):
            raise UsageError("an API key is given twice", "look at --api-key and --api-key-file")
        return cls(found)

    def share(self, folder: Path) -> None:
        """Share the bucket levels with other processes that have the same keys, in files of `folder`."""
        for account in self._keyed:
            for unit, bucket in [(unit, bucket) for unit, each in account.buckets.items() for bucket in each]:
                bucket.shared = SharedLevel(folder / f"budget-{account.name}-{unit}-{bucket.seconds:.0f}")

    def __bool__(self) -> bool:
        """Whether requests need an API key."""
        return bool(self._keyed)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._keyed)

    def find(self, key: bytes) -> Account | None:
        """The account of a key. Compares with all keys, in constant time."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, account.digest) for account in self._keyed]
        return self._keyed[matches.index(True)] if any(matches) else None

    def named(self, name: str) -> Account:
        """The account of that name; for unknown names the account of callers without a key."""
        return self._by_name.get(name, self._open)

    def check_queue_share(self, account: Account, count: int, free: int, seconds: float) -> None:
        """Raise LimitError if the account may not take `count` of the `free` queue places. With several keys, one key
        leaves some places to the others. `seconds`: time after which the client should try again."""
        if len(self._keyed) > 1 and account.held and account.held + count > PLACES_PER_FREE_PLACE * (free - count):
            account.refused += 1
            what = f"this API key has {account.held} texts that run or wait; the free places are kept for other keys"
            raise LimitError(what, "try again when some have ended", seconds)


def _account(digest: bytes, limits: AccountLimits) -> Account:
    return Account(digest.hex()[:NAME_DIGITS], digest, limits)


def read_file(path: Path) -> list[Account]:
    """The accounts of a TOML file with one table for each key. A table has `key` or `sha256` (of the key, hexadecimal),
    and fields of AccountLimits. Raises UsageError, which names the wrong table."""
    try:
        tables = tomllib.loads(path.read_text("utf-8-sig"))
    except OSError as error:
        raise UsageError(f"--api-key-file: cannot read {path}: {error.strerror}", "is the path right?") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--api-key-file: {path} is no TOML: {error}", EXAMPLE) from None
    if not tables:
        raise UsageError(f"--api-key-file: {path} has no keys: everybody could use the server", EXAMPLE)
    found = []
    for name, table in tables.items():
        try:
            found.append(_read_table(table))
        except UsageError as error:
            raise UsageError(f"--api-key-file: {name}: {error.message}", error.hint) from None
    return found


def _read_table(table: Any) -> Account:
    if not isinstance(table, Mapping):
        raise UsageError("it must be a table", "[name] on a line of its own")
    try:
        found = _KeyTable.model_validate(table)
    except ValidationError as error:
        fault = error.errors()[0]
        name = fault["loc"][0]
        if fault["type"] == "extra_forbidden":
            raise UsageError(f"{name} is unknown", f"members are {', '.join(_KeyTable.model_fields)}") from None
        raise UsageError(f"{name} is {fault['input']!r}: {fault['msg']}", "leave it out for the default") from None
    if (found.key is None) == (found.sha256 is None):
        raise UsageError("it needs one of key and sha256")
    if found.key is not None and not found.key.strip():
        raise UsageError("key is empty")
    if found.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", found.sha256):
        raise UsageError("sha256 must be 64 hexadecimal digits", "printf %s KEY | sha256sum")
    digest = bytes.fromhex(found.sha256) if found.sha256 else hashlib.sha256((found.key or "").encode()).digest()
    return _account(digest, AccountLimits(**found.model_dump(include=set(AccountLimits.model_fields))))
