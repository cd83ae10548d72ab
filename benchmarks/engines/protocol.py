"""What an engine's child process says: a JSON line per answer, on the stdout it started with, to one on stdin.

Standard library only, because it runs in the interpreter of every engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]


def take_stdout() -> TextIO:
    """The real stdout for the protocol; what libraries print from now on goes to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, about: Mapping[str, Any], handlers: Mapping[str, Handler]) -> None:
    """Say that the model is loaded, then answer `{"do": name, ...arguments}` until stdin ends."""
    print(json.dumps(about), file=channel)
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps(handlers[arguments.pop("do")](**arguments)), file=channel)
