"""Protocol of an engine's worker process: a JSON line on its original stdout for each JSON line on stdin.

Uses the standard library only, as it runs in the interpreter of every engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

Handler = Callable[..., dict[str, Any]]


def take_stdout() -> TextIO:
    """Returns the original stdout for the protocol and redirects later prints to stderr."""
    channel = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return channel


def serve(channel: TextIO, about: Mapping[str, Any], handlers: Mapping[str, Handler]) -> None:
    """Sends `about`, then answers `{"do": handler, ...arguments}` until stdin ends."""
    print(json.dumps(about), file=channel)
    for line in sys.stdin:
        arguments = json.loads(line)
        print(json.dumps(handlers[arguments.pop("do")](**arguments)), file=channel)
