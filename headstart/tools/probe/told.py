"""What `probe --exact` found, as its JSON document and for people."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any

from headstart.tools.probe.tally import CONDITIONS, CONFIDENCE, CONTROLS, Row, upper_bound, verdict_of

if TYPE_CHECKING:
    from headstart.tools.probe.exact import Found

OUTCOMES = {"equal": "equal", "differs": "DIFFERS", "cannot tell": "differs, but so does one request asked twice"}


def document(found: Found, asked: dict[str, Any]) -> dict[str, Any]:
    """`asked`: what was asked for."""
    untested = dict.fromkeys(what for what, _ in found.untested)
    rows = [row for row in found.tally.rows() if row.differences or row.condition not in untested]
    verdict = verdict_of(rows)
    differing = {row.condition for row in rows if row.outcome == "differs"}
    faults = [
        {"conditions": list(each.conditions), "seen": bool(differing & set(each.conditions)), "says": each.says,
         "source": each.source}
        for each in found.engine.faults
    ]  # fmt: skip
    return {
        "ok": verdict == "exact",
        "verdict": verdict,
        **asked,
        "engine": found.engine.name,
        "version": found.engine.version,
        "confidence": CONFIDENCE,
        "conditions": [row.document() for row in rows],
        "not_tested": [{"what": what, "why": why} for what, why in dict.fromkeys(found.untested)],
        "notes": found.notes,
        "known_faults": faults,
        "summary": _summary(rows),
    }


def _summary(rows: Seq[Row]) -> str:
    """The verdict in a sentence."""
    verdict, compared = verdict_of(rows), sum(row.trials for row in rows)
    if verdict == "exact":
        bound = upper_bound(0, compared)
        sure = f"a rate above {bound:.1%} would have shown, {CONFIDENCE:.0%} sure"
        return f"EXACT: none of {compared} answers differs; {sure}"
    controls = [row for row in rows if row.condition in CONTROLS and row.outcome == "differs"]
    parts = [f"{CONDITIONS[row.condition]} ({row.sampling} {row.differences} of {row.trials})"
             for row in rows if row.outcome == "differs" and row not in controls]  # fmt: skip
    said = f"DIFFERENCES: {', '.join(parts)}" if parts else ""
    if controls:
        which = " and ".join(dict.fromkeys(row.sampling for row in controls))
        why = "; is the seed heeded?" if which == "sampled" else ""
        said += f"{'. ' if said else ''}NOT REPRODUCIBLE: {which} answers differ when asked twice alone{why}"
    return said


def lines(data: dict[str, Any]) -> list[str]:
    """For people; below the table of conditions."""
    found = []
    for each in data["conditions"]:
        if (place := each["first_difference"]) is not None:
            token = "" if place["token"] is None else f", token {place['token']}"
            found += [
                f"{each['means']}, {each['sampling']}: first difference at character {place['character']}{token} "
                f"({place['case']})",
                f"    {place['one']!r}",
                f"    {place['other']!r}",
            ]
    found += [f"not tested: {each['what']}: {each['why']}" for each in data["not_tested"]]
    found += data["notes"]
    if data["engine"]:
        version = f" {data['version']}" if data["version"] else ""
        found.append(f"engine: {data['engine']}{version}")
    for each in data["known_faults"]:
        found.append(f"known{', seen here' if each['seen'] else ''}: {each['says']} ({each['source']})")
    return [*found, data["summary"]]


def table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows."""
    columns = ["condition", "sampling", "trials", "equal", "differ in", "rate below", "outcome"]
    rows = []
    for each in data["conditions"]:
        forms = [f"{form} {count['differences']}/{count['trials']}" for form, count in each["forms"].items()
                 if count["differences"]]  # fmt: skip
        rows.append([each["means"], each["sampling"], str(each["trials"]), str(each["equal"]), ", ".join(forms) or "-",
                     f"{each['upper_bound']:.1%}", OUTCOMES[each["outcome"]]])  # fmt: skip
    return columns, rows
