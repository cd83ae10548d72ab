"""What machines and tokens cost: numbers of the user, or of a dated price list (prices.toml, or a copy of it)."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from headstart.errors import UsageError

ON_DEMAND, SPOT, LIST = "on-demand", "spot", "list"
MOST_DOLLARS = 1e6


@dataclass(frozen=True)
class Price:
    """Dollars, and where they come from (empty: the user's own number)."""

    dollars: float
    said: str = ""


def device_price(text: str, device: str, file: str | None) -> Price:
    """`3.31`, `on-demand` or `spot`: of one device for an hour. Raises UsageError."""
    if text not in (ON_DEMAND, SPOT):
        return Price(number("--price-per-hour", text, f"a number, {ON_DEMAND} or {SPOT}"))
    listed, said = _price_list(file)
    devices = _table(listed, "devices")
    row = devices.get(device)
    if not isinstance(row, dict) or text not in row:
        known = ", ".join(sorted(name for name, row in devices.items() if isinstance(row, dict) and text in row))
        hint = f"give dollars, or add it to a copy of the list: --price-list FILE; listed: {known or 'none'}"
        raise UsageError(f"--price-per-hour {text}: the price list has none for {device}", hint)
    return Price(number(f"{device}, {text}", row[text], "a number"), f"{device} {text}: {row[text]} $/h, {said}")


def api_price(text: str, file: str | None) -> Price:
    """`0.88`, or `list`: of a million output tokens. Raises UsageError."""
    if text != LIST:
        return Price(number("--api-price", text, f"a number, or {LIST}"))
    listed, said = _price_list(file)
    row = _table(listed, "api")
    if "output" not in row:
        raise UsageError("--api-price list: the price list has no [api] with output", "give dollars")
    dollars = number("api, output", row["output"], "a number")
    return Price(dollars, f"API: {dollars:g} $ for a million output tokens, {said}")


def number(what: str, value: object, wanted: str) -> float:
    """Dollars above 0. Raises UsageError for anything else."""
    try:
        dollars = float(str(value))
    except ValueError:
        raise UsageError(f"{what} is {value!r}", f"give {wanted}") from None
    if not 0 < dollars <= MOST_DOLLARS:  # NaN is neither
        raise UsageError(f"{what} is {dollars:g}, but a price is above 0 and at most {MOST_DOLLARS:,.0f}")
    return dollars


def _price_list(file: str | None) -> tuple[dict[str, Any], str]:
    """The list, and its source and date in words."""
    path = Path(file).expanduser() if file else None
    if path and not path.is_file():
        raise UsageError(f"--price-list: there is no file {path}", "a TOML file like headstart/tools/plan/prices.toml")
    try:
        if path:
            text = path.read_text("utf-8")
        else:
            text = resources.files("headstart.tools.plan").joinpath("prices.toml").read_text("utf-8")
        listed = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--price-list: {path} cannot be read: {error}") from error
    source = f"{path}" if path else str(listed["source"])
    return listed, f"{source} of {listed.get('date', 'no date')}"


def _table(listed: dict[str, Any], key: str) -> dict[str, Any]:
    table = listed.get(key)
    if not isinstance(table, dict):
        raise UsageError(f"--price-list: it has no [{key}]", "copy the built-in list and edit it")
    return table
