"""Mutated checkpoints: no file makes a command crash, hang or fill memory, and no broken head is reported ALIVE.

A valid checkpoint of every family and every kind of drafter is changed in one place (mutations.py). Each mutation
states whether the head can still work, and `headstart inspect` must agree. With `tools`, the other commands that read
checkpoints must end with a result or one line of error."""

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


class TimedOut(BaseException):
    """A command exceeded the time limit."""


def run_command(command: Callable[[], int]) -> tuple[int, str, str, str]:
    """Runs a command in this process; returns exit code, output, errors, and the failure found (empty: none)."""
    out, err, peak = io.StringIO(), io.StringIO(), 0

    def raise_timed_out(number: int, frame: FrameType | None) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, raise_timed_out)
    signal.alarm(int(PATIENCE))
    tracemalloc.start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command()
        peak = tracemalloc.get_traced_memory()[1]
    except TimedOut:
        code = -1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        tracemalloc.stop()
    errors = err.getvalue().strip()
    failure = "" if code in (0, 1, 2) else "it hung" if code == -1 else f"exit {code}: {errors[:300]}"
    if not failure and (peak > MEGABYTES * 1e6 or (code == 2 and not errors)):
        failure = f"{peak / 1e6:.0f} MB, and says {errors!r}"
    return code, out.getvalue(), errors, failure


def inspect_json(path: Path) -> int:
    """`headstart inspect PATH --json`, without building all commands of the command line each time."""
    try:
        return finish(inspect.run(InspectOptions(model=str(path))), True)
    except HeadstartError as error:
        print_error(error.message, error.hint)
        return status_of(error).exit_code
    except Exception:  # noqa: BLE001  # like the process edge
        traceback.print_exc()
        return 3


def other_commands(path: Path, out: Path) -> Iterator[list[str]]:
    """Commands other than inspect that read a checkpoint without loading the model."""
    for layout in ("xllm", "vllm-eagle", "speculators", "gguf"):
        yield ["export", str(path), "--to", layout, "-o", str(out / layout)]
    yield ["graft", str(path), "--strip", "-o", str(out / "strip")]
    yield ["plan", str(path), "--gpu", "h100", "--json"]
    yield ["launch", "vllm", str(path), "--gpus", "h100", "--dry-run"]
    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    yield ["launch", "sglang", str(target), "--head", str(path), "--gpus", "h100", "--dry-run"]


def failures_of(mutation: Mutation, folder: Path, *, tools: bool) -> Iterator[str]:
    """Failures of the commands on a mutated checkpoint."""
    path = mutation.subject.write(folder / "model")
    if mutation.change_files:
        mutation.change_files(path)
    code, out, err, failure = run_command(partial(inspect_json, path))
    if failure or (code == 2 and mutation.breaks is False):
        yield f"inspect: {failure or err}"
    elif code != 2 and mutation.breaks is not None:
        heads = json.loads(out, parse_constant=_refuse)["heads"]
        verdict = heads["verdict"]
        if verdict in ("alive", "undeclared") if mutation.breaks else verdict != mutation.subject.verdict:
            yield f"inspect: {verdict}: {heads['reason']}"
    for line in other_commands(path, folder / "out") if tools else ():
        if failure := run_command(partial(main, line))[3]:
            yield f"{' '.join(line[:2] + line[3:])}: {failure}"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def failures(seed: int, numbers: range, *, tools: bool = False) -> Iterator[tuple[int, str, str]]:
    """(number, mutation, failure) of each failure."""
    for number in numbers:
        mutation = mutation_of(seed, number)
        folder = Path(tempfile.mkdtemp(prefix="headstart-fuzz-"))
        try:
            for why in failures_of(mutation, folder, tools=tools):
                yield number, f"{mutation.subject.name}: {mutation.what}", why
        finally:
            shutil.rmtree(folder, ignore_errors=True)
