"""HTTP server for OpenVINO GenAI, which has none, with one OpenAI-style path.

    OPENVINO_PYTHON benchmarks/engines/openvino_server.py MODEL.gguf PORT

POST /v1/completions with `prompt` as token ids and `max_tokens`: greedy, streamed, one request at a time.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import openvino
import openvino_genai
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse


def make_app(pipeline: Any, lock: threading.Lock) -> FastAPI:
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"openvino_genai": openvino_genai.__version__}

    @app.post("/v1/completions")
    def complete(body: dict[str, Any]) -> StreamingResponse:
        return StreamingResponse(answer(pipeline, lock, body), media_type="text/event-stream")

    return app


def answer(pipeline: Any, lock: threading.Lock, body: dict[str, Any]) -> Iterator[str]:
    """Server-sent events of the text; the last event has the usage."""
    pieces: queue.Queue[str | None] = queue.Queue()
    config = openvino_genai.GenerationConfig(max_new_tokens=body["max_tokens"], do_sample=False)
    found: dict[str, int] = {}

    def put(text: str) -> bool:
        pieces.put(text)
        return False

    def generate() -> None:
        with lock:
            ids = openvino.Tensor(np.array([body["prompt"]], np.int64))
            result = pipeline.generate(ids, config, put)
            found["completion_tokens"] = len(result.tokens[0])
        pieces.put(None)

    threading.Thread(target=generate).start()
    while (piece := pieces.get()) is not None:
        yield f"data: {json.dumps({'choices': [{'text': piece}]})}\n\n"
    yield f"data: {json.dumps({'choices': [], 'usage': found})}\n\ndata: [DONE]\n\n"


def main() -> None:
    pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU")
    uvicorn.run(make_app(pipeline, threading.Lock()), host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")


if __name__ == "__main__":
    main()
