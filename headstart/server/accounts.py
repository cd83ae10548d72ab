"""Who calls, by API key: what each may have, has had, and is told of it.

Budgets are buckets that fill steadily. A request takes one of the first, its prompt and what it writes of the second; a
text is never cut for want of tokens, so the last one may overdraw. Headers are those of OpenAI's API. Keys are kept and
shown as hashes only.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from headstart.errors import CapacityError, LimitError, UsageError
from headstart.server.limits import PRIORITY
from headstart.server.replicas.ledger import Ledger

MINUTE, DAY = 60.0, 86400.0
SHOWN = 8
"""Hexadecimal digits by which a key is called."""
MOST_SHARE = 1e6
ROOM_SHARE = 4
"""A key may take so many places of the queue for each that it leaves to others."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one key; None: no limit. `share`: of the engine, against other keys that wait; `priority`: the first that its
    requests may have, and have if they say nothing (lower runs earlier)."""

    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens_per_day: float | None = None
    share: float = 1.0
    priority: int = 0

    def __post_init__(self) -> None:
        for item in fields(self):
            value, whole = getattr(self, item.name), item.name == "priority"
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or value != value:
                raise UsageError(f"{item.name} is {value!r}, which is no {'whole ' if whole else ''}number")
        for name in ("requests_per_minute", "tokens_per_minute", "tokens_per_day"):
            if (value := getattr(self, name)) is not None and not 1 <= value < math.inf:
                raise UsageError(f"{name} is {value}, but must be at least 1", "leave it out for no limit")
        if not 1 / MOST_SHARE <= self.share <= MOST_SHARE:
            raise UsageError(f"share is {self.share}, but must be between {1 / MOST_SHARE:g} and {MOST_SHARE:g}")
        if abs(self.priority) > PRIORITY:
            raise UsageError(f"priority is {self.priority}, but must have 32 bits")


class Bucket:
    """`capacity` units, given back over `seconds`. May be overdrawn. `shared`: where its level lies, if several
    processes draw on it."""

    def __init__(self, capacity: float, seconds: float) -> None:
        self.capacity, self.seconds, self._rate = capacity, seconds, capacity / seconds
        self._level, self._then = capacity, time.monotonic()
        self.shared: Ledger | None = None

    @property
    def level(self) -> float:
        return self.take(0.0)

    def take(self, count: float) -> float:
        """What is left then."""
        if self.shared is not None:
            return self.shared.change(self.capacity, lambda level, passed: self._filled(level, passed) - count)
        now = time.monotonic()
        self._level, self._then = self._filled(self._level, now - self._then) - count, now
        return self._level

    def _filled(self, level: float, passed: float) -> float:
        return min(self.capacity, level + passed * self._rate)

    def wait(self, count: float) -> float:
        """Seconds until so much is there."""
        return max(0.0, (count - self.level) / self._rate)


@dataclass(eq=False)
class Account:
    """One key. `name`: the beginning of its hash; empty: callers without a key. Counts are since the server began."""

    name: str
    digest: bytes
    limits: Limits = field(default_factory=Limits)
    requests: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    held: int = 0  # places of the queue

    def __post_init__(self) -> None:
        limits = self.limits
        self._requests = [Bucket(limits.requests_per_minute, MINUTE)] if limits.requests_per_minute else []
        times = ((limits.tokens_per_minute, MINUTE), (limits.tokens_per_day, DAY))
        self._tokens = [Bucket(count, seconds) for count, seconds in times if count]

    @property
    def buckets(self) -> list[tuple[str, Bucket]]:
        """Each with what it is of."""
        return [*(("requests", each) for each in self._requests), *(("tokens", each) for each in self._tokens)]

    def check(self) -> None:
        """May there be another request? Raises LimitError."""
        self._check("requests", self._requests, 1)
        self._check("tokens", self._tokens, 1)

    def begin(self, prompt_tokens: int) -> None:
        """A request begins. Raises LimitError, or CapacityError for a prompt that no waiting makes room for."""
        for bucket in self._tokens:
            if prompt_tokens > bucket.capacity:
                raise CapacityError(
                    f"the prompt has {prompt_tokens} tokens, but this API key has {bucket.capacity:g} at most",
                    "shorten the prompt",
                )
        self._check("requests", self._requests, 1)
        self._check("tokens", self._tokens, prompt_tokens)
        for bucket in self._requests:
            bucket.take(1)
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self._spend(prompt_tokens)

    def wrote(self, tokens: int) -> None:
        """One of its requests has ended, with so many tokens."""
        self.generated_tokens += tokens
        self._spend(tokens)

    def _spend(self, tokens: int) -> None:
        for bucket in self._tokens:
            bucket.take(tokens)

    def _check(self, what: str, buckets: Seq[Bucket], count: float) -> None:
        seconds = max((bucket.wait(count) for bucket in buckets), default=0.0)
        if seconds > 0:
            self.refused += 1
            raise LimitError(
                f"this API key has no {what} left for {seconds:.1f} s", "try again then", seconds, self.headers()
            )

    def headers(self) -> dict[str, str]:
        """What is left, of each kind that is limited: of the bucket that has least."""
        told: dict[str, str] = {}
        for what, buckets in (("requests", self._requests), ("tokens", self._tokens)):
            if not buckets:
                continue
            least = min(buckets, key=lambda bucket: bucket.level)
            told |= {
                f"x-ratelimit-limit-{what}": f"{least.capacity:.0f}",
                f"x-ratelimit-remaining-{what}": f"{max(0.0, math.floor(least.level)):.0f}",
                f"x-ratelimit-reset-{what}": duration(least.wait(least.capacity)),
            }
        return told

    def priority(self, wanted: int | None) -> int:
        """Of a request that wants this one. Who has no key competes with nobody, and may have any."""
        own = self.limits.priority
        return own if wanted is None else wanted if not self.name else max(wanted, own)


def duration(seconds: float) -> str:
    """As OpenAI's API writes it: 6m0s, 1s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return "".join(f"{value}{unit}" for value, unit in ((hours, "h"), (minutes, "m")) if value) + f"{rest}s"


class Accounts:
    """All keys of a server. Without any, everybody is one caller, who may give requests any priority."""

    def __init__(self, keyed: Seq[Account] = ()) -> None:
        self._keyed = list(keyed)
        self._by_name = {account.name: account for account in keyed}
        self._open = Account("", b"")

    @classmethod
    def of(cls, keys: Seq[str], file: Path | None) -> Accounts:
        """Keys without limits, and those of a file. Raises UsageError."""
        found = [_account(hashlib.sha256(key.encode()).digest(), Limits()) for key in keys]
        found += read_file(file) if file is not None else []
        if len({account.name for account in found}) < len(found):
            raise UsageError("an API key is given twice", "look at --api-key and --api-key-file")
        return cls(found)

    def share(self, folder: Path) -> None:
        """Draw on the same budgets as other processes with the same keys, which lie in a folder."""
        for account in self._keyed:
            for what, bucket in account.buckets:
                bucket.shared = Ledger(folder / f"budget-{account.name}-{what}-{bucket.seconds:.0f}")

    def __bool__(self) -> bool:
        """Does one need a key?"""
        return bool(self._keyed)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._keyed)

    def find(self, key: bytes) -> Account | None:
        """Whose key it is. All are compared, and each takes the same time wherever they differ."""
        digest = hashlib.sha256(key).digest()
        right = [hmac.compare_digest(digest, account.digest) for account in self._keyed]
        return self._keyed[right.index(True)] if any(right) else None

    def named(self, name: str) -> Account:
        return self._by_name.get(name, self._open)

    def check_room(self, account: Account, count: int, free: int, seconds: float) -> None:
        """May it take so many places of the queue, of which so many are free? Where there are several keys, some are
        left to the others. `seconds`: after which it may be tried again. Raises LimitError."""
        if len(self._keyed) > 1 and account.held and account.held + count > ROOM_SHARE * (free - count):
            account.refused += 1
            raise LimitError(
                f"this API key has {account.held} texts that run or wait, and places are left to other keys",
                "try again when some have ended", seconds,
            )  # fmt: skip


def _account(digest: bytes, limits: Limits) -> Account:
    return Account(digest.hex()[:SHOWN], digest, limits)


def read_file(path: Path) -> list[Account]:
    """A TOML file with a table for each key: `key` or `sha256` (hexadecimal, of the key), and members of Limits. Raises
    UsageError that says which table is wrong."""
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"--api-key-file: cannot read {path}: {error.strerror}", "is the path right?") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"--api-key-file: {path} is no TOML: {error}") from None
    if not tables:
        raise UsageError(f"--api-key-file: {path} has no keys: everybody could use the server", "[name]\nkey = '...'")
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
    known = {item.name for item in fields(Limits)}
    if unknown := table.keys() - known - {"key", "sha256"}:
        raise UsageError(f"{sorted(unknown)[0]} is unknown", f"members are key, sha256, {', '.join(sorted(known))}")
    limits = Limits(**{name: value for name, value in table.items() if name in known})
    key, digest = table.get("key"), table.get("sha256")
    if (key is None) == (digest is None):
        raise UsageError("it needs one of key and sha256")
    if key is not None:
        if not isinstance(key, str) or not key.strip():
            raise UsageError("key is empty, or no text")
        return _account(hashlib.sha256(key.encode()).digest(), limits)
    try:
        raw = bytes.fromhex(digest or "")
    except (TypeError, ValueError):
        raw = b""
    if len(raw) != hashlib.sha256().digest_size:
        raise UsageError("sha256 must be 64 hexadecimal digits", "printf %s KEY | sha256sum")
    return _account(raw, limits)
