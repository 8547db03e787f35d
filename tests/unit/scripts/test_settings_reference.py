"""The settings reference lists every setting of every service."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

import settings_reference
from headrace_common.config import ServiceConfig
from headrace_common.process.settings import is_secret
from settings_reference import SERVICES, Service, bounds, render, type_name

SERVICE_IDS = [service.program for service in SERVICES]


class KilnConfig(ServiceConfig):
    """A kiln."""

    heat: int = Field(default=900, ge=20, lt=1_300, description="Low | high.")
    secret: SecretStr = Field(default=SecretStr("hunter2"), description="A secret.")
    tiles: tuple[str, ...] = Field(description="Tiles to bake.")


def section(program: str, page: str) -> str:
    return page.partition(f"\n## {program}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("service", SERVICES, ids=SERVICE_IDS)
def test_every_setting_has_a_row(service: Service) -> None:
    rows = section(service.program, render())
    for name, field in service.settings.model_fields.items():
        row = next(line for line in rows.splitlines() if line.startswith(f"| `{name}` |"))
        assert f"`{service.env_prefix}{name.upper()}`" in row
        assert (f"`--{name.replace('_', '-')}`" in row) is not is_secret(field)
        assert field.description
        assert row.endswith(f"| {' '.join(field.description.split())} |")


@pytest.mark.parametrize("service", SERVICES, ids=SERVICE_IDS)
def test_services_load_their_settings_as_the_reference_states(service: Service) -> None:
    main = importlib.import_module(f"{service.settings.__module__.partition('.')[0]}.main")
    source = inspect.getsource(main)
    assert service.settings.__name__ in source
    assert f'env_prefix="{service.env_prefix}"' in source
    assert service.program == main.PROG


def test_types_defaults_and_bounds_of_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    kiln = Service("headrace-kiln", KilnConfig, "KILN_")
    monkeypatch.setattr(settings_reference, "SERVICES", (kiln,))
    rows = section("headrace-kiln", render())
    assert (
        "| `heat` | `KILN_HEAT` | `--heat` | integer | `900` | >= 20, < 1300 | Low \\| high. |"
        in rows
    )
    assert "| `tiles` | `KILN_TILES` | `--tiles` | list of text | required | - |" in rows
    assert "| `secret` | `KILN_SECRET` | - | secret | none |" in rows
    assert "hunter2" not in rows
    assert "| `internal_listen` |" in rows


def test_no_type_is_shown_as_python_code() -> None:
    fields = [field for service in SERVICES for field in service.settings.model_fields.values()]
    assert {type_name(field) for field in fields if "`" not in type_name(field)} == {
        *("boolean", "integer", "number", "text", "secret", "list of text")
    }
    assert any(list(bounds(field)) for field in fields)


def test_the_page_is_written_to_the_given_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "settings.md"
    monkeypatch.setattr("sys.argv", ["settings_reference.py", str(output)])
    assert settings_reference.main() == 0
    assert output.read_text(encoding="utf-8") == render()
