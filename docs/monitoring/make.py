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

`headstart serve` exports metrics at `/metrics` under vLLM's names, so dashboards made for vLLM work, and its own under
`headstart:`. Counters end in `_total` in Prometheus. SGLang needs `--enable-metrics`, llama.cpp `--metrics`.
Below, (sglang:) means: this prefix instead of vllm:.

- [dashboard.json](monitoring/dashboard.json): Grafana dashboard for all engines below.
- [alerts.yml](monitoring/alerts.yml): Prometheus alerts.
- [queries.toml](monitoring/queries.toml): the queries; `python docs/monitoring/make.py` writes dashboard and page.

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
        by_query: dict[tuple[str, ...], list[str]] = {}
        for engine, queries in engines_of(panel).items():
            alike = tuple(query.replace(f"{engine}:", "vllm:") for query in queries)
            shown = alike if alike in by_query else tuple(queries)
            prefix = "" if shown == tuple(queries) else f" ({engine}:)"
            by_query.setdefault(shown, []).append(ENGINES[engine] + prefix)
        blocks = ["\n".join((f"# {', '.join(names)}", *queries)) for queries, names in by_query.items()]
        parts.append("\n```promql\n" + "\n".join(blocks) + "\n```\n")
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
