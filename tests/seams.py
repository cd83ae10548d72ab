"""The plug-in examples of docs/extend: one file for each kind, unchanged."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headstart import registry
from headstart.registry import KindName

PAGES = Path(__file__).parents[1] / "docs" / "extend"
TUTORIALS: dict[KindName, str] = {
    "drafters": "drafter", "models": "family", "heads": "head-kind", "backends": "backend",
    "formats": "checkpoint-format", "quantizations": "quantization", "exports": "export", "launchers": "launcher",
    "tool_formats": "tool-format", "reasoning_formats": "reasoning-format",
}  # fmt: skip
"""Kind of plug-in -> its page in docs/extend."""


def example(kind: KindName) -> tuple[str, str]:
    """File name and content of the example on a tutorial page."""
    text = (PAGES / f"{TUTORIALS[kind]}.md").read_text("utf-8")
    names, blocks = re.findall(r"^`(\w+\.py)`", text, re.M), re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert len(names) == len(blocks) == 1
    return names[0], blocks[0]


@contextmanager
def plugged_in(folder: Path, *kinds: KindName) -> Iterator[None]:
    """Puts the examples of these kinds on the search path. A file may serve several kinds."""
    with ExitStack() as stack:
        for kind in kinds:
            name, code = example(kind)
            (folder / kind).mkdir(exist_ok=True)
            (folder / kind / name).write_text(code, "utf-8")
            for each in registry.KINDS:
                if re.search(rf"^{registry.KINDS[each].constant} = ", code, re.M):
                    stack.enter_context(registry.search_path(each, folder / kind))
        yield
