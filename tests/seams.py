"""The examples of CONTRIBUTING.md: of each kind one file, as it stands on the page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headstart import registry
from headstart.registry import KindName

PAGE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
SECTIONS: dict[KindName, str] = {
    "drafters": "Write a drafter",
    "models": "Write a family",
    "heads": "Write a head kind",
    "backends": "Write a backend",
    "formats": "Write a checkpoint format",
    "quantizations": "Write a quantization",
    "exports": "Write an export",
    "launchers": "Write a launcher",
    "tool_formats": "Write a tool format",
    "reasoning_formats": "Write a reasoning format",
}


def example(kind: KindName) -> tuple[str, str]:
    """File name and content of the one example of a section."""
    text = PAGE.split(f"## {SECTIONS[kind]}\n")[1].split("\n## ")[0]
    names, blocks = re.findall(r"^`(\w+\.py)`", text, re.M), re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(names) == len(blocks) == 1
    return names[0], blocks[0]


@contextmanager
def plugged_in(folder: Path, *kinds: KindName) -> Iterator[None]:
    """The examples of these kinds on the search path, and nothing else changed. A file may be of several kinds."""
    with ExitStack() as stack:
        for kind in kinds:
            name, code = example(kind)
            (folder / kind).mkdir(exist_ok=True)
            (folder / kind / name).write_text(code, "utf-8")
            for each in registry.KINDS:
                if re.search(rf"^{registry.KINDS[each].constant} = ", code, re.M):
                    stack.enter_context(registry.search_path(each, folder / kind))
        yield
