"""Writes the numbers of README.md and the tables of docs/ from docs/results.json.

    python benchmarks/results.py                       # README.md, docs/*.md and docs/demo.svg from docs/results.json
    python benchmarks/results.py --check               # exit code 1 if a document differs
    headstart demo --json > demo.json                  # put a new run of a command into docs/results.json:
    python benchmarks/results.py --take demo demo.json --machine "2 cores of an Intel Xeon"
    python benchmarks/results.py --take one-pass-on-native-1 table.md    # or a table printed by a benchmark

Documents mark places for numbers with `<!-- numbers: NAME -->...<!-- /numbers -->`. NAME is a table of
docs/results.json or a text defined below."""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import picture

from headstart import registry
from headstart.cli.bench import print_demo
from headstart.models.described import DESCRIBED
from headstart.version import __version__

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results.json"
PICTURE = ROOT / "docs" / "demo.svg"
DOCUMENTS = ("README.md", "docs/benchmarks.md", "docs/support.md")
MARK = re.compile(r"(<!-- numbers: ([\w-]+) -->)(.*?)(<!-- /numbers -->)", re.DOTALL)
HTTP = "over-http-against-llama-cpp-1"
"""The table with a row per engine and drafter."""
DEFAULT_ROW = "headstart EAGLE-3 auto"
"""The row of the default settings."""
Results = dict[str, Any]


def demo(results: Results) -> dict[str, Any]:
    return results["runs"]["demo"]["document"]  # type: ignore[no-any-return]


def demo_output(results: Results) -> str:
    """Output of `headstart demo` for its document, as a code block."""
    shown = io.StringIO()
    with redirect_stdout(shown):
        print_demo(demo(results))
    return f"\n```\n{shown.getvalue().rstrip()}\n```\n"


def http_row(results: Results) -> list[str]:
    rows = results["tables"][HTTP]["rows"]
    return next(row for row in rows if row[0] == DEFAULT_ROW)  # type: ignore[no-any-return]


def verified(results: Results) -> str:
    found = results["runs"]["verify"]["document"]
    return (
        f"\n```\nidentical {found['identical']}/{found['texts']} texts over {found['cells']} cells, {found['tokens']} "
        f"tokens compared; ties {found['ties']}, differences {found['differences']}\n```\n"
    )


def family_cells(results: Results) -> str:
    """Sum over the table of verify_families.py, whose last column begins with `same/compared texts`."""
    rows = results["tables"]["families-4"]["rows"]
    counts = [tuple(map(int, row[-1].split(" ")[0].split("/"))) for row in rows]
    forms = sum("+" in row[0] for row in rows)
    which = f"{len(rows) - forms} families and variants" + (f", {forms} weight formats" if forms else "")
    different = sum(compared - same for same, compared in counts)
    return f"{which}, {min(compared for _, compared in counts):,} texts each: differences {different}"


def plug_ins(kind: registry.KindName) -> str:
    """Table of the plug-ins of a kind, each with the first sentence of its docstring. Names as options take them."""
    shown = {name: name.replace("_", "-") if kind == "exports" else name for name in registry.available(kind)}
    rows = [[f"`{shown[name]}`", summary(registry.find(kind, name))] for name in shown]
    return table(["name", "description"], rows)


def summary(module: ModuleType) -> str:
    """The first sentence of a module's docstring."""
    return re.split(r"(?<=[^.\d])\.(?:\s|$)", " ".join((module.__doc__ or "").split()), maxsplit=1)[0]


def families() -> str:
    modules = {name: registry.find("models", name) for name in registry.available("models")}
    rows = [[f"`{name}`", "yes" if each.FAMILY.head else "", summary(each)] for name, each in modules.items()]
    return table(["model_type", "MTP", "models and layers"], rows)


def rows_of(results: Results, name: str, keep: Callable[[list[str]], bool], columns: list[int] | None = None) -> str:
    """Part of a table of docs/results.json: rows accepted by `keep`, columns by number."""
    whole = results["tables"][name]
    chosen = columns or list(range(len(whole["columns"])))
    rows = [[row[i] for i in chosen] for row in whole["rows"] if keep(row)]
    return table([whole["columns"][i] for i in chosen], rows)


def acceptance(results: Results) -> str:
    """Macro means of the acceptance tables, one row per head and temperature."""
    titles = {"acceptance-1": "MTP, greedy", "acceptance-2": "MTP, T = 0.7", "acceptance-3": "MTP, T = 1.0"}
    titles["acceptance-4"] = "EAGLE-3, greedy"
    tables = {name: results["tables"][name] for name in titles}
    columns = ["head", *tables["acceptance-1"]["columns"][1:]]
    return table(columns, [[title, *tables[name]["rows"][-1][1:]] for name, title in titles.items()])


HTTP_ROWS = (
    DEFAULT_ROW, "headstart EAGLE-3 3", "headstart plain", "llama.cpp Q8_0 plain", "llama.cpp Q4_1 plain",
    "llama.cpp Q4_1 EAGLE-3 2", "vLLM bf16 EAGLE-3 2", "vLLM bf16 plain",
)  # fmt: skip
"""Rows of the HTTP table that docs/benchmarks.md shows."""


def table(columns: list[str], rows: list[list[str]]) -> str:
    shown = ["|".join(f" {cell} " if cell else " " for cell in row) for row in (columns, *rows)]
    return "\n" + "\n".join(f"|{line}|" for line in (shown[0], "|".join(["---"] * len(columns)), *shown[1:])) + "\n"


TEXTS: dict[str, Callable[[Results], str]] = {
    "demo-output": demo_output,
    "demo-machine": lambda results: results["runs"]["demo"]["machine"],
    "demo-version": lambda results: results["runs"]["demo"]["version"],
    "demo-identical": lambda results: f"{demo(results)['identical']} of {demo(results)['total']}",
    "demo-saved": lambda results: f"{demo(results)['passes_saved']:.0%}",
    "demo-ratio": lambda results: f"{demo(results)['speed_ratio']:.2f}x",
    "http-speed": lambda results: f"{float(http_row(results)[1]):.0f} tokens/s",
    "http-llama": lambda results: f"{float(http_row(results)[3].rstrip('x')):.1f}x",
    "http-vllm": lambda results: f"{float(http_row(results)[4].rstrip('x')):.1f}x",
    "verify-output": verified,
    "verify-tokens": lambda results: f"{results['runs']['verify']['document']['tokens']:,}",
    "verify-differences": lambda results: str(results["runs"]["verify"]["document"]["differences"]),
    "verify-machine": lambda results: results["runs"]["verify"]["machine"],
    "verify-prompts": lambda results: str(results["runs"]["verify"]["document"]["prompts"]),
    "verify-families": family_cells,
    "over-http": lambda results: rows_of(results, HTTP, lambda row: row[0] in HTTP_ROWS),
    "acceptance": acceptance,
    "contexts-summary": lambda results: rows_of(
        results, "contexts", lambda row: "attention off" not in row[1], [0, 1, 2, 3, 4, 5]
    ),
    "one-pass": lambda results: rows_of(results, "one-pass-on-native-1", lambda row: True, [0, 1, 2, 4, 6, 10, 11]),
    "peers-decode": lambda results: rows_of(
        results, "against-llama-cpp-and-vllm-1", lambda row: "int8" not in row[0], [0, 1, 2, 3]
    ),
    "peers-batches": lambda results: rows_of(
        results, "batches-zen-4", lambda row: True, [0, 1, 2, 3, 4, 5, 6, 10, 11, 12]
    ),
    "peers-prompts": lambda results: rows_of(results, "prompts-zen-4", lambda row: True, [0, 1, 2, 3]),
    "families-summary": lambda results: rows_of(
        results,
        "families-sizes",
        lambda row: "LFM2.5" in row[0] or "MTP" in row[0] or "gpt-oss" in row[0],
        [0, 1, 3, 4, 5, 6, 7],
    ),
    "support-backends": lambda _: plug_ins("backends"),
    "support-families": lambda _: families(),
    "support-refused": lambda _: table(
        ["model_type", "missing"], [[f"`{name}`", family.unsupported] for name, family in DESCRIBED.items()]
    ),
    "support-weights": lambda _: plug_ins("quantizations"),
    "support-heads": lambda _: plug_ins("heads"),
    "support-drafters": lambda _: plug_ins("drafters"),
    "support-tool-formats": lambda _: plug_ins("tool_formats"),
    "support-reasoning-formats": lambda _: plug_ins("reasoning_formats"),
    "support-launchers": lambda _: plug_ins("launchers"),
    "support-exports": lambda _: plug_ins("exports"),
}


def filled(text: str, results: Results) -> str:
    """A document with its numbers filled in. Exits for an unknown name."""

    def number(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        known = results["tables"].get(name)
        if not known and name not in TEXTS:
            sys.exit(f"the mark {name!r} is neither a table of {RESULTS.name} nor a text of {Path(__file__).name}")
        return f"{begin}{table(known['columns'], known['rows']) if known else TEXTS[name](results)}{end}"

    return MARK.sub(number, text)


def expected_documents(results: Results) -> dict[Path, str]:
    """Expected content of each document."""
    texts = {ROOT / name: filled((ROOT / name).read_text("utf-8"), results) for name in DOCUMENTS}
    return texts | {PICTURE: picture.draw(results)}


def take(results: Results, name: str, path: Path, machine: str) -> None:
    """Stores a command's JSON document as run `name`, or a printed Markdown table as table `name`."""
    text = path.read_text("utf-8")
    if text.lstrip().startswith("|"):
        rows = [[cell.strip() for cell in line.strip()[1:-1].split("|")] for line in text.strip().splitlines()]
        about = {key: value for key, value in results["tables"].get(name, {}).items() if isinstance(value, str)}
        results["tables"][name] = about | {"columns": rows[0], "rows": rows[2:]}
        return
    document = json.loads(text)
    if isinstance(document.get("cells"), list):  # documents of verify: only the number of cells is kept
        document = {key: len(value) if key == "cells" else value for key, value in document.items() if key != "found"}
    if not machine:
        sys.exit("--machine: say what it ran on")
    run = results["runs"].setdefault(name, {"command": f"headstart {name} --json"})
    results["runs"][name] = run | {"machine": machine, "version": __version__, "document": document}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 on a difference")
    parser.add_argument("--take", nargs=2, metavar=("NAME", "FILE"), help="put a result into docs/results.json first")
    parser.add_argument("--machine", default="", help="with --take: description of the machine")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8"))
    if asked.take:
        take(results, asked.take[0], Path(asked.take[1]), asked.machine)
        RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    expected = expected_documents(results)
    stale = [path for path, text in expected.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        print(f"{'differs' if asked.check else 'written'}: {path.relative_to(ROOT)}")
        if not asked.check:
            path.write_text(expected[path], "utf-8")
    return int(asked.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
