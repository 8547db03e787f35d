"""What serves the clients of a process, and the first steps of every route: key, body and admission."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import lru_cache, partial
from typing import Any, Final, Protocol

from headrace.inference.v1 import inference_pb2
from headrace.registry.v1 import registry_pb2
from headrace_common.callers.bounds import CallerBounds, RequestInput
from headrace_common.deadlines import Deadline
from headrace_common.errors import Unauthenticated
from headrace_common.http.exchange import HttpExchange
from headrace_common.registry.adapters import Adapter
from headrace_common.rpc.access import caller_name
from headrace_common.version import version
from headrace_frontend.admission.admission import Admission, AdmissionLimits
from headrace_frontend.admission.fair_share import FairPool
from headrace_frontend.config import FrontendConfig
from headrace_frontend.conversations import ConversationStore
from headrace_frontend.openai.answers import parsers_of
from headrace_frontend.openai.block_apis.stored import StoredObjects
from headrace_frontend.openai.body import Body, BodyKind, UnknownFields, parse_body
from headrace_frontend.openai.image_fetch import ImageFetcher
from headrace_frontend.promises import Keep
from headrace_frontend.request.computations import COUNT_VALUES, PARSE, Result
from headrace_frontend.request.model_names import ModelChoice
from headrace_frontend.request.preparation import ModelWorkers, RequestPreparer
from headrace_frontend.request.size import RequestSizeCheck, request_bytes_max
from headrace_frontend.running.runner import RequestRunner
from headrace_frontend.store import AskElsewhere, new_store, nowhere
from headrace_frontend.tenants import CacheSalts, load_tenants, tenant_or_none
from headrace_text.codec import TextCodec


class ModelLister(Protocol):
    """Lists the models that can serve requests."""

    def list_models(self) -> Sequence[inference_pb2.Model]:
        """The models with at least one live decode worker, by name."""
        ...

    def system_fingerprint(self, choice: ModelChoice) -> str:
        """OpenAI's field of responses. Empty while no decode worker serves the model."""
        ...


_FINGERPRINTS_MAX: Final = 256


@lru_cache(maxsize=_FINGERPRINTS_MAX)
def system_fingerprint(layout_hashes: frozenset[bytes], adapter: Adapter | None) -> str:
    """One text for equal models, weights, engines and versions. The hashes are those of all decode workers."""
    parts = sorted(layout.hex() for layout in layout_hashes)
    if not parts:
        return ""
    named = (version(), "" if adapter is None else adapter.digest, *parts)
    return f"fp_{hashlib.sha256(chr(10).join(named).encode()).hexdigest()[:16]}"


class ClientParts:
    """The parts that the settings describe. `run_by` comes before the first request.

    `codecs` are by served model, and `policy` returns the one in force. `prefix_hash_key` returns the deployment's key,
    or 0 while it is unknown. `count_refused`: see CallerBounds. `watched`: see Admission.
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
        ask_elsewhere: AskElsewhere = nowhere,
        watched: Callable[[str, FairPool], FairPool] = lambda name, pool: pool,
    ) -> None:
        self.codecs, self.models, self.keep = codecs, models, keep
        self.deadline_s = config.default_deadline_s
        """Of requests without a timeout."""
        self.rejects_unknown_fields = config.reject_unknown_fields
        self.stream_ping_s = config.stream_ping_s
        self.parsers = {
            name: parsers_of(codec, *config.parsers[name]) for name, codec in codecs.items()
        }
        self.images = ImageFetcher(config.image_hosts)
        self.origins = config.http_origins
        self.tenants = load_tenants(config.api_keys_file)
        self.callers = CallerBounds(config.calls_per_caller_max, count_refused)
        self.ask_elsewhere = ask_elsewhere
        self._store = store = new_store(config, ask_elsewhere)
        self.conversations = ConversationStore(store)
        self.objects = StoredObjects(store, self.conversations)
        limits = AdmissionLimits(
            max_num_seqs=config.max_concurrent_requests,
            max_queued_tokens=config.queued_tokens_max,
            wait_s=config.admission_wait_s or math.inf,
        )
        self.admission = Admission(limits, lambda: policy().tenant_weights, watched)
        salts = CacheSalts(by_tenant=config.separates_tenants, prefix_hash_key=prefix_hash_key)
        self.preparer = RequestPreparer(codecs, workers, salts.salt_of)
        self.new_runner = partial(
            RequestRunner,
            callers=self.callers,
            admission=self.admission,
            policy=policy,
            preparer=self.preparer,
        )
        """Makes the runner from the arguments that are left."""
        self._workers = workers
        images = any(codec.images is not None for codec in codecs.values())
        self.size = RequestSizeCheck(self._max_model_len, images=images)
        self.body_bytes_max = request_bytes_max(self._max_model_len().values(), images=images)

    def run_by(self, runner: RequestRunner) -> RequestRunner:
        """`runner`, which runs the requests from now on."""
        self.runner = runner
        return runner

    def close(self) -> None:
        """Ends what runs without a client."""
        self._store.close()
        self.preparer.close()

    def _max_model_len(self) -> dict[str, int]:
        """By model: that of its workers, or of its own files while it has none."""
        live = self._workers.max_model_len()
        return {name: live.get(name) or one.max_model_len for name, one in self.codecs.items()}


async def parsed_json(
    parts: ClientParts, tenant: str, data: bytes, parse: Callable[[], Result]
) -> Result:
    """What `parse` makes of a JSON body within the bounds, in the tenant's turns. Raises InvalidRequest."""
    check = partial(parts.size.check_json, data)
    run = parts.preparer.threads.run
    return await run(tenant, PARSE, await run(tenant, COUNT_VALUES, len(data), check), parse)


class Intake:
    """Takes requests."""

    def __init__(self, parts: ClientParts) -> None:
        self._parts = parts
        self._unknown_fields = UnknownFields(rejected=parts.rejects_unknown_fields)

    def tenant_of(self, exchange: HttpExchange) -> str:
        """The tenant of the request's key. Raises Unauthenticated."""
        try:
            return self._parts.tenants.tenant_of(exchange.headers.items())
        except Unauthenticated as error:
            with self._parts.runner.counter.count_failures():
                # The remedy names gRPC's metadata.
                raise Unauthenticated(
                    "a valid API key is required; send it as header 'Authorization: Bearer KEY'"
                ) from error

    def tenant_now(self, exchange: HttpExchange) -> str:
        """The tenant of the request's key. Empty without a known one."""
        return tenant_or_none(self._parts.tenants, exchange.headers.items())

    def in_bounds(
        self, exchange: HttpExchange
    ) -> tuple[RequestInput, AbstractContextManager[None]]:
        """A block that counts a call of the request's caller, and one in it that ends when its key is removed."""
        callers = self._parts.callers
        tenant_now = partial(self.tenant_now, exchange)
        tenant = tenant_now()
        call = callers.call(caller_name(tenant, exchange.host))
        return call, callers.rechecked(tenant_now, tenant)

    async def read(self, exchange: HttpExchange, kind: type[BodyKind]) -> tuple[str, BodyKind]:
        """The tenant and the body."""
        tenant, body, _ = await self.converted(exchange, kind, lambda body: None)
        return tenant, body

    async def converted(
        self, exchange: HttpExchange, kind: type[BodyKind], convert: Callable[[BodyKind], Result]
    ) -> tuple[str, BodyKind, Result]:
        """As `read`, with what `convert` makes of the body. On a thread, unless the body has few values."""
        tenant = self.tenant_of(exchange)
        data = await exchange.json_body(self._parts.body_bytes_max)
        await self._parts.callers.wait_turn()

        def parse() -> tuple[BodyKind, list[str], Result]:
            body = parse_body(kind, data)
            converted = convert(body)
            parts = (body, converted) if isinstance(converted, Body) else (body,)
            return body, self._unknown_fields.check(*parts), converted

        body, unknown, converted = await parsed_json(self._parts, tenant, data, parse)
        if unknown:
            exchange.add_header("x-headrace-ignored-fields", ", ".join(unknown))
        return tenant, body, converted

    def deadline(self, timeout_s: float | None = None) -> Deadline:
        """The deadline of a request with this timeout, or with none of its own."""
        return Deadline.after(self._parts.deadline_s if timeout_s is None else timeout_s)

    def admitted(
        self, tenant: str, deadline: Deadline | None = None
    ) -> AbstractAsyncContextManager[Any]:
        """Admits work of a tenant, by default with the deadline of a request without a timeout."""
        return self._parts.runner.admitted(tenant, deadline or self.deadline())
