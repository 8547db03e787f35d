"""The models and LoRA adapters that clients may name. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from headrace_common.errors import InvalidRequest
from headrace_common.registry.adapters import Adapter

Adapters: TypeAlias = Mapping[str, Mapping[str, Adapter]]
"""By served model, the adapters of its live decode workers by name."""

_NAMES_SHOWN_MAX: Final = 16
NO_ADAPTERS: Final[Adapters] = {}


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """A served model, and one of its adapters or none."""

    model: str
    adapter: Adapter | None = None

    @property
    def name(self) -> str:
        """The name by which clients select it."""
        return self.model if self.adapter is None else self.adapter.name


def resolve_model(
    name: str, models: Collection[str], adapters: Adapters = NO_ADAPTERS, adapter: str = ""
) -> ModelChoice:
    """What a client selects by the name of a model or of an adapter, and by that of an adapter beside it.

    A model has precedence over an adapter of its name. Raises InvalidRequest, which lists the names.
    """
    if name in models:
        return ModelChoice(name, _adapter_of(name, adapter, adapters) if adapter else None)
    served = sorted(models)
    if name:
        owners = sorted(model for model in served if name in adapters.get(model, {}))
        if not owners:
            raise InvalidRequest(
                {"model": f"{name!r} is not served; use one of: {_shown(served, adapters)}"},
                cause="model_not_found",
            )
        if len(owners) > 1:
            raise InvalidRequest(
                {
                    "model": f"{name!r} is an adapter of several models ({', '.join(owners)}): name one of these, and "
                    "the adapter in the field adapter"
                }
            )
        if adapter not in ("", name):
            raise InvalidRequest(
                {"adapter": f"must be empty, because the model {name!r} is an adapter already"}
            )
        return ModelChoice(owners[0], adapters[owners[0]][name])
    if len(served) > 1:
        raise InvalidRequest(
            {
                "model": f"must be set, as several are served; use one of: {_shown(served, adapters)}"
            },
            cause="missing_required_parameter",
        )
    return resolve_model(served[0], models, adapters, adapter)


def _adapter_of(model: str, name: str, adapters: Adapters) -> Adapter:
    of_model = adapters.get(model, {})
    if name in of_model:
        return of_model[name]
    known = ", ".join(sorted(of_model)[:_NAMES_SHOWN_MAX])
    remedy = f"use one of: {known}" if known else "leave it out"
    raise InvalidRequest({"adapter": f"no live worker of {model} has adapter {name!r}; {remedy}"})


def _shown(served: Iterable[str], adapters: Adapters) -> str:
    """The names of models, then those of adapters, as many as a message can have."""
    models = list(served)
    names = sorted({name for model in models for name in adapters.get(model, {})} - {*models})
    return ", ".join([*models, *names[:_NAMES_SHOWN_MAX]])
