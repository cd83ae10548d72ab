"""A server with several models: texts, lists, metrics, errors, keep_alive, invalid options."""

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from inside import serve_llm
from process import PROGRAM, HttpServer, Server, running
from support import PATIENCE, until
from tiny_models import write_tiny

from headstart import hub
from headstart.api import LLM
from headstart.cli.app import application
from headstart.cli.main import main
from headstart.cli.parser import all_commands
from headstart.cli.serve_models import _model_specs
from headstart.cli.settings import Settings
from headstart.config import EngineConfig
from headstart.errors import UsageError

pytestmark = pytest.mark.slow  # server processes
SMALL = ("--threads", "1", "--max-num-seqs", "8", "--kv-blocks", "512")
TINY = EngineConfig(threads=1, max_num_seqs=8, kv_blocks=512)
DEFAULT = hub.DEFAULT_MODEL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("several")
    write_tiny("mimo", place / "models" / "small")
    shutil.copytree(place / "models" / "small", place / "models" / "broken")
    (place / "models" / "broken" / "model.safetensors").write_bytes(b"")
    write_tiny("llama", place / "own")
    (place / "headstart.toml").write_text(
        f'[serve]\nmodels = "{place}/models"\nkeep_alive = "1h"\n[models.mine]\npath = "{place}/own"\ndepth = 2\n'
    )
    return place


@pytest.fixture(scope="module")
def several(folder: Path) -> Iterator[Server]:
    if hub.cached_trunk() is None:
        pytest.skip("the default model is not in the cache: headstart pull")
    with running(DEFAULT, "--config", str(folder / "headstart.toml"), *SMALL) as server:
        yield server


def answer(server: HttpServer, model: str | None, number: int) -> str:
    found = server.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": f"Count to {number}."}], seed=number,
        max_tokens=40, temperature=0.7, **({"model": model} if model else {}),
    )  # fmt: skip
    assert found.status_code == 200, found.text
    text: str = found.json()["choices"][0]["message"]["content"]
    return text


def headstart(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=PATIENCE)


def names(server: Server, path: str) -> list[str]:
    return [each["name"] for each in server.client.get(path).json()["models"]]


def test_texts_equal_those_of_single_model_servers(several: Server, server: Server, folder: Path) -> None:
    """Concurrent requests to three models load two of them. A request without a model uses the first."""
    asked = [(model, number) for number in range(3) for model in (DEFAULT, "small", "mine", None)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = dict(zip(asked, pool.map(lambda each: answer(several, *each), asked), strict=True))
    with serve_llm(LLM(str(folder / "models/small"), TINY)) as small, serve_llm(LLM(str(folder / "own"), TINY)) as own:
        alone = {DEFAULT: server, "small": small, "mine": own, None: server}
        assert together == {(model, number): answer(alone[model], None, number) for model, number in asked}
    assert len(set(together.values())) == 9


def test_removed_local_model_is_not_looked_up_in_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny("llama", tmp_path / "models" / "one")
    settings = Settings(all_commands(application()), {})
    (offer,) = _model_specs((), Path("models"), settings, EngineConfig(), lambda path, config: config)
    shutil.rmtree("models")
    with pytest.raises(UsageError, match="models/one does not exist"):
        hub.resolve(offer.path)


def test_model_files_are_named_by_stem_and_path(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.gguf", "b.gguf", "x/b.gguf")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    paths = [*map(str, files), "org/model"]
    settings = Settings(all_commands(application()), {})
    found = _model_specs(paths, None, settings, EngineConfig(), lambda path, config: config)
    assert [each.names for each in found] == [("a", paths[0]), *((path,) for path in paths[1:])]


def test_model_lists_show_available_and_loaded_models(several: Server) -> None:
    answer(several, "small", 1)
    listed = {each["id"]: each for each in several.client.get("/v1/models").json()["data"]}
    assert list(listed) == [DEFAULT, "mine", "broken", "small"]
    assert (listed["small"]["loaded"], listed["broken"]["loaded"]) == (True, False)
    assert (listed["small"]["max_model_len"], listed["broken"]["max_model_len"]) == (512, 0)
    assert several.client.get("/v1/models/small").json() == listed["small"]
    assert several.client.get("/v1/models/none").status_code == 404
    tags = [f"{name}:latest" for name in (DEFAULT, "mine", "broken", "small")]
    assert names(several, "/api/tags") == tags
    assert "small:latest" in names(several, "/api/ps") and "broken:latest" not in names(several, "/api/ps")
    shown = several.post("/api/show", model="mine").json()
    assert shown["model_info"]["llama.context_length"] == 512
    assert several.post("/api/show", model="none").status_code == 404
    assert several.client.get("/health").status_code == several.client.get("/ready").status_code == 200


def test_metrics_have_model_labels(several: Server) -> None:
    for model in (DEFAULT, "small"):
        answer(several, model, 1)
    text = several.client.get("/metrics").text
    types = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(types) == len(set(types)), "a metric is declared twice"
    for model in (DEFAULT, "small"):
        assert f'vllm:generation_tokens_total{{model_name="{model}"}}' in text
        assert f'headstart:model_loaded{{model_name="{model}"}} 1.0' in text
    assert 'headstart:model_loaded{model_name="broken"} 0.0' in text


def test_failed_load_is_an_error_of_the_request(several: Server) -> None:
    for path, body in {"/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
                       "/tokenize": {"prompt": "Hi"}, "/v1/embeddings": {"input": "Hi"}}.items():  # fmt: skip
        found = several.post(path, model="broken", **body)
        assert found.status_code == 500
        assert "the model broken cannot be loaded" in found.json()["error"]["message"]
    assert several.post("/v1/completions", model="none", prompt="Hi").status_code == 404
    assert several.client.get("/health").status_code == 200


def test_all_endpoints_load_a_model(several: Server) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "Hi"}, "/v1/embeddings": {"input": "Hi"}, "/api/embed": {"input": "Hi"},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    }  # fmt: skip
    for path, body in bodies.items():
        several.post("/api/generate", model="small", keep_alive=0)
        assert "small:latest" not in names(several, "/api/ps")
        assert several.post(path, model="small", **body).status_code == 200
        assert "small:latest" in names(several, "/api/ps")


def test_keep_alive_of_ollama_requests(several: Server) -> None:
    for given in ("soon", "5 minutes"):
        found = several.post("/api/generate", model="small", prompt="Hi", keep_alive=given)
        assert found.status_code == 400 and "keep_alive" in found.json()["error"]
    loads = several.metric("headstart:model_loads_total")
    assert several.post("/api/generate", model="mine", keep_alive=0).json()["done_reason"] == "unload"
    asked = {"model": "mine", "prompt": "Hi", "stream": False, "options": {"num_predict": 2}}
    several.post("/api/generate", **asked, keep_alive="1h")
    assert "mine:latest" in names(several, "/api/ps")
    several.post("/api/generate", **asked, keep_alive="1s")
    until(lambda: "mine:latest" not in names(several, "/api/ps"))
    assert several.metric("headstart:model_loads_total") == loads + 1
    assert several.post("/api/generate", model="mine", keep_alive=-1).json()["done_reason"] == "load"
    found = {each["name"]: each["expires_at"] for each in several.client.get("/api/ps").json()["models"]}
    assert found["mine:latest"].startswith("2318") and not found.get(f"{DEFAULT}:latest", "").startswith("2318")


def test_ps_and_stop(several: Server) -> None:
    answer(several, "small", 1)
    shown = headstart("ps", "--url", several.url)
    assert shown.returncode == 0 and "small" in shown.stdout
    stopped = headstart("stop", "small", "--url", several.url, "--json")
    assert (stopped.returncode, json.loads(stopped.stdout)) == (0, {"model": "small", "unloaded": True})
    listed = json.loads(headstart("ps", "--url", several.url, "--json").stdout)["models"]
    assert "small" not in [each["name"] for each in listed]
    wrong = headstart("stop", "none", "--url", several.url)
    assert wrong.returncode == 2 and "the model 'none' does not exist" in wrong.stderr
    assert headstart("ps", "--url", "http://127.0.0.1:9").returncode == 2


def test_single_model_is_never_unloaded(server: Server) -> None:
    found = server.post("/api/generate", model=DEFAULT, keep_alive=0)
    assert found.json()["done_reason"] == "load"
    assert headstart("stop", DEFAULT, "--url", server.url).returncode == 1
    assert names(server, "/api/ps") == [f"{DEFAULT}:latest"]
    assert "model_loaded" not in server.client.get("/metrics").text


def test_model_beyond_the_memory_limit_is_refused(folder: Path) -> None:
    with running("--models", str(folder / "models"), "--memory", "0.000001", *SMALL) as tight:
        found = tight.post("/v1/completions", model="small", prompt="Hi")
        assert found.status_code == 503 and "all models may take" in found.json()["error"]["message"]
        assert tight.client.get("/health").status_code == 200
        assert tight.client.get("/metrics").status_code == 200
        assert tight.stop(signal.SIGTERM) == 0


WRONG = {
    "a b --served-model-name c": "--served-model-name is for one model",
    "a --memory 8": "--memory is for several models",
    "a b --head c": "--head is for one model", "a a": "two models are called a",
    "--models none": "--models: none is no folder", "--models .": "--models: there is no model in .",
    "a b --keep-alive soon": "--keep-alive is 'soon', which is no time",
    "a b --memory 0": "--memory is '0', but must be above 0",
    "a b --engine vllm": "another engine serves one model",
    "--config table.toml": "table.toml [models.x]: dept is no setting",
    "--config depth.toml": "depth.toml [models.x]: --depth is 17",
    "--config path.toml": "path.toml [models.x] has no path",
    "--role both --kv-spill x": "--role is 'both', but must be one of prefill, decode",
    "--role decode --kv-spill x": "--role decode needs a prefill server",
    "--role prefill": "--role prefill transfers prompts in files",
    "--prefill http://localhost:1": "--role decode transfers prompts in files",
    "--role prefill --prefill http://localhost:1 --kv-spill x": "computes prompts itself",
    "--prefill ftp://x --kv-spill x": "--prefill is 'ftp://x', which is no URL",
    "--prefill http://x:99999999 --kv-spill x": "which is no URL",
    "--kv-spill-gb 0": "--kv-spill-gb is 0",
    "qwen3_5-tiny --kv-spill x --no-enable-prefix-caching": "--kv-spill keeps prompts",
    "qwen3_5-tiny --kv-spill /proc/x": "--kv-spill: cannot write /proc/x",
    "--replicas 0": "--replicas is 0", "--replicas 9999": "the cores of this process",
    "--replicas some": "--replicas is 'some'", "--replicas 1 --threads 1024": "need 1024 cores",
    "one two --replicas 2": "serve one model",
    "--replicas 1 --record somewhere": "--record does not go with --replicas",
    "--replicas 1 --engine vllm": "headstart's own engines",
    "--replicas 1 --role decode": "--role decode needs a prefill server",
    "--replicas 1 --role prefill --kv-spill kv": "--role prefill does not go with --replicas",
    "./none --allowed-origins https://page.example/": "'https://page.example/', which is no origin",
    "./none --allowed-origins http://localhost:3000 --allowed-origins [\"*\"]": """is '["*"]', which is no origin""",
    "--join nowhere": "--join is 'nowhere'", "--replica x": "--replica is 'x'",
    "qwen3_5-tiny ./none": "./none does not exist", "./none --tool-call-parser x": "unknown tool format 'x'",
}  # fmt: skip


@pytest.mark.parametrize("words", WRONG)
def test_invalid_options_have_a_one_line_error(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error comes before a server listens."""
    monkeypatch.setattr("headstart.server.run.serve", lambda *_: pytest.fail("it serves"))
    monkeypatch.chdir(tmp_path)
    Path("table.toml").write_text('[models.x]\npath = "x"\ndept = 1')
    Path("depth.toml").write_text('[models.x]\npath = "x"\ndepth = 17')
    Path("path.toml").write_text("[models.x]\ndepth = 1")
    assert main(["serve", "--port", "0", *words.split()]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert WRONG[words] in said
