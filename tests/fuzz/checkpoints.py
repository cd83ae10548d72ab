"""Mutated checkpoints: no file makes a command fail on its own, hang or fill memory, and no broken head is ALIVE.

A sound checkpoint of every family and every kind of drafter is changed in one place (mutations.py). Of each mutation it
is known whether the head can still work; `headstart inspect` must agree, and with `tools` the other commands that read
checkpoints must end in a result or in one line, too.
"""

import contextlib
import io
import json
import shutil
import signal
import tempfile
import traceback
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from support import PATIENCE

from headstart.cli.main import main
from headstart.cli.render import finish, print_error
from headstart.errors import HeadstartError, status_of
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions
from tests.fuzz.mutations import SIZES, Mutation, mutation_of

MEGABYTES = 150
"""What one command may take over a checkpoint of a few kilobytes."""


class Hung(BaseException):
    """A command that took too long."""


def call(command: Callable[[], int]) -> tuple[int, str, str, str]:
    """Exit code, output and errors of one command in this process; and why that is not acceptable (empty: it is)."""
    out, err, peak = io.StringIO(), io.StringIO(), 0

    def hung(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(int(PATIENCE))
    tracemalloc.start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command()
        peak = tracemalloc.get_traced_memory()[1]
    except Hung:
        code = -1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        tracemalloc.stop()
    said = err.getvalue().strip()
    wrong = "" if code in (0, 1, 2) else "it hung" if code == -1 else f"exit {code}: {said[:300]}"
    if not wrong and (peak > MEGABYTES * 1e6 or (code == 2 and not said)):
        wrong = f"{peak / 1e6:.0f} MB, and says {said!r}"
    return code, out.getvalue(), said, wrong


def look(path: Path) -> int:
    """`headstart inspect PATH --json` without building the command line's tree of commands each time."""
    try:
        return finish(inspect.run(InspectOptions(model=str(path))), True)
    except HeadstartError as error:
        print_error(error.message, error.hint)
        return status_of(error).exit_code
    except Exception:  # noqa: BLE001  # as the process edge
        traceback.print_exc()
        return 3


def commands(path: Path, out: Path) -> Iterator[list[str]]:
    """The other commands that read a checkpoint and load none."""
    for layout in ("xllm", "vllm-eagle", "speculators", "gguf"):
        yield ["export", str(path), "--to", layout, "-o", str(out / layout)]
    yield ["graft", str(path), "--strip", "-o", str(out / "strip")]
    yield ["plan", str(path), "--gpu", "h100", "--json"]
    yield ["launch", "vllm", str(path), "--gpus", "h100", "--dry-run"]
    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    yield ["launch", "sglang", str(target), "--head", str(path), "--gpus", "h100", "--dry-run"]


def try_out(mutation: Mutation, folder: Path, *, tools: bool) -> Iterator[str]:
    """What is wrong with what the commands make of it."""
    path = mutation.subject.write(folder / "model")
    if mutation.disturb:
        mutation.disturb(path)
    code, out, err, wrong = call(partial(look, path))
    if wrong or (code == 2 and mutation.breaks is False):
        yield f"inspect: {wrong or err}"
    elif code != 2 and mutation.breaks is not None:
        heads = json.loads(out, parse_constant=_refuse)["heads"]
        verdict = heads["verdict"]
        if verdict in ("alive", "undeclared") if mutation.breaks else verdict != mutation.subject.verdict:
            yield f"inspect: {verdict}: {heads['reason']}"
    for line in commands(path, folder / "out") if tools else ():
        if wrong := call(partial(main, line))[3]:
            yield f"{' '.join(line[:2] + line[3:])}: {wrong}"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def failures(seed: int, numbers: range, *, tools: bool = False) -> Iterator[tuple[int, str, str]]:
    """(number, what was done, what is wrong)."""
    for number in numbers:
        mutation = mutation_of(seed, number)
        folder = Path(tempfile.mkdtemp(prefix="headstart-fuzz-"))
        try:
            for why in try_out(mutation, folder, tools=tools):
                yield number, f"{mutation.subject.name}: {mutation.what}", why
        finally:
            shutil.rmtree(folder, ignore_errors=True)
