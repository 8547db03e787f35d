"""Checks that the installed vLLM has all that Headrace uses of it. Starts no engine.

A failure names the change. Other tests of this folder check how vLLM calls the hooks.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace_engine.vllm.compat import require_vllm
from headrace_engine.vllm.service.engine_args import take_kv_events
from tests.vllm.conftest import IMPORTS_VLLM
from tests.vllm.contract import (
    BASE,
    CALLS,
    COMMUNICATOR,
    CONNECTORS,
    ENVIRONMENT,
    EVENTS,
    FIELDS,
    HOOKS,
    LATER_HOOKS,
    PROPERTIES,
)

pytestmark = [pytest.mark.core, *IMPORTS_VLLM]


def lookup(name: str) -> Any:
    """The object of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as exc:
            # Not when the module exists, but one that it imports is missing.
            if not ".".join(parts[:count]).startswith(exc.name or "?"):
                raise
            continue
        for position, part in enumerate(parts[count:], count):
            if not hasattr(found, part):
                pytest.fail(f"vLLM has no {part} in {'.'.join(parts[:position])} any more")
            found = getattr(found, part)
        return found
    pytest.fail(f"vLLM has no {name} any more")


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    found = list(inspect.signature(function).parameters.values())
    return [parameter for parameter in found if parameter.name not in ("self", "cls")]


def fields_of(kind: type) -> set[str]:
    """Annotated, defined, slotted or set on self by the class or what it inherits from."""
    names = set(dir(kind))
    for base in kind.__mro__:
        if not base.__module__.startswith("vllm"):
            continue
        names.update(inspect.get_annotations(base))
        if issubclass(base, msgspec.Struct):
            names.update(base.__struct_fields__)
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
            ):
                names.add(node.attr)
    return names


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_hook(hook: str) -> None:
    ours = lookup("headrace_engine.vllm.connector.HeadraceConnector")
    theirs = parameters_of(getattr(lookup(f"{BASE}.KVConnectorBase_V1"), hook))
    names = tuple(parameter.name for parameter in theirs)
    assert names == HOOKS[hook], f"KVConnectorBase_V1.{hook} takes {names}"
    # By name and by position, since vLLM uses both.
    assert tuple(parameter.name for parameter in parameters_of(getattr(ours, hook))) == names


def test_the_joined_connector_overrides_hooks_of_vllms() -> None:
    ours = lookup("headrace_engine.vllm.offload_connector.HeadraceOffloadingConnector")
    base = lookup(f"{CONNECTORS}.multi_connector.MultiConnector")
    for name, hook in vars(ours).items():
        if inspect.isfunction(hook) and not name.startswith("_"):
            theirs = [parameter.name for parameter in parameters_of(getattr(base, name))]
            assert [parameter.name for parameter in parameters_of(hook)] == theirs, name


def test_every_hook_that_we_override_is_listed() -> None:
    ours = lookup("headrace_engine.vllm.connector.HeadraceConnector")
    base = lookup(f"{BASE}.KVConnectorBase_V1")
    overridden = {
        name
        for name, value in vars(ours).items()
        if isinstance(value, classmethod | property)
        or (inspect.isroutine(value) and (hasattr(base, name) or not name.startswith("_")))
    }
    overridden.discard("request_finished_all_groups")
    # Our own scheduler calls them.
    overridden -= {"request_left", "step_times", "take_received"}
    # The joined connector calls them.
    overridden -= {"leave_reports", "require_one_cache", "set_loads_beside"}
    assert overridden - HOOKS.keys() - LATER_HOOKS.keys() - set(PROPERTIES) == set()
    for name in PROPERTIES:
        assert isinstance(getattr(base, name), property), name
    for hook, names in LATER_HOOKS.items():
        if hasattr(base, hook):
            theirs = parameters_of(getattr(base, hook))
            assert tuple(parameter.name for parameter in theirs) == names, hook


def test_the_budget_schedulers_find_what_they_change() -> None:
    package = "vllm.v1.core.sched"
    base = lookup(f"{package}.scheduler.Scheduler")
    for name, names in {
        "schedule": ["self", "throttle_prefills"],
        "add_request": ["self", "request"],
        "_free_request": ["self", "request", "delay_free_blocks"],
        "_preempt_request": ["self", "request", "timestamp", "drop_stale_output"],
        "_update_from_kv_xfer_finished": ["self", "kv_connector_output"],
    }.items():
        assert list(inspect.signature(getattr(base, name)).parameters) == names, name
    source = inspect.getsource(base)
    for attribute in (
        "max_num_scheduled_tokens",
        "prefill_capacity_bound",
        "kv_holding_waiting",
        "finished_recving_kv_req_ids: set[str]",
        "num_spec_tokens",
    ):
        assert f"self.{attribute} = " in source, attribute
    assert "token_budget = self.max_num_scheduled_tokens" in source
    assert "self.scheduler_config.long_prefill_token_threshold\n" in source
    assert "self.is_prefill_chunk = " in inspect.getsource(lookup("vllm.v1.request.Request"))
    ours = "headrace_engine.vllm.scheduler.budget_scheduler"
    assert issubclass(lookup(f"{ours}.BudgetScheduler"), base)
    asynchronous = lookup(f"{package}.async_scheduler.AsyncScheduler")
    assert issubclass(lookup(f"{ours}.BudgetAsyncScheduler"), asynchronous)


def test_the_worker_takes_our_extension_and_calls_the_head_as_it_expects() -> None:
    extension = lookup(lookup("headrace_engine.vllm.service.launch.WORKER_EXTENSION"))
    settings = "headrace_engine.vllm.settings"
    worker = lookup("vllm.v1.worker.worker_base.WorkerBase")
    for name in ("WATCH_METHOD", "FIRST_TOKEN_METHOD", "BESIDE_STEPS_METHOD"):
        method = lookup(f"{settings}.{name}")
        assert callable(getattr(extension, method))
        assert not hasattr(worker, method)
    assert "self.vllm_config = " in inspect.getsource(worker)
    runner = inspect.getsource(lookup("vllm.v1.worker.gpu_model_runner.GPUModelRunner"))
    assert "self.model.compute_logits(sample_hidden_states)" in runner
    for attribute in ("device", "sampler", "lora_config", "input_batch"):
        assert f"self.{attribute} = " in runner, attribute
    assert "self.head_dtype = " in inspect.getsource(
        lookup("vllm.model_executor.layers.logits_processor.LogitsProcessor")
    )
    batch = inspect.getsource(lookup("vllm.v1.worker.gpu_input_batch.InputBatch"))
    for attribute in ("req_id_to_index", "spec_token_ids", "generators"):
        assert f"self.{attribute}: " in batch, attribute


def test_the_connector_has_no_abstract_methods() -> None:
    ours = lookup("headrace_engine.vllm.connector.HeadraceConnector")
    assert ours.__abstractmethods__ == frozenset()


@pytest.mark.parametrize("name", sorted(CALLS))
def test_call(name: str) -> None:
    parameters = parameters_of(lookup(name))
    names = [parameter.name for parameter in parameters]
    given = CALLS[name].split()
    assert set(given) <= set(names), f"{name} takes {names}"
    required = [
        parameter.name
        for parameter in parameters
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    assert set(required) <= set(given), f"{name} needs {required}"


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_fields(name: str) -> None:
    missing = set(FIELDS[name].split()) - fields_of(lookup(name))
    assert not missing, f"{name} has no {', '.join(sorted(missing))} any more"


def test_kv_events_are_encoded_as_maps_with_their_type() -> None:
    for name in ("BlockStored", "BlockRemoved", "AllBlocksCleared"):
        config = lookup(f"{EVENTS}.{name}").__struct_config__
        assert (config.tag, config.tag_field, config.array_like) == (name, "type", False), name
    batch = lookup(f"{EVENTS}.KVEventBatch")(
        ts=1.0, events=[lookup(f"{EVENTS}.AllBlocksCleared")()]
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch))[:2] == [
        1.0,
        [{"type": "AllBlocksCleared"}],
    ]


@pytest.mark.parametrize("name", ["all_gatherv", "reduce_scatterv"])
def test_the_communicator_of_processors_lacks_what_we_supply(name: str) -> None:
    ours = lookup(f"headrace_engine.vllm.parallel.{name}")
    theirs = getattr(lookup(COMMUNICATOR), name)
    assert "raise NotImplementedError" in inspect.getsource(theirs) or theirs is ours
    names = [parameter.name for parameter in parameters_of(theirs)]
    assert names == [parameter.name for parameter in parameters_of(ours)][1:]


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_publish_kv_events_where_we_read_them(rank: int) -> None:
    endpoint = lookup("headrace_engine.vllm.service.kv_events.events_endpoint")
    offset = lookup(f"{EVENTS}.ZmqEventPublisher.offset_endpoint_port")
    path = Path("folder", "link")
    assert offset(endpoint(path), rank) == endpoint(path, rank)
    # So do we for other readers.
    config = SimpleNamespace(publisher="zmq", replay_endpoint=None, endpoint="tcp://*:5557")
    given: dict[str, Any] = {"data_parallel_rank": rank, "kv_events_config": config}
    assert take_kv_events(given).endpoint == f"tcp://*:{5557 + rank}"


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_environment_variable(variable: str) -> None:
    known = lookup("vllm.envs.environment_variables")
    assert variable in known, f"vLLM does not read {variable} any more"


def test_the_installed_version_is_supported() -> None:
    assert require_vllm()
