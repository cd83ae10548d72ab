"""Write dashboard.json and ../monitoring.md from queries.toml: python docs/monitoring/make.py"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENGINES = {"headstart": "headstart", "vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp"}
PLAIN = ("title", "text", "unit", "legend")
WINDOW = "5m"

INTRODUCTION = """\
# Monitoring

`headstart serve` shows its metrics at `/metrics` under vLLM's names, so dashboards made for vLLM work, and its own
under `headstart:`. Counters end in `_total` in Prometheus: `rate(vllm:spec_decode_num_accepted_tokens[5m])`, as some
guides write it, gives nothing. SGLang needs `--enable-metrics`, llama.cpp's server `--metrics`.

- [dashboard.json](monitoring/dashboard.json): import it into Grafana. It shows any of the engines below, by job.
- [alerts.yml](monitoring/alerts.yml): for Prometheus: drafting that is dead, or does not help; requests that wait.
- [queries.toml](monitoring/queries.toml): the queries below as data; `python docs/monitoring/make.py` writes the rest.

```yaml
# prometheus.yml
scrape_configs:
  - job_name: headstart
    static_configs: [{targets: ["localhost:8000"]}]
    # authorization: {credentials: KEY}    # of serve --api-key
rule_files: [alerts.yml]
```
"""


def load() -> list[dict[str, str]]:
    return list(tomllib.loads((HERE / "queries.toml").read_text("utf-8"))["panel"])


def engines_of(panel: dict[str, str]) -> dict[str, list[str]]:
    """Queries by engine; a key such as headstart_drafts is one more of headstart's."""
    found: dict[str, list[str]] = {}
    for key, query in panel.items():
        if key not in PLAIN:
            found.setdefault(key.partition("_")[0], []).append(query)
    return found


def markdown(panels: list[dict[str, str]]) -> str:
    parts = [INTRODUCTION]
    for panel in panels:
        parts.append(f"\n## {panel['title']}\n\n{panel['text']}\n")
        told: dict[tuple[str, ...], list[str]] = {}
        for engine, queries in engines_of(panel).items():
            told.setdefault(tuple(queries), []).append(ENGINES[engine])
        for queries, names in told.items():
            parts.append(f"\n{', '.join(names)}:\n\n```promql\n" + "\n".join(queries) + "\n```\n")
    return "".join(parts)


def dashboard(panels: list[dict[str, str]]) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    chosen = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "Drafting",
        "uid": "headstart-drafting",
        "tags": ["headstart", "speculative decoding"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [chosen]},
        "panels": [_panel(index, panel, source) for index, panel in enumerate(panels)],
    }  # fmt: skip


def _panel(index: int, panel: dict[str, str], source: dict[str, str]) -> dict[str, Any]:
    queries = list(dict.fromkeys(query for each in engines_of(panel).values() for query in each))
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["text"],
        "datasource": source,
        "gridPos": {"h": 8, "w": 8, "x": 8 * (index % 3), "y": 8 * (index // 3)},
        "fieldConfig": {"defaults": {"unit": panel["unit"]}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query.replace(f"[{WINDOW}]", "[$__rate_interval]"),
                "legendFormat": panel.get("legend", "{{job}}"),
            }
            for place, query in enumerate(queries)
        ],
    }


def write(folder: Path) -> None:
    panels = load()
    (folder / "dashboard.json").write_text(json.dumps(dashboard(panels), indent=1) + "\n", "utf-8")
    (folder / "monitoring.md").write_text(markdown(panels), "utf-8")


if __name__ == "__main__":
    write(HERE)
    (HERE / "monitoring.md").rename(HERE.parent / "monitoring.md")
    sys.exit(0)
