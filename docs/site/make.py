"""Builds the documentation site: `make docs`, or python docs/site/make.py [FOLDER]

Pages: the documents of the repository with adapted links, the notebook, a page per command from its help, the HTTP API
from its OpenAPI description, and command lines of guides with their outcome. MkDocs converts them to HTML and fails on
broken links. Pages load nothing from other sites.
"""

from __future__ import annotations

import ast
import asyncio
import html
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "docs"
SITE = ROOT / "build" / "site"
GUIDE_LINES = ROOT / "tests" / "tools" / "launch" / "stale_lines.json"
FENCE = re.compile(r"^(```.*?^```$)", re.MULTILINE | re.DOTALL)
QUIET = {"NO_MKDOCS_2_WARNING": "1"}
"""Silences the theme's advice to change to its successor; the theme is maintained until May 2027."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
HEADS = sorted(path.parent.name for path in (ROOT / "headstart" / "heads").glob("*/README.md"))
EXTEND = {
    "Write a drafter": "drafter", "Write a family": "family", "Write a head kind": "head-kind",
    "Write a backend": "backend", "Write a checkpoint format": "checkpoint-format",
    "Write a quantization": "quantization", "Write an export": "export", "Write a launcher": "launcher",
    "Write a tool format": "tool-format", "Write a reasoning format": "reasoning-format",
    "Write a sampling parameter": "sampling-parameter",
}  # fmt: skip
NAV: dict[str, dict[str, str]] = {
    "Home": {"headstart": "README.md"},
    "Start": {
        "Quick start": "docs/quickstart.md",
        "Commands": "docs/commands.md",
        "Support": "docs/support.md",
        "How it works": "docs/how-it-works.md",
        "From Python": "docs/python.ipynb",
        "Deploy": "docs/deploy.md",
        "Several engines": "docs/scale.md",
    },
    "Cookbook": {
        "Agents": "docs/cookbook/agents.md",
        "JSON and other forms": "docs/cookbook/json.md",
        "Long documents": "docs/cookbook/long-documents.md",
        "Benchmark your provider": "docs/cookbook/provider.md",
        "A head for your own model": "docs/cookbook/your-own-head.md",
        "Keep heads through fine-tuning": "docs/cookbook/fine-tuning.md",
    },
    "Guides": {
        "The server": "docs/server.md",
        "Settings": "docs/settings.md",
        "Monitoring": "docs/monitoring.md",
        "Inspect": "docs/inspect.md",
        "A head that learns": "docs/adapt.md",
        "CUDA": "docs/cuda.md",
    },
    "Results": {
        "Benchmarks": "docs/benchmarks.md",
        "Their scripts": "benchmarks/README.md",
        **{f"Head {name}": f"headstart/heads/{name}/README.md" for name in HEADS},
        "Model qwen3_5-tiny": "headstart/checkpoints/qwen3_5-tiny/README.md",
    },
    "Inside": {
        "Architecture": "docs/ARCHITECTURE.md",
        "Contributing": "CONTRIBUTING.md",
        **{title: f"docs/extend/{page}.md" for title, page in EXTEND.items()},
        "Decisions": "docs/decisions/README.md",
        **{path.stem: str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/decisions").glob("0*.md"))},
        "Log": "docs/log/README.md",
        **{path.stem: str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/log").glob("2*.md"), reverse=True)},
        "Libraries of the pages": "headstart/server/web/vendor/README.md",
    },
}
PAGES = {source: "index.md" if source == "README.md" else re.sub(r"^docs/|\.ipynb$|\.md$", "", source) + ".md"
         for section in NAV.values() for source in section.values()}  # fmt: skip
"""Document of the repository -> its page on the site."""
SETTINGS: dict[str, Any] = {
    "site_name": "headstart",
    "site_description": "An LLM engine built around multi-token prediction",
    "docs_dir": "pages",
    "use_directory_urls": False,  # readable without a server
    "theme": {
        "name": "material",
        "font": False,  # system fonts; others would be loaded from another site
        "features": ["navigation.tabs", "navigation.top", "content.code.copy", "search.highlight", "toc.follow"],
        "palette": [
            {"media": f"(prefers-color-scheme: {name})", "scheme": scheme, "primary": "indigo",
             "toggle": {"icon": "material/theme-light-dark", "name": f"Switch to {other}"}}
            for name, scheme, other in (("light", "default", "dark"), ("dark", "slate", "light"))
        ],
    },
    "plugins": ["search"],
    "markdown_extensions": ["tables", "attr_list", "pymdownx.superfences", "pymdownx.highlight",
                            {"toc": {"permalink": True, "toc_depth": 3}}],
    "validation": {
        "nav": {"omitted_files": "warn", "not_found": "warn"},
        "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "warn"},
    },
}  # fmt: skip


def write_pages(folder: Path) -> list[Any]:
    """Writes all pages and their files to `folder`. Returns the table of contents for MkDocs."""
    nav: list[Any] = [{section: [{title: PAGES[source]} for title, source in pages.items()]}
                      for section, pages in NAV.items()]  # fmt: skip
    for source, place in PAGES.items():
        path = ROOT / source
        text = notebook(path) if path.suffix == ".ipynb" else path.read_text("utf-8")
        put(folder / place, for_mkdocs(adapt_links(text, path, place, folder)))
    commands = dict(command_pages())
    for name, text in commands.items():
        put(folder / "commands" / f"{name.replace(' ', '-')}.md", text)
    put(folder / "http.md", http_page())
    put(folder / "modules.md", module_page())
    put(folder / "tables.md", tables_page())
    put(folder / "guide-lines.md", guide_lines_page())
    listed = [{name: f"commands/{name.replace(' ', '-')}.md"} for name in commands]
    single = {"HTTP": "http.md", "Modules": "modules.md", "All measured tables": "tables.md",
              "Lines of guides": "guide-lines.md"}  # fmt: skip
    nav.insert(4, {"Reference": [*({title: page} for title, page in single.items()), {"Commands": listed}]})
    return nav


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The text with `change` applied outside code blocks."""
    return "".join(part if part.startswith("```") else change(part) for part in FENCE.split(text))


def adapt_links(text: str, path: Path, place: str, folder: Path) -> str:
    """Links to documents become links to pages, files beside documents are copied, and links to other files become
    plain text."""

    def fix(found: re.Match[str]) -> str:
        label, (target, _, anchor) = found[1], found[2].partition("#")
        if not target or ":" in target:
            return found[0]
        source = os.path.relpath(path.parent / target, ROOT)
        if source in PAGES:
            new = os.path.relpath(PAGES[source], Path(place).parent)
            return f"[{label}]({new}{'#' * bool(anchor)}{anchor})"
        if source.startswith("docs/") and (ROOT / source).is_file():
            name = source.removeprefix("docs/")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, folder / name)
            return f"[{label}]({os.path.relpath(name, Path(place).parent)})"
        return label

    return outside_fences(text, lambda part: LINK.sub(fix, part))


def for_mkdocs(text: str) -> str:
    """Lists in MkDocs' Markdown: an empty line before them, and nested lists indented by four spaces."""

    def lists(part: str) -> str:
        part = re.sub(r"^ {2,3}(?=(?:[-*]|\d+\.) )", "    ", part, flags=re.MULTILINE)
        return re.sub(r"^(?!\s*(?:[-*|]|\d+\.) |\s*$)(.+)\n(?=(?:[-*]|\d+\.) )", r"\1\n\n", part, flags=re.MULTILINE)

    return outside_fences(text, lists)


def notebook(path: Path) -> str:
    cells = json.loads(path.read_text("utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    return "\n\n".join(
        f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
        for cell, text in zip(cells, texts, strict=True)
    )


def command_pages() -> Iterator[tuple[str, str]]:
    """(name, page) of each command."""
    from headstart.cli.app import application
    from headstart.cli.parser import CommandGroup

    def below(group: CommandGroup, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, entry in group.commands.items():
            yield prefix + name, entry
            if isinstance(entry, CommandGroup):
                yield from below(entry, f"{prefix}{name} ")

    for name, entry in below(application(), ""):
        yield name, command_page(name, entry)


def command_page(name: str, entry: Any) -> str:
    """The page of a command or of a group of commands."""
    from headstart.cli.help import arguments_of, panels_of, usage

    parts = [f"# headstart {name}", *(prose(each) for each in entry.help.split("\n\n"))]
    parts.append(f"```text\n{usage(entry, f'headstart {name}')}\n```")
    examples = "\n".join(f"$ {line}" for line in entry.examples)
    parts += ["## Examples", f"```console\n{examples}\n```"]
    if arguments := arguments_of(entry):
        parts += ["## Arguments", table("argument", arguments)]
    for title, rows in panels_of(entry).items():
        parts += [f"## {title}", table("option", rows)]
    return "\n\n".join(parts) + "\n"


def table(first: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {code(name)} | {prose(meaning)} |" for name, meaning in rows]
    return "\n".join([f"| {first} | |", "|---|---|", *lines])


def code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def prose(text: str) -> str:
    """A help text with Markdown characters escaped."""
    text = html.escape(" ".join(text.split()), quote=False)
    return re.sub(r"[\\`*_\[\]|]", lambda found: f"&#{ord(found[0])};", text)


def http_page() -> str:
    """The endpoints and their fields, from the server's OpenAPI description."""
    import httpx

    from headstart import LLM
    from headstart.server.app import ServerConfig, app_over, single_model_manager
    from headstart.server.pages import operations

    async def described() -> dict[str, Any]:
        with LLM("qwen3_5-tiny") as llm:
            app = app_over(single_model_manager(llm, ServerConfig()), ServerConfig())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
                found: dict[str, Any] = (await client.get("/openapi.json")).json()
                return found

    parts = ["# HTTP", "What `headstart serve` answers; [the server](server.md) says what it means. A running server"
             " has this page at `/docs`, and `/openapi.json` for programs."]  # fmt: skip
    for name, text in operations(asyncio.run(described())):
        parts += [f"## `{name}`", text]
    return "\n\n".join(parts) + "\n"


def module_page() -> str:
    """The summary of every module, by package."""
    package = ROOT / "headstart"
    parts = ["# Modules"]
    for folder in sorted({path.parent for path in package.rglob("*.py")}):
        summaries = {
            path: ast.get_docstring(ast.parse(path.read_text("utf-8"))) for path in sorted(folder.glob("*.py"))
        }
        rows = [(path.name, text.partition("\n")[0]) for path, text in summaries.items() if text]
        parts += [f"## {folder.relative_to(ROOT)}", table("module", rows)] if rows else []
    return "\n\n".join(parts) + "\n"


def tables_page() -> str:
    """All tables of docs/results.json, each with its command and machine."""
    parts = ["# All measured tables"]
    for name, each in json.loads((ROOT / "docs" / "results.json").read_text("utf-8"))["tables"].items():
        rows = (each["columns"], ["---"] * len(each["columns"]), *each["rows"])
        about = f"`{each['command']}`, {each['machine']}. {each.get('note', '')}"
        parts += [f"## {name}", about, "\n".join(f"| {' | '.join(row)} |" for row in rows)]
    return "\n\n".join(parts) + "\n"


def guide_lines_page() -> str:
    """Each command line of GUIDE_LINES, with what `serve` and `launch --translate` do with it."""
    from headstart.tools.launch.translate import translate_text

    parts = ["# Lines of guides", "Command lines as guides, issues and scripts show them. `headstart serve`: the words"
             " after the engine's name, typed behind `headstart serve`; whether the model is there is not checked."
             " `headstart launch --translate`: brings a line up to date for its own engine.",
             "| source | line | headstart serve | headstart launch --translate |\n|---|---|---|---|"]  # fmt: skip
    for entry in json.loads(GUIDE_LINES.read_text("utf-8")):
        done = translate_text(entry["line"], entry.get("version"), None)
        shown = "; ".join(f"a person decides: {each}" for each in done.warnings) or f"changed: {len(done.changes)}"
        cells = (prose(entry["source"]), code(entry["line"]).replace("\n", "<br>"), prose(serve_outcome(entry["line"])))
        parts[-1] += f"\n| {' | '.join(cells)} | {prose(shown)} |"
    return "\n\n".join(parts) + "\n"


def serve_outcome(text: str) -> str:
    """Outcome of `headstart serve` with the arguments of each engine command of a text: `runs`, or error and hint.
    Shell variables count as 1."""
    from headstart.cli.option_hints import option_hint
    from headstart.cli.serve import run as serve
    from headstart.errors import UsageError
    from headstart.options import ParseError
    from headstart.tools.launch.command_line import commands, plain_typography
    from headstart.tools.launch.translate import find_engine

    def outcome(words: list[str]) -> str:
        try:
            arguments = serve.read(serve.split(words)[0])
            arguments["vllm"].apply(arguments["engine"].config)
        except ParseError as error:
            return f"{error.message}: {option_hint(error, 'serve', serve, words, lambda: {'serve': serve})}"
        except UsageError as error:
            return f"{error.message}: {error.hint}"
        return "runs"

    found = []
    for tokens in commands(plain_typography(text)):
        if engine := find_engine(tokens):
            words = [re.sub(r"\$(?:\w+|\{\w+\})", "1", token.value) for token in tokens[engine[1] + 1 :]]
            found.append(outcome(words))
    return "; ".join(dict.fromkeys(found)) or "no line that serves a model"


def external_urls(site: Path) -> list[str]:
    """URLs of other sites that pages would load."""
    tag = re.compile(r"""<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
    found = [f"{path.name}: {each}" for path in site.rglob("*.html") for each in tag.findall(path.read_text("utf-8"))]
    css = re.compile(r"""(?:url\(|@import )["']?((?:https?:)?//[^"')]+)""")
    return found + [
        f"{path.name}: {each}" for path in site.rglob("*.css") for each in css.findall(path.read_text("utf-8"))
    ]


def main(site: Path) -> int:
    shutil.rmtree(BUILD, ignore_errors=True)
    settings = SETTINGS | {"nav": write_pages(BUILD / "pages"), "site_dir": str(site)}
    put(BUILD / "mkdocs.yml", json.dumps(settings, indent=1))  # JSON is YAML
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(BUILD / "mkdocs.yml"),
    ]
    if code := subprocess.run(command, env=os.environ | QUIET, check=False).returncode:
        return code
    if found := external_urls(site):
        print("from elsewhere:", *found, sep="\n  ", file=sys.stderr)
        return 1
    pages = list(site.rglob("*.html"))
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file())
    print(f"{len(pages)} pages, {size / 1e6:.1f} MB: {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else SITE))
