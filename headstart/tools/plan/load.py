"""What a fleet has to serve: `100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from headstart.errors import UsageError

EXAMPLE = '"100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms"'
SECONDS = {"s": 1.0, "ms": 1e-3}
PER_SECOND = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"(\d+(?:\.\d+)?)"
_PARTS = {
    "rate": re.compile(rf"{_NUMBER}\s*(?:req(?:uests)?)\s*/\s*(s|min|h)"),
    "prompt": re.compile(rf"{_NUMBER}\s*in"),
    "output": re.compile(rf"{_NUMBER}\s*out"),
    "ttft_s": re.compile(rf"ttft\s*{_NUMBER}\s*(m?s)"),
    "tpot_s": re.compile(rf"tpot\s*{_NUMBER}\s*(m?s)"),
    "share": re.compile(rf"p{_NUMBER}"),
    "network": re.compile(rf"{_NUMBER}\s*gbit\s*/\s*s"),
}
OPTIONAL = ("share", "network")


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests a second, mean tokens of a prompt and of an answer, and what `share` percent of them must have: seconds
    to the first token, and seconds a token after it. `network`: Gbit/s of each machine, where prompts are computed on
    others than tokens."""

    rate: float
    prompt: float
    output: float
    ttft_s: float
    tpot_s: float
    share: float = 95.0
    network: float = 100.0

    def __str__(self) -> str:
        return (
            f"{self.rate:g} req/s, {self.prompt:g} in, {self.output:g} out, TTFT {self.ttft_s:g} s and TPOT "
            f"{self.tpot_s * 1e3:g} ms for {self.share:g} %"
        )


def parse_load(text: str) -> Load:
    """Parts in any order, separated by commas; `p99` in place of `p95`, `25 Gbit/s` of 100. Raises UsageError."""
    found: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, match = next(((n, m) for n, each in _PARTS.items() if (m := each.fullmatch(part.lower()))), ("", None))
        if match is None:
            raise UsageError(f"--fleet: {part!r} is not understood", f"for example --fleet {EXAMPLE}")
        if name in found:
            raise UsageError(f"--fleet: {part!r} says {name.removesuffix('_s')} a second time", "say it once")
        value, unit = float(match[1]), match[2] if match.re.groups > 1 else ""
        found[name] = value / PER_SECOND[unit] if name == "rate" else value * SECONDS.get(unit, 1.0)
    missing = [each.name for each in fields(Load) if each.name not in {*found, *OPTIONAL}]
    if missing:
        shown = {"rate": "req/s", "prompt": "in", "output": "out", "ttft_s": "TTFT", "tpot_s": "TPOT"}
        raise UsageError(
            f"--fleet lacks {', '.join(shown[each] for each in missing)}", f"for example --fleet {EXAMPLE}"
        )
    load = Load(**found)
    if min(load.rate, load.ttft_s, load.tpot_s, load.network) <= 0 or min(load.prompt, load.output) < 1:
        raise UsageError("--fleet: rate, times and tokens must be above 0", f"for example --fleet {EXAMPLE}")
    if not 50 <= load.share < 100:
        raise UsageError(f"--fleet: p{load.share:g}, but it goes from p50 to below p100", "for example p99")
    return load
