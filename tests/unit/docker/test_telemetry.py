"""Dashboards, rules and the containers around them: every metric and label exists, and the files are valid."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_common.config import ServiceConfig
from headrace_common.process.settings import load_config
from headrace_common.telemetry.metrics.prometheus import prometheus_name
from headrace_common.telemetry.schema_tables import METRICS
from tests.unit.docker.test_containers import DOCKER, SERVICES, USER, settings_of

FOLDER = DOCKER / "telemetry"
RULES_TEST = Path(__file__).with_name("rules_test.yaml")
DASHBOARDS = sorted((FOLDER / "dashboards").glob("*.json"))
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.telemetry.yaml").read_text())
RULES: dict[str, Any] = yaml.safe_load((FOLDER / "rules.yaml").read_text())
ALL_RULES = [rule for group in RULES["groups"] for rule in group["rules"]]
OTHER_NAMES = {"up", *(rule["record"] for rule in ALL_RULES if "record" in rule)}
OTHER_LABELS = {"le", "instance", "job"}
NAME = re.compile(r"\b(?:headrace|gen_ai)_[a-z0-9_]+\b|\bheadrace:[a-z0-9_:]+|\bup\b")


def label_of(attribute: str) -> str:
    return attribute.replace(".", "_")


def samples() -> dict[str, set[str]]:
    """The labels of each sample that Prometheus may have of our metrics."""
    found: dict[str, set[str]] = {}
    for name, facts in METRICS.items():
        plain = prometheus_name(name, facts.unit)
        labels = {label_of(label) for label in facts.labels}
        if facts.instrument == "histogram":
            found |= {f"{plain}_sum": labels, f"{plain}_count": labels}
            found[f"{plain}_bucket"] = {*labels, "le"}
        else:
            found[f"{plain}_total" if facts.instrument == "counter" else plain] = labels
    return found


SAMPLES = samples()
LABELS = set().union(*SAMPLES.values())


def panels(path: Path) -> list[dict[str, Any]]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return list(loaded["panels"])


def queries(path: Path) -> list[str]:
    return [target["expr"] for panel in panels(path) for target in panel["targets"]]


def unknown_names(expression: str) -> set[str]:
    """The metrics and labels of an expression that no service has. Values of labels are not read."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    known = SAMPLES.keys() | LABELS | OTHER_NAMES
    return set(NAME.findall(bare)) - known


def foreign_labels(expression: str) -> set[str]:
    """Labels in the braces of a sample that does not have them."""
    wrong: set[str] = set()
    for name, inside in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels = set(re.findall(r"(\w+)\s*[=!]~?\"", re.sub(r'=~?"[^"]*"', '=""', inside)))
        wrong |= labels - SAMPLES.get(name, labels) - OTHER_LABELS
    return wrong


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_panel_asks_for_metrics_that_exist(path: Path) -> None:
    assert queries(path)
    for expression in queries(path):
        assert not unknown_names(expression), expression
        assert not foreign_labels(expression), expression
    for panel in panels(path):
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert legend <= LABELS | OTHER_LABELS
            assert all(f"{label}" in target["expr"] for label in legend)


def test_every_rule_asks_for_metrics_that_exist() -> None:
    assert len(ALL_RULES) > 8
    for rule in ALL_RULES:
        assert not unknown_names(rule["expr"]), rule["expr"]
        assert not foreign_labels(rule["expr"]), rule["expr"]
        if "alert" in rule:
            assert set(rule["labels"]) == {"severity"}
            assert set(rule["annotations"]) == {"summary"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "rules.yaml"),
        ("check", "config", "--syntax-only", "prometheus.yaml"),
        ("test", "rules", str(RULES_TEST)),
    ],
)
def test_prometheus_accepts_the_files(arguments: tuple[str, ...]) -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    done = subprocess.run(
        [tool, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_serves_its_metrics_on_the_port_that_is_scraped(name: str) -> None:
    config: type[ServiceConfig] = SERVICES[name]
    base = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"][name]
    prefix = f"HEADRACE_{name.upper()}_"
    flags = [
        f"--{variable.removeprefix(prefix).lower().replace('_', '-')}={value}"
        for variable, value in COMPOSE["services"][name]["environment"].items()
    ]
    loaded = load_config(config, [*settings_of(base), *flags], prog="test", env_prefix="TEST_")
    jobs = yaml.safe_load((FOLDER / "prometheus.yaml").read_text())["scrape_configs"]
    port = loaded.metrics_listen.rpartition(":")[2]
    assert f"{name}:{port}" in jobs[0]["static_configs"][0]["targets"]
    assert loaded.metrics_keys_file == "/run/secrets/metrics_keys"


@pytest.mark.parametrize("name", ["collector", "prometheus", "grafana"])
def test_the_other_containers_are_confined_and_only_start_on_request(name: str) -> None:
    container = COMPOSE["services"][name]
    assert container["user"] == USER
    assert container["read_only"] is True
    assert container["cap_drop"] == ["ALL"]
    assert container["profiles"] == ["telemetry"]
    assert all(port.startswith("127.0.0.1:") for port in container.get("ports", ()))
    for mount in container.get("volumes", ()):
        source, _, mode = mount.split(":")
        assert mode == "ro"
        assert (DOCKER / source).exists()
