"""Files of `headstart gate`: JUnit XML for CI, an HTML page, a badge, and a paragraph for a model card."""

import json
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from headstart.errors import UsageError
from headstart.files import write_atomic
from headstart.version import __version__

WORDS = {True: "passed", False: "FAILED", None: "not judged"}
COLOURS = {True: "#2c7a3f", False: "#b42318", None: "#6b7280"}


def write(data: dict[str, Any], files: Mapping[str, Path]) -> None:
    """Writes the file of each format (a name in WRITERS)."""
    for name, path in files.items():
        write_atomic(path, WRITERS[name](data))


def refuse_existing(files: Mapping[str, Path]) -> None:
    """Raises UsageError before minutes of work for a file that would be overwritten, or that has no folder."""
    for name, path in files.items():
        if path.exists():
            raise UsageError(f"--{name}: {path} exists", "add --force, or choose another name")
        if not path.parent.is_dir():
            raise UsageError(f"--{name}: {path.parent} is not a folder", "make it, or choose another place")


def junit(data: dict[str, Any]) -> str:
    """A test suite with a case for each check; checks that could not be made are skipped."""
    cases = []
    for check in data["checks"]:
        text = quoteattr(f"old {check['old']}, new {check['new']}; {check['note']}".rstrip("; "))
        inner = {True: "", False: f"<failure message={text}/>", None: f"<skipped message={text}/>"}[check["ok"]]
        cases.append(f'<testcase classname="headstart.gate" name={quoteattr(check["name"])}>{inner}</testcase>')
    failed, skipped = (sum(check["ok"] is value for check in data["checks"]) for value in (False, None))
    head = f'<testsuite name="headstart gate" tests="{len(cases)}" failures="{failed}" skipped="{skipped}">'
    return "\n".join(['<?xml version="1.0" encoding="UTF-8"?>', head, *cases, "</testsuite>", ""])


def page(data: dict[str, Any]) -> str:
    """One HTML page without external files."""
    rows = "".join(
        f"<tr><td>{escape(check['name'])}</td><td>{escape(check['old'])}</td><td>{escape(check['new'])}</td>"
        f'<td style="color:{COLOURS[check["ok"]]}">{WORDS[check["ok"]]}</td><td>{escape(check["note"])}</td></tr>\n'
        for check in data["checks"]
    )
    sides = " against ".join(f"<code>{escape(data[name]['side'])}</code>" for name in ("new", "old"))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>headstart gate</title>'
        "<style>body{font:15px sans-serif;max-width:60em;margin:2em auto}td,th{padding:.3em .8em;text-align:left}"
        f"</style><h1>{escape(data['summary'])}</h1><p>{sides}; headstart {__version__}</p>\n"
        "<table><tr><th>check</th><th>old</th><th>new</th><th>result</th><th>interval or reason</th></tr>\n"
        f"{rows}</table></html>\n"
    )


def badge(data: dict[str, Any]) -> str:
    """An SVG badge with the kept share of tokens per pass."""
    kept = kept_acceptance(data)
    text = "no drafts" if kept is None else f"tokens per pass kept {kept:.0%}"
    left, right = 78, 12 + 7 * len(text)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="MTP head: {text}">',
        f'<rect width="{left}" height="20" fill="#374151"/>',
        f'<rect x="{left}" width="{right}" height="20" fill="{COLOURS[data["ok"] and kept is not None]}"/>',
        '<g fill="#fff" font-family="sans-serif" font-size="11" text-anchor="middle">',
        f'<text x="{left / 2}" y="14">MTP head</text><text x="{left + right / 2}" y="14">{text}</text></g></svg>\n',
    ]
    return "".join(parts)


def paragraph(data: dict[str, Any]) -> str:
    """Markdown for a model card."""
    found = _lengths(data)
    if not found:
        return "The MTP head was not measured: a side does not report accepted tokens."
    values = ", ".join(f"{kind} {new:.2f} ({old:.2f})" for kind, old, new in found)
    return (
        f"**MTP head.** Tokens per pass by kind of text, in brackets that of "
        f"`{data['old']['model']}`: {values}. Measured with `headstart gate` {__version__}, greedy and sampled, "
        f"{data['max_tokens']} tokens an answer."
    )


def kept_acceptance(data: dict[str, Any]) -> float | None:
    """New tokens per pass as a share of the old ones; None: unknown, or nothing is drafted."""
    return next((new / old for kind, old, new in _lengths(data) if kind == "all" and max(old, new) > 1), None)


def _lengths(data: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(kind of text, old, new) tokens per pass."""
    return [(each["kind"], *each["lengths"]) for each in data["checks"] if each["lengths"]]


WRITERS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "save": lambda data: json.dumps(data["record"]) + "\n", "junit": junit, "report": page, "badge": badge,
}  # fmt: skip
