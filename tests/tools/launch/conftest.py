import pytest
from tiny_models import write_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with an MTP head and a number of attention heads that is divisible by 8."""
    return str(write_tiny("mimo", tmp_path_factory.mktemp("model"), num_attention_heads=8, num_key_value_heads=4))
