import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from openai import OpenAI

sys.path.insert(0, str(Path(__file__).parent))

from inside import ENGINE
from process import Server, running

from headstart import hub
from headstart.api import LLM


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A `headstart serve` process with the default model."""
    if hub.cached_trunk() is None:
        pytest.skip("the default model is not in the cache: headstart pull")
    with running("--threads", "1", "--max-num-seqs", "16", "--kv-blocks", "1024", "--price-per-hour", "36") as found:
        yield found


@pytest.fixture(scope="session")
def openai_client(server: Server) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The default model, for servers in this process."""
    if hub.cached_trunk() is None:
        pytest.skip("the default model is not in the cache: headstart pull")
    return LLM(None, ENGINE)


@pytest.fixture(scope="session")
def vision_llm() -> LLM:
    """A tiny model that reads images."""
    from vision_models import gemma3

    return LLM(str(gemma3()[1]), replace(ENGINE, max_model_len=512))
