"""State has one owner: a module changes another object's attributes only through the object's methods."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(
    path
    for folder in ("libs", "services")
    for path in (ROOT / folder).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
)
PROTO_FIELD = re.compile(
    r"^\s*(?:repeated |optional )?(?:map<[^>]+>|[\w.]+) (\w+) = \d+", re.MULTILINE
)
FOREIGN = {
    # The objects are of the standard library.
    ("libs/headrace_common/logs.py", "root.handlers"): "a logger has no method that replaces its handlers",
    ("libs/headrace_common/logs.py", "grpc_server.__class__"): "gRPC makes the logger itself",
    ("libs/headrace_engine/vllm/deployment.py", "ours.propagate"): "a logger's documented attribute",
    ("libs/headrace_engine/vllm/compat.py", "os.environ"): "vLLM reads its settings there",
    ("libs/headrace_engine/vllm/compat.py", "outputs.put"): "vLLM's RequestOutputCollector",
    ("libs/headrace_engine/vllm/compat.py", "llm.output_processor.process_outputs"): "vLLM's OutputProcessor",
    ("libs/headrace_engine/vllm/compat.py", "output.strip_covered_mm_data"): "a function of vLLM",
    ("libs/headrace_kv/transport/mapped_memory.py", "library.mmap.restype"): "ctypes",
    ("services/registry/headrace_registry/store/etcd_connection.py", "sys.modules"): "etcd3's modules are made here",
    ("services/registry/headrace_registry/store/etcd_connection.py", "module.__dict__"): "the same",
    ("services/registry/headrace_registry/store/etcd_endpoint.py", "client.metadata"): "etcd3's token of a user",
    ("libs/headrace_common/access/tls.py", "connection.context"): "ssl has no method for it",
    ("libs/headrace_common/access/tls.py", "context.sni_callback"): "ssl has no method for it",
    ("libs/headrace_common/access/tls.py", "context.verify_mode"): "ssl has no method for it",
    # The objects are vLLM's, which has no methods for these changes.
    ("libs/headrace_engine/vllm/scheduler/connector_scheduler.py", "pool.get_new_blocks"): "the order of new blocks",
    (
        "libs/headrace_engine/vllm/scheduler/budget_scheduler.py",
        "self.scheduler_config.long_prefill_token_threshold",
    ): "vLLM's SchedulerConfig, which its scheduler reads in each step",
    ("libs/headrace_engine/vllm/service/launch.py", "scheduler.async_scheduling"): "vLLM's SchedulerConfig",
    ("libs/headrace_engine/vllm/service/launch.py", "scheduler.scheduler_cls"): "the same",
    ("libs/headrace_engine/vllm/rank/hidden_states.py", "runner.model.compute_logits"): "vLLM's model",
    ("libs/headrace_engine/vllm/rank/hidden_states.py", "one._apply_head"): "vLLM's LogitsProcessor",
    ("libs/headrace_engine/vllm/continuation.py", "request.prefill_stats"): "vLLM's Request",
    ("libs/headrace_engine/vllm/continuation.py", "request.sampling_params.extra_args"): "vLLM's SamplingParams",
    ("libs/headrace_engine/vllm/continuation.py", "add_request.__wrapped__"): "the patch of vLLM's InputBatch",
    ("libs/headrace_engine/vllm/continuation.py", "InputBatch.add_request"): "the patch of vLLM's InputBatch",
    ("libs/headrace_engine/vllm/grammar_costs.py", "create_grammar.__wrapped__"): "a patch of StructuredOutputManager",
    ("libs/headrace_engine/vllm/grammar_costs.py", "grammar_bitmask.__wrapped__"): "the same",
    ("libs/headrace_engine/vllm/grammar_costs.py", "StructuredOutputManager._create_grammar"): "the same",
    ("libs/headrace_engine/vllm/grammar_costs.py", "StructuredOutputManager.grammar_bitmask"): "the same",
    ("libs/headrace_engine/vllm/continuation.py", "state.generator"): "vLLM's CachedRequestState",
    ("libs/headrace_engine/vllm/parallel.py", "synchronize.__wrapped__"): "the patch of vLLM's GPUModelRunner",
    ("libs/headrace_engine/vllm/parallel.py", "GPUModelRunner.sync_and_gather_intermediate_tensors"): "the same",
    ("libs/headrace_engine/vllm/parallel.py", "runner.intermediate_tensors"): "vLLM's GPUModelRunner",
    ("libs/headrace_engine/vllm/parallel.py", "CpuCommunicator.all_gatherv"): "what vLLM's class lacks",
    ("libs/headrace_engine/vllm/parallel.py", "CpuCommunicator.reduce_scatterv"): "the same",
    ("libs/headrace_engine/vllm/service/sampling.py", "params._bad_words_token_ids"): "vLLM sets it from texts only",
    ("libs/headrace_text/chat_encoder.py", "self._plain.encode_special_tokens"): "tokenizers has no other switch",
    # The object is Jinja's environment, which is configured by its dictionaries.
    ("libs/headrace_text/chat_template.py", "environment.filters"): "Jinja",
    ("libs/headrace_text/chat_template.py", "environment.globals"): "Jinja",
}  # fmt: skip
"""Why a module may change an attribute of an object that is not ours, by module and attribute."""


def proto_fields() -> frozenset[str]:
    """The fields of all messages. A message is a value that its maker fills."""
    files = (ROOT / "protos").rglob("*.proto")
    return frozenset(
        name for file in files for name in PROTO_FIELD.findall(file.read_text(encoding="utf-8"))
    )


def assigned(node: ast.AST) -> list[ast.expr]:
    """The targets that a statement or loop assigns or deletes."""
    match node:
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            return targets
        case (
            ast.AugAssign(target=target)
            | ast.AnnAssign(target=target)
            | ast.For(target=target)
            | ast.AsyncFor(target=target)
        ):
            return [target]
        case ast.withitem(optional_vars=ast.expr() as target):
            return [target]
        case _:
            return []


def foreign_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes of objects other than self and cls that the code assigns, changes an item of, or deletes."""
    pending = [target for node in ast.walk(tree) for target in assigned(node)]
    while pending:
        target = pending.pop()
        match target:
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                pending.extend(targets)
            case ast.Starred(value=inner) | ast.Subscript(value=inner):
                pending.append(inner)
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                pass
            case ast.Attribute():
                yield target


def test_modules_change_attributes_of_other_objects_only_by_methods() -> None:
    fields = proto_fields()
    found = {
        (str(path.relative_to(ROOT)), ast.unparse(attribute)): attribute.lineno
        for path in MODULES
        for attribute in foreign_attributes(ast.parse(path.read_text(encoding="utf-8")))
        if attribute.attr not in fields
    }
    offenders = [f"{file}:{found[file, name]}: {name}" for file, name in found.keys() - FOREIGN]
    assert not offenders, "give the owner a method:\n" + "\n".join(sorted(offenders))
    assert not FOREIGN.keys() - found, "remove the unused exceptions"
