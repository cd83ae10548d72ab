"""Loading and unloading of LoRA adapters while the server runs: vLLM's /v1/load_lora_adapter and
/v1/unload_lora_adapter. A request uses an adapter by its name as the model.
"""

from pathlib import Path

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field, StrictStr

from headstart.errors import UsageError
from headstart.server.body_reader import CheckedRoute
from headstart.server.model_manager import ServedModel
from headstart.server.pipeline import CLIENT_GONE, ERRORS, find_model, state_of
from headstart.server.schema import Body, GivenName

router = APIRouter(route_class=CheckedRoute)


class UnloadAdapter(Body):
    """POST /v1/unload_lora_adapter."""

    lora_name: GivenName


class LoadAdapter(UnloadAdapter):
    """POST /v1/load_lora_adapter."""

    lora_path: StrictStr = Field(min_length=1, description="Folder or GGUF file on the server's machine.")
    model: StrictStr | None = Field(default=None, description="The model that it belongs to. Default: the first.")


@router.post("/v1/load_lora_adapter", responses=ERRORS)
async def load_lora_adapter(body: LoadAdapter, request: Request) -> Response:
    """Load an adapter. From then on, requests may name it as their model."""
    _check_allowed(request)
    if (served := await find_model(request, body.model)) is None:
        return Response(status_code=CLIENT_GONE)
    if body.lora_name in state_of(request).models.names:
        raise UsageError(f"the name {body.lora_name!r} is in use", "unload that adapter first, or choose another name")
    await run_sync(served.llm.load_adapter, body.lora_name, Path(body.lora_path))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=ERRORS)
async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> Response:
    """Unload an adapter. Running requests still use it."""
    _check_allowed(request)
    served: ServedModel | None = await find_model(request, body.lora_name)
    if served is None:
        return Response(status_code=CLIENT_GONE)
    await run_sync(served.llm.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(request: Request) -> None:
    if not state_of(request).allow_lora_updates:
        raise UsageError("clients may not load and unload adapters here", "start the server with --allow-lora-updates")
