"""The start of `headstart serve`."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from headstart.server.app import ServerConfig
from headstart.server.run import _run


class InterruptedServer:
    """uvicorn's server when SIGINT comes while it starts."""

    started = should_exit = False
    config = SimpleNamespace(is_ssl=False)

    async def serve(self, sockets: list[socket.socket]) -> None:
        self.started = self.should_exit = True
        for each in sockets:
            each.close()
        await asyncio.sleep(0.05)


def test_signal_during_start_ends_the_server() -> None:
    server: Any = InterruptedServer()
    models: Any = None
    asyncio.run(_run(server, models, ServerConfig(), [socket.create_server(("127.0.0.1", 0))], lambda: None))
