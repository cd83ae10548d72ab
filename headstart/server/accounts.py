"""Accounts by API key: limits, budgets of requests and tokens, and their headers.

Budgets are token buckets that fill steadily. A request takes one from the buckets of requests, its prompt and output
from those of tokens. An output is never cut for want of tokens, so the last one may overdraw. Headers are OpenAI's.
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
NAME_DIGITS = 8  # hexadecimal digits of an account's name, from the key's hash
MAX_SHARE = 1e6
PLACES_PER_FREE_PLACE = 4  # places of the queue that a key may take for each place that it leaves to others


class AccountLimits(BaseModel):
    """Limits of one key; None: no limit."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)
    requests_per_minute: Annotated[float, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[float, Field(ge=1)] | None = None
    tokens_per_day: Annotated[float, Field(ge=1)] | None = None
    # share of the engine, against other keys that wait
    share: float = Field(default=1.0, ge=1 / MAX_SHARE, le=MAX_SHARE)
    # default priority of the key's requests, and the first that they may have (lower runs earlier)
    priority: int = Field(default=0, ge=-PRIORITY, le=PRIORITY)


class _KeyTable(AccountLimits):
    """One table of a key file."""

    key: str | None = None
    sha256: str | None = None  # of the key, hexadecimal


_ENTRY = struct.Struct("<dd")  # the level and its time, by the clock that all processes of a machine share


@dataclass(frozen=True)
class SharedLevel:
    """The level of a bucket in a file, which all replicas of a server change under a lock."""

    path: Path

    def change(self, full: float, by: Callable[[float, float], float]) -> float:
        """Set the level to by(level, seconds since); returns the new level. `full`: level of a new file."""
        with self.path.open("a+b", buffering=0) as file, exclusive_lock(file.fileno()):
            file.seek(0)
            found, now = file.read(_ENTRY.size), time.monotonic()
            level, then = _ENTRY.unpack(found) if len(found) == _ENTRY.size else (full, now)
            level = by(level, now - then)
            file.truncate(0)  # writes go to the end
            file.write(_ENTRY.pack(level, now))
            return level


class TokenBucket:
    """`capacity` units, which come back over `seconds`. May be overdrawn."""

    def __init__(self, capacity: float, seconds: float) -> None:
        self.capacity, self.seconds, self._rate = capacity, seconds, capacity / seconds
        self._level, self._then = capacity, time.monotonic()
        self.shared: SharedLevel | None = None  # where several processes draw on the bucket

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
        """Seconds until so many units are there."""
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
    held: int = 0  # places in the queue

    def __post_init__(self) -> None:
        limits = self.limits
        requests = [(limits.requests_per_minute, MINUTE)]
        tokens = [(limits.tokens_per_minute, MINUTE), (limits.tokens_per_day, DAY)]
        self.buckets: dict[str, list[TokenBucket]] = {"requests": [], "tokens": []}  # by unit
        for unit, capacities in (("requests", requests), ("tokens", tokens)):
            self.buckets[unit] += [TokenBucket(count, seconds) for count, seconds in capacities if count]

    def check(self) -> None:
        """Raise LimitError if no other request is allowed now."""
        self._check("requests", 1)
        self._check("tokens", 1)

    def begin(self, prompt_tokens: int) -> None:
        """Charge a request. Raises LimitError, or CapacityError for a prompt that is larger than the budget."""
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

    def wrote(self, tokens: int) -> None:
        """Charge the output of a request that has ended."""
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
        """x-ratelimit headers for each limited unit, by the bucket with the least left."""
        headers: dict[str, str] = {}
        for unit, buckets in self.buckets.items():
            if buckets:
                least = min(buckets, key=lambda bucket: bucket.level)
                headers |= {
                    f"x-ratelimit-limit-{unit}": f"{least.capacity:.0f}",
                    f"x-ratelimit-remaining-{unit}": f"{max(0.0, math.floor(least.level)):.0f}",
                    f"x-ratelimit-reset-{unit}": duration(least.wait_s(least.capacity)),
                }
        return headers

    def priority(self, wanted: int | None) -> int:
        """The priority of a request that asks for `wanted`. Without keys any priority is allowed."""
        own = self.limits.priority
        return own if wanted is None else wanted if not self.name else max(wanted, own)


def duration(seconds: float) -> str:
    """In the form of OpenAI's API: 6m0s, 1s, 20ms."""
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
        """Accounts of keys without limits, and of a file's keys. Raises UsageError."""
        found = [_account(hashlib.sha256(key.encode()).digest(), AccountLimits()) for key in keys]
        found += read_file(file) if file is not None else []
        if len({account.name for account in found}) < len(found):
            raise UsageError("an API key is given twice", "look at --api-key and --api-key-file")
        return cls(found)

    def share(self, folder: Path) -> None:
        """Share the budgets with other processes of the same keys, in files of a folder."""
        for account in self._keyed:
            for unit, bucket in [(unit, bucket) for unit, each in account.buckets.items() for bucket in each]:
                bucket.shared = SharedLevel(folder / f"budget-{account.name}-{unit}-{bucket.seconds:.0f}")

    def __bool__(self) -> bool:
        """Is a key needed?"""
        return bool(self._keyed)

    def __iter__(self) -> Iterator[Account]:
        return iter(self._keyed)

    def find(self, key: bytes) -> Account | None:
        """The account of a key. Compares with all keys, in constant time."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, account.digest) for account in self._keyed]
        return self._keyed[matches.index(True)] if any(matches) else None

    def named(self, name: str) -> Account:
        """The account of that name; for other names the account of callers without a key."""
        return self._by_name.get(name, self._open)

    def check_room(self, account: Account, count: int, free: int, seconds: float) -> None:
        """Raise LimitError if an account may not take `count` of the `free` places: with several keys, some places are
        left to the others. `seconds`: until the client should try again."""
        if len(self._keyed) > 1 and account.held and account.held + count > PLACES_PER_FREE_PLACE * (free - count):
            account.refused += 1
            what = f"this API key has {account.held} texts that run or wait, and places are left to other keys"
            raise LimitError(what, "try again when some have ended", seconds)


def _account(digest: bytes, limits: AccountLimits) -> Account:
    return Account(digest.hex()[:NAME_DIGITS], digest, limits)


def read_file(path: Path) -> list[Account]:
    """A TOML file with a table for each key: `key` or `sha256` (hexadecimal, of the key), and members of
    AccountLimits. Raises UsageError, which names the wrong table."""
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
