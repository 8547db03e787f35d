"""Write the names of all settings into the schema of the Helm chart's values, which refuses other names.

python scripts/chart_settings.py            rewrites docker/helm/headrace/values.schema.json
python scripts/chart_settings.py --check    only says whether it is current
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace_common.config import ServiceConfig
from headrace_decode.config import DecodeConfig
from headrace_planner_service.config import PlannerConfig
from headrace_prefill.config import PrefillConfig
from headrace_registry.config import RegistryConfig
from headrace_router.config import RouterConfig
from headrace_worker.config import BothConfig

SCHEMA: Final = (
    Path(__file__).resolve().parent.parent / "docker" / "helm" / "headrace" / "values.schema.json"
)
CONFIGS: Final[Mapping[str, type[ServiceConfig]]] = {
    "registry": RegistryConfig,
    "router": RouterConfig,
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "worker": BothConfig,
    "planner": PlannerConfig,
}


def with_names(schema: str) -> str:
    """The text of the schema with the names of each service's settings, and of those that all services have."""
    names = {service: set(config.model_fields) for service, config in CONFIGS.items()}
    names["all"] = set.intersection(*names.values())
    for service, found in names.items():
        line = f'    "{service}Setting": {{"enum": {json.dumps(sorted(found))}}},'
        pattern = rf'^    "{service}Setting": .*$'
        schema, count = re.subn(pattern, line, schema, count=1, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"{SCHEMA} has no definition {service}Setting")
    return schema


def main() -> int:
    """Returns 1 when the file is not current."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    old = SCHEMA.read_text(encoding="utf-8")
    new = with_names(old)
    if parser.parse_args().check:
        if new != old:
            print(f"{SCHEMA} is not current: run python scripts/chart_settings.py")
        return int(new != old)
    SCHEMA.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
