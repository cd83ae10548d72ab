"""A server over an LLM in a thread of the test process, so that tests can change its limits."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from process import HttpServer
from support import PATIENCE

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.engine.async_engine import RequestStream
from headstart.server.app import ServerConfig, app_over, single_model_manager
from headstart.server.model_manager import ServedModel
from headstart.server.pipeline import ServerState
from headstart.server.protocol import HttpProtocol

ENGINE = EngineConfig(threads=1, max_num_seqs=8, kv_blocks=512, max_model_len=2048)


async def tokens_of(stream: RequestStream) -> list[int]:
    try:
        return [token async for _, delta in stream for token in delta.tokens]
    finally:
        stream.close()


class LlmServer(HttpServer):
    """A server with an HTTP client (`client`) and raw connections (`connect`, `exchange`)."""

    def __init__(self, port: int, served: ServedModel, state: ServerState) -> None:
        self.port, self.served, self.state = port, served, state
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def exchange(self, *packets: bytes) -> bytes:
        """Sends the packets; returns all bytes received until the server closes the connection."""
        with self.connect() as connection:
            for packet in packets:
                connection.sendall(packet)
            return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            data += piece
    return data


def state_of(app: Any) -> ServerState:
    """The server state of an application wrapped in middleware."""
    while not isinstance(app, FastAPI):
        app = app.app
    state: ServerState = app.state.headstart
    return state


@contextmanager
def serve_llm(llm: LLM, **settings: Any) -> Iterator[LlmServer]:
    """A server over `llm`; `settings` are fields of ServerConfig."""
    config = ServerConfig(**settings)
    models = single_model_manager(llm, config)
    app, served = app_over(models, config), models.loaded[0]
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a small buffer, so that a slow reader is noticed soon
    bound.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, http=HttpProtocol, ws="none", log_config=None, access_log=False))
    started = threading.Event()

    async def main() -> None:
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        started.set()
        await serving

    server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]  # not the main thread
    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert started.wait(PATIENCE)
    found = LlmServer(bound.getsockname()[1], served, state_of(app))
    try:
        yield found
    finally:
        found.client.close()
        server.should_exit = server.force_exit = True
        thread.join(PATIENCE)
        served.stop()
