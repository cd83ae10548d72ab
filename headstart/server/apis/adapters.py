"""Loading and unloading of LoRA adapters while the server runs: vLLM's /v1/load_lora_adapter and
/v1/unload_lora_adapter. A request uses an adapter by its name as the model.
"""

from functools import partial
from pathlib import Path
from types import MappingProxyType

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import Field, StrictBool, StrictInt, StrictStr

from headstart.errors import UsageError
from headstart.models.lora import REMEDY
from headstart.server.body_reader import CheckedRoute
from headstart.server.errors import BodyError
from headstart.server.pipeline import ERRORS, find_model, state_of
from headstart.server.schema import Body, GivenName

router = APIRouter(route_class=CheckedRoute)


class AdapterBody(Body):
    """Names an adapter. Undeclared members are refused."""

    lora_name: GivenName

    def check_members(self) -> None:
        """Raises BodyError for undeclared members."""
        for name in self.unknown_here(""):
            raise BodyError(f"{name} is not supported", name, "leave it out")


class UnloadAdapter(AdapterBody):
    """POST /v1/unload_lora_adapter."""

    lora_int_id: StrictInt | None = Field(default=None, description="vLLM's number of the adapter. Ignored.")


class LoadAdapter(AdapterBody):
    """POST /v1/load_lora_adapter."""

    harmless = frozenset({"is_3d_lora_weight"})
    refused = MappingProxyType({"is_3d_lora_weight": f"LoRA of routed experts: {REMEDY}"})
    lora_path: StrictStr = Field(min_length=1, description="Folder or GGUF file on the server's machine.")
    load_inplace: StrictBool = Field(default=False, description="Replace a loaded adapter of this name.")
    model: StrictStr | None = Field(default=None, description="The model that it belongs to. Default: the first.")


@router.post("/v1/load_lora_adapter", responses=ERRORS)
async def load_lora_adapter(body: LoadAdapter, request: Request) -> Response:
    """Load an adapter. From then on, requests may name it as their model."""
    _check_allowed(request)
    body.check_members()
    served = await find_model(request, body.model)
    is_replaced = body.load_inplace and body.lora_name in served.llm.adapters
    if body.lora_name in state_of(request).models.names and not is_replaced:
        raise UsageError(f"the name {body.lora_name!r} is in use", "unload that adapter first, or choose another name")
    await run_sync(partial(served.llm.load_adapter, body.lora_name, Path(body.lora_path), replace=is_replaced))
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", responses=ERRORS)
async def unload_lora_adapter(body: UnloadAdapter, request: Request) -> Response:
    """Unload an adapter. Running requests still use it."""
    _check_allowed(request)
    body.check_members()
    served = await find_model(request, body.lora_name)
    await run_sync(served.llm.unload_adapter, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_allowed(request: Request) -> None:
    if not state_of(request).allow_lora_updates:
        raise UsageError("clients may not load and unload adapters here", "start the server with --allow-lora-updates")
