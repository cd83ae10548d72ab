"""Files, commands and options named in deploy/, Dockerfile and .github/ exist. No container is run."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from source import ROOT
from test_cli_surface import COMMANDS

DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
UNIT = (DEPLOY / "headstart.service").read_text("utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def serve_options(words: list[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("-")}


def test_image_copies_the_files_of_the_build() -> None:
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    needed = {"pyproject.toml", "CMakeLists.txt", "csrc", "headstart"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert needed | {project["readme"], *project["license-files"]} <= set(copied)


def test_image_serves_as_a_user_with_a_health_check() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (.*)", DOCKERFILE, re.MULTILINE)
    words = json.loads(entry)
    assert words[:2] == ["headstart", "serve"]
    assert serve_options(words) <= COMMANDS["serve"]
    stages = DOCKERFILE.split("\nFROM ")
    assert re.search(r"^USER (?!0|root)\w+", stages[-1], re.MULTILINE)
    assert "g++" not in stages[-1], "the compiler stays in its stage"
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)", DOCKERFILE, re.MULTILINE)
    assert "/health" in json.loads(check)[-1]


def test_compose_names_existing_files_and_options() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), (name, source)
            else:
                assert source in COMPOSE["volumes"], (name, source)
        assert all(each in COMPOSE["services"] for each in service.get("depends_on", ()))
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), "the port is not local"
    ours = COMPOSE["services"]["headstart"]
    assert (DEPLOY / ours["build"] / "Dockerfile").exists()
    assert serve_options(ours["command"]) <= COMMANDS["serve"]
    (cache,) = re.findall(r"^VOLUME (.*)", DOCKERFILE, re.MULTILINE)
    assert [volume.split(":")[1] for volume in ours["volumes"]] == [cache]


def test_prometheus_and_grafana_are_connected() -> None:
    scraping = yaml.safe_load((DEPLOY / "prometheus.yml").read_text("utf-8"))
    mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in COMPOSE["services"]["prometheus"]["volumes"]}
    assert all(f"/etc/prometheus/{name}" in mounted for name in scraping["rule_files"])
    targets = [
        each for job in scraping["scrape_configs"] for group in job["static_configs"] for each in group["targets"]
    ]
    port = re.findall(r"^EXPOSE (\d+)", DOCKERFILE, re.MULTILINE)
    assert targets == [f"headstart:{port[0]}"]
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources" / "prometheus.yml").read_text("utf-8"))["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in COMPOSE["services"]
    (provider,) = yaml.safe_load((folder / "dashboards" / "headstart.yml").read_text("utf-8"))["providers"]
    boards = {volume.split(":")[1]: volume.split(":")[0] for volume in COMPOSE["services"]["grafana"]["volumes"]}
    place = provider["options"]["path"]
    (board,) = (DEPLOY / boards[name] for name in boards if name.startswith(f"{place}/"))
    kinds = {each["type"] for each in json.loads(board.read_text("utf-8"))["templating"]["list"]}
    assert kinds == {"datasource"}, "the dashboard names a data source"


def test_systemd_unit_starts_a_server() -> None:
    (start,) = re.findall(r"^ExecStart=(.*)", UNIT, re.MULTILINE)
    words = shlex.split(start)
    assert words[0].endswith("/bin/headstart")
    assert words[1] == "serve"
    assert serve_options(words) <= COMMANDS["serve"]
    from headstart.server.app import ServerConfig

    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)", UNIT, re.MULTILINE)
    assert int(stop) > ServerConfig().shutdown_timeout + 5


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "headstart.service"
    unit.write_text(UNIT.replace("/opt/headstart/bin/headstart", str(Path(sys.executable).with_name("headstart"))))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "headstart.service" in line]
    assert not ours, done.stderr


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_use_existing_jobs_targets_and_files(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text("utf-8"))
    makefile = (ROOT / "Makefile").read_text("utf-8")
    jobs = workflow["jobs"]
    for job in jobs.values():
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= jobs.keys()
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w.-]+/[\w.-]+@[\w./-]+", step["uses"]), "an action has a version"
            words = shlex.split(step.get("run", ""))
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
            assert all((ROOT / word).exists() for word in words if re.fullmatch(r"[\w/]+\.py", word))


def test_wheels_are_published_without_a_token() -> None:
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    publish = release["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert release["permissions"] == {"contents": "read"}
    assert "secrets." not in json.dumps(release)
    artifacts = {step["with"]["name"] for job in release["jobs"].values() for step in job["steps"]
                 if "upload-artifact" in step.get("uses", "")}  # fmt: skip
    pattern = publish["steps"][0]["with"]["pattern"].replace("*", "")
    assert artifacts
    assert all(name.startswith(pattern) for name in artifacts)


def test_wheel_test_command_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["cibuildwheel"]
    for line in project["test-command"].split("&&"):
        words = shlex.split(line)
        assert words[0] == "headstart"
        assert serve_options(words) <= COMMANDS[words[1]]
