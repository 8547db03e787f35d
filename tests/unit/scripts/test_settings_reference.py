"""The settings reference lists every setting of every service."""

from __future__ import annotations

import importlib
import inspect

import pytest

from headrace_common.process.settings import is_secret
from settings_reference import SERVICES, Service, render

SERVICE_IDS = [service.program for service in SERVICES]


def section(program: str, page: str) -> str:
    return page.partition(f"\n## {program}\n")[2].partition("\n## ")[0]


@pytest.mark.parametrize("service", SERVICES, ids=SERVICE_IDS)
def test_every_setting_has_a_row(service: Service) -> None:
    rows = section(service.program, render())
    for name, field in service.described.items():
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
