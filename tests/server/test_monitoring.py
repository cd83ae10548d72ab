"""Queries, dashboard and alerts of docs/monitoring: PromQL syntax and existing metric names."""

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import promql_parser
import pytest
import support
from inside import serve_llm
from process import Server
from prometheus_client.parser import text_string_to_metric_families
from support import PATIENCE, until

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.system import free_port

DOCS = Path(__file__).parents[2] / "docs"
FOLDER = DOCS / "monitoring"
PUBLISHED: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("engine_metrics.json").read_text("utf-8"))
"""Names and kinds: vLLM's and SGLang's read from their wheels, llama.cpp's from its server's README and source."""
LATENCY_BUCKETS = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
"""vLLM's, of whole requests and of their phases."""
PHASES = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
TIMES = (*PHASES, "time_to_first_token", "e2e_request_latency")
RELEASES = {"vllm": "vllm 0.32.0", "sglang": "sglang 0.5.23", "llamacpp": "llamacpp b11434"}


make = SimpleNamespace(**runpy.run_path(str(FOLDER / "make.py")))
PANELS: list[dict[str, str]] = make.load()
QUERIES = [
    (engine, query) for panel in PANELS for engine, queries in make.engines_of(panel).items() for query in queries
]


def alerts() -> list[str]:
    """Expressions of alerts.yml, with folded lines joined."""
    text = (FOLDER / "alerts.yml").read_text("utf-8")
    found = re.findall(r"expr: (?:>-\n((?: {10}.*\n)+)|(.*)\n)", text)
    return [" ".join((folded or plain).split()) for folded, plain in found]


def names_in(query: str) -> set[str]:
    """Metric names in a PromQL query. Raises ValueError for invalid PromQL."""

    def walk(node: Any) -> Iterator[str]:
        if isinstance(node, promql_parser.VectorSelector):
            yield node.name
        elif isinstance(node, promql_parser.MatrixSelector):
            yield from walk(node.vector_selector)
        else:
            parts = [getattr(node, name, None) for name in ("expr", "lhs", "rhs", "param")]
            for part in [*parts, *(getattr(node, "args", None) or [])]:
                if part is not None:
                    yield from walk(part)

    return set(walk(promql_parser.parse(query)))


def samples_of(release: str) -> set[str]:
    """Sample names that Prometheus stores for the published metrics of a release."""
    found = set()
    for name, kind in PUBLISHED[release].items():
        ends = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}.get(kind, [""])
        found |= {name if end == "_total" and name.endswith(end) else name + end for end in ends}
    return found


def test_dashboard_and_page_are_generated_from_the_queries(tmp_path: Path) -> None:
    make.write(tmp_path)
    for written, kept in (("dashboard.json", FOLDER / "dashboard.json"), ("monitoring.md", DOCS / "monitoring.md")):
        assert (tmp_path / written).read_text() == kept.read_text(), "python docs/monitoring/make.py"


@pytest.mark.parametrize(("engine", "query"), [pair for pair in QUERIES if pair[0] != "headstart"])
def test_queries_use_published_metric_names(engine: str, query: str) -> None:
    names = names_in(query)
    assert names
    assert names <= samples_of(RELEASES[engine])


def test_counter_without_total_suffix_does_not_exist() -> None:
    """Guides write the counter without _total; Prometheus has no such name."""
    (name,) = names_in("rate(vllm:spec_decode_num_accepted_tokens[5m])")
    assert name not in samples_of(RELEASES["vllm"])
    assert f"{name}_total" in samples_of(RELEASES["vllm"])


def test_dashboard_targets_equal_the_queries() -> None:
    board = json.loads((FOLDER / "dashboard.json").read_text("utf-8"))
    asked = {target["expr"] for panel in board["panels"] for target in panel["targets"]}
    assert {each.replace("[$__rate_interval]", "[5m]") for each in asked} == {query for _, query in QUERIES}
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.slow
def test_headstart_exports_every_queried_metric(server: Server) -> None:
    exported = _exported_names(server)
    wanted = {name for engine, query in QUERIES if engine == "headstart" for name in names_in(query)}
    wanted |= {name for query in alerts() for name in names_in(query)}
    assert wanted
    assert wanted <= exported


def test_each_phase_of_a_request_is_measured_once() -> None:
    config = EngineConfig(**{**support.SMALL, "dtype": "float64"})
    with serve_llm(LLM(support.headed_model("llama"), config)) as server:
        body = {"prompt": [3, 4, 5], "max_tokens": 16, "ignore_eos": True}
        for number in (1, 2):
            assert server.post("/v1/completions", **body).status_code == 200
            seconds = {name: server.metric(f"vllm:{name}_seconds_sum") for name in TIMES}
            assert {name: server.metric(f"vllm:{name}_seconds_count") for name in TIMES} == dict.fromkeys(TIMES, number)
        queue, prefill, decode, inference, first, whole = seconds.values()
        assert min(queue, prefill, decode) > 0
        assert queue + prefill == pytest.approx(first) and prefill + decode == pytest.approx(inference)
        assert queue + inference <= whole
        text = server.client.get("/metrics").text
    bounds = re.findall(r'request_queue_time_seconds_bucket{le="([\d.]+)"', text)
    assert list(map(float, bounds)) == LATENCY_BUCKETS


@pytest.mark.slow
def test_vllm_metric_names_exist_in_vllm(server: Server) -> None:
    """Exception: spec_decode_draft_acceptance_rate, which vLLM has removed and older guides use."""
    own = {name for name in _exported_names(server) if name.startswith("vllm:") and not name.endswith("_created")}
    assert own - samples_of(RELEASES["vllm"]) <= {"vllm:spec_decode_draft_acceptance_rate"}


def _exported_names(server: Server) -> set[str]:
    text = "a b c d a b c d a b c d a b"
    assert server.post("/v1/completions", prompt=text, max_tokens=24, temperature=0).status_code == 200
    families = text_string_to_metric_families(server.client.get("/metrics").text)
    return {sample.name for family in families for sample in family.samples}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus in PATH")
def test_prometheus_has_a_value_for_every_query(server: Server, tmp_path: Path) -> None:
    """Prometheus scrapes each second; the queries use a window of 20 s."""
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    target = str(server.client.base_url).removeprefix("http://").rstrip("/")
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\nrule_files: [alerts.yml]\n"
        f"scrape_configs: [{{job_name: headstart, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", "--config.file", "prometheus.yml", "--storage.tsdb.path", "data"]
    process = subprocess.Popen([*command, "--web.listen-address", address], cwd=tmp_path, stderr=subprocess.DEVNULL)
    try:
        wanted = {query.replace("[5m]", "[20s]") for engine, query in QUERIES if engine == "headstart"}

        def missing() -> set[str]:
            server.post("/v1/completions", prompt="one two one two one two", max_tokens=32)
            return {query for query in wanted if not _has_value(address, query)}

        until(lambda: not missing(), missing)
        rules = httpx.get(f"http://{address}/api/v1/rules", timeout=PATIENCE).json()["data"]["groups"]
        assert [rule["health"] for group in rules for rule in group["rules"]].count("err") == 0
    finally:
        process.kill()
        process.wait()


def _has_value(address: str, query: str) -> bool:
    try:
        found = httpx.get(f"http://{address}/api/v1/query", params={"query": query}, timeout=PATIENCE)
    except httpx.TransportError:
        return False  # not started yet
    if found.status_code == 503:
        return False  # not ready yet
    answer = found.json()
    assert answer["status"] == "success", (query, answer)
    return any(result["value"][1] != "NaN" for result in answer["data"]["result"])
