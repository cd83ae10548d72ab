"""The log of a server."""

from __future__ import annotations

import json
import logging
import sys


def set_up_logs(log_format: str, access_log: bool = False, said: str = "") -> None:
    """Text for people or a JSON object per line, on stderr. Prompts are in neither. `said`: who of several says it."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {f'{said}: ' if said else ''}%(message)s")
    handler.setFormatter(_Json(said) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("headstart.server", "uvicorn.error", *(["headstart.access"] if access_log else [])):
        logging.getLogger(name).setLevel(logging.INFO)


class _Json(logging.Formatter):
    def __init__(self, said: str) -> None:
        super().__init__()
        self._said = said

    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._said:
            document["process"] = self._said
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)
