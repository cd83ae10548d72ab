"""`headstart ps` and `stop`: server errors and their hints."""

import json

import pytest

from headstart.errors import UsageError
from headstart.tools.client import Response, Server
from headstart.tools.loaded import _request


@pytest.mark.parametrize(
    ("status", "said", "message", "hint"),
    [
        (401, "the API key is missing or wrong", "refuses the API key",
         "give a valid one with --api-key, or HEADSTART_API_KEY"),
        (404, "the model 'x' does not exist (hint: this server has y)", "answers 404: the model 'x' does not exist",
         "this server has y"),
        (500, "loading failed", "answers 500: loading failed", "see the server's log"),
    ],
)  # fmt: skip
def test_server_error_has_one_hint(status: int, said: str, message: str, hint: str) -> None:
    async def answer() -> Response:
        return Response(status=status, body=json.dumps({"error": said}))

    with pytest.raises(UsageError) as refused:
        _request(Server.at("http://localhost:1", None), answer())
    assert (refused.value.message, refused.value.hint) == (f"http://localhost:1 {message}", hint)
