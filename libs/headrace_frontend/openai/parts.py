"""What serves the clients of a process, whatever runs their requests."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.bounds import CallerBounds
from headrace_common.registry.adapters import Adapter
from headrace_common.version import version
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.config import FrontendConfig
from headrace_frontend.conversations import FindElsewhere, new_conversation_store, nowhere
from headrace_frontend.openai.answers import ModelParsers
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.promises import Keep
from headrace_frontend.request.model_names import ModelChoice
from headrace_frontend.request.preparation import ModelWorkers, RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck, request_bytes_max
from headrace_frontend.running.runner import RequestRunner
from headrace_frontend.tenants import CacheSalts, load_tenants
from headrace_text.codec import TextCodec


class ModelLister(Protocol):
    """Lists the models that can serve requests."""

    def list_models(self) -> Sequence[inference_pb2.Model]:
        """The models with at least one live decode worker, by name."""
        ...

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """OpenAI's field of responses. Empty while no decode worker serves the model."""
        ...


def system_fingerprint(layout_hashes: Iterable[bytes], adapter: Adapter | None) -> str:
    """One text for equal models, weights, engines and versions. The hashes are those of all decode workers."""
    parts = sorted(layout.hex() for layout in layout_hashes)
    if not parts:
        return ""
    named = (version(), "" if adapter is None else adapter.digest, *parts)
    return f"fp_{hashlib.sha256(chr(10).join(named).encode()).hexdigest()[:16]}"


class ClientParts:
    """The parts that the settings describe. `run_by` comes before the first request.

    `codecs` are by served model, and `policy` returns the one in force. `prefix_hash_key` returns the deployment's key,
    or 0 while it is unknown. `count_refused`: see CallerBounds.
    """

    runner: RequestRunner

    def __init__(
        self,
        config: FrontendConfig,
        codecs: Mapping[str, TextCodec],
        workers: ModelWorkers,
        models: ModelLister,
        *,
        keep: Keep,
        policy: Callable[[], registry_pb2.Policy],
        prefix_hash_key: Callable[[], int],
        count_refused: Callable[[str, int], None],
        find_conversation: FindElsewhere = nowhere,
    ) -> None:
        self.codecs, self.models, self.keep = codecs, models, keep
        self.deadline_s = config.default_deadline_s
        """Of requests without a timeout."""
        self.rejects_unknown_fields = config.reject_unknown_fields
        self.parsers = {name: ModelParsers(*names) for name, names in config.parsers.items()}
        self.images = ImageFetcher(config.image_hosts)
        self.tenants = load_tenants(config.api_keys_file)
        self.callers = CallerBounds(config.calls_per_caller_max, count_refused)
        self.conversations = new_conversation_store(config, find_conversation)
        limits = AdmissionLimits(
            max_num_seqs=config.max_concurrent_requests,
            max_queued_tokens=config.queued_tokens_max,
            wait_s=config.admission_wait_s or math.inf,
        )
        self.admission = Admission(limits, lambda: policy().tenant_weights)
        salts = CacheSalts(by_tenant=config.separates_tenants, prefix_hash_key=prefix_hash_key)
        self.preparer = RequestPreparer(codecs, workers, salts.salt_of)
        self._workers = workers
        images = any(codec.images is not None for codec in codecs.values())
        self.size = RequestSizeCheck(self._max_model_len, images=images)
        self.body_bytes_max = request_bytes_max(self._max_model_len().values(), images=images)

    def run_by(self, runner: RequestRunner) -> RequestRunner:
        """`runner`, which runs the requests from now on."""
        self.runner = runner
        return runner

    def _max_model_len(self) -> dict[str, int]:
        """By model: that of its workers, or of its own files while it has none."""
        live = self._workers.max_model_len()
        return {name: live.get(name) or one.max_model_len for name, one in self.codecs.items()}
