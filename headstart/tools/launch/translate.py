"""Old command lines into current ones."""

from __future__ import annotations

from pathlib import PurePath

from headstart import registry
from headstart.errors import UsageError
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.launcher import Launcher
from headstart.tools.launch.published import published
from headstart.tools.launch.versions import Version


def read_line(text: str) -> tuple[CommandLine, Launcher]:
    """A command line and whose it is. Raises UsageError for one of no known engine."""
    line = CommandLine.parse(text)
    launchers: list[Launcher] = [registry.find("launchers", name).LAUNCHER for name in registry.available("launchers")]
    for place, word in enumerate(line.words):
        for launcher in launchers:
            if _starts(launcher, str(word.value)):
                line.begin = place
                return line, launcher
    known = ", ".join(registry.available("launchers"))
    raise UsageError(f"--translate: {text[:60]!r} is the command of no known engine", f"known: {known}")


def _starts(launcher: Launcher, word: str) -> bool:
    """Is it the engine's program, Python module or container image?"""
    known = {launcher.program, *launcher.modules}
    return PurePath(word).name in known or word.split(":")[0] in {
        image.split(":")[0] for image in launcher.images.values()
    }


def modernize(line: CommandLine, launcher: Launcher, version: Version) -> None:
    """Rename, drop and fold; then name every flag that the version does not have."""
    for old, new in launcher.renamed.items():
        line.rename(old, new)
    launcher.modernize(line, version)
    for flag, why in launcher.removed.items():
        line.drop(flag, why, switch=flag in launcher.switches)
    known = published(launcher.name)
    if known is None:
        return
    for word in line.words[line.begin + 1 :]:
        if word.flag.startswith("--") and not known.has(word.flag, version):
            like = known.like(word.flag, version)
            hint = f"; did you mean {like}?" if like else ""
            line.warnings.append(f"{launcher.title} {known.nearest(version)} has no {word.flag}{hint}")
