"""A tiny model with an MTP head."""

import pytest
from tiny_models import write_tiny


@pytest.fixture(scope="session")
def headed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny("mimo", tmp_path_factory.mktemp("headed")))
