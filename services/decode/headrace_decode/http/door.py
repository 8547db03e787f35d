"""Assembles and serves the OpenAI HTTP API of a decode worker."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence

from headrace.inference.v1 import inference_pb2, keep_pb2
from headrace.worker.v1 import worker_pb2
from headrace_common.config import WILDCARD_HOSTS
from headrace_common.deadlines import Deadline
from headrace_common.errors import StaleIncarnation
from headrace_common.http.bounds import HttpBounds
from headrace_common.http.server import HttpServer
from headrace_common.ports import split_host_port
from headrace_common.registry.view import RegistryView
from headrace_common.rpc.channel import open_channel
from headrace_decode.admission import Capacity
from headrace_decode.attempts import Attempts
from headrace_decode.config import DecodeConfig
from headrace_decode.http.dispatcher import BlockShares, OwnDispatcher, prefill_worker_count
from headrace_decode.http.prefill import RouterPrefills
from headrace_engine.worker.config import served_model
from headrace_engine.worker.host import HostedWorker, WorkerHost
from headrace_frontend.openai.app import MetricsPage, OpenAiApp
from headrace_frontend.openai.intake import ClientParts, system_fingerprint
from headrace_frontend.promises import kept_of, no_promise, worker_request
from headrace_frontend.request.model_names import Adapters, ModelChoice
from headrace_frontend.running.tracer import RequestTracer
from headrace_frontend.tenants import load_tenants
from headrace_kv.layout import engine_hash
from headrace_text.codec import TextCodec
from headrace_text.load import SIMULATED_MODEL, load_codecs


class _OwnModel:
    """The worker's model, as request preparation and the list of models need it."""

    def __init__(self, hosted: HostedWorker[DecodeConfig], members: RegistryView) -> None:
        engine = hosted.engine
        self.name = served_model(hosted.config, engine)
        self._max_model_len = engine.max_model_len
        self._adapters = hosted.adapters
        self._engine_hashes = frozenset([engine_hash(engine.descriptor.layout)])
        self._members = members

    def max_model_len(self) -> Mapping[str, int]:
        return {self.name: self._max_model_len}

    def adapters(self) -> Adapters:
        return {self.name: {adapter.name: adapter for adapter in self._adapters.announced}}

    async def wait_for_worker(self, model: str, deadline: Deadline) -> bool:
        return False

    def system_fingerprint(self, choice: ModelChoice) -> str:
        return system_fingerprint(self._engine_hashes, choice.adapter)

    def list_models(self) -> Sequence[inference_pb2.Model]:
        return [
            inference_pb2.Model(
                name=self.name if adapter is None else adapter.name,
                max_model_len=self._max_model_len,
                prefill_worker_count=prefill_worker_count(self._members, self.name, adapter),
                decode_worker_count=1,
                parent="" if adapter is None else self.name,
            )
            for adapter in (None, *self._adapters.announced)
        ]


def gateway_gauges(
    status: worker_pb2.WatchStatusResponse,
    capacity: Capacity,
    waiting: int,
    adapters: Sequence[str],
) -> str:
    """What the model server protocol of the Gateway API's inference extension wants, by the names of vLLM.

    `waiting` are the requests that wait before the engine. An adapter counts as running while it is loaded.
    """
    usage = status.used_blocks / max(1, status.total_blocks)
    blocks = f'block_size="{capacity.block_tokens}",num_gpu_blocks="{status.total_blocks}"'
    # Prometheus escapes visible ASCII as JSON does.
    names = json.dumps(",".join(adapters))
    loaded = f'max_lora="{len(adapters)}",running_lora_adapters={names},waiting_lora_adapters=""'
    gauges: list[tuple[str, str, float]] = [
        ("num_requests_running", "", status.running_requests),
        ("num_requests_waiting", "", status.waiting_requests + waiting),
        ("kv_cache_usage_perc", "", usage),
        ("cache_config_info", f"{{{blocks}}}", 1),
    ]
    if adapters:
        gauges.append(("lora_requests_info", f"{{{loaded}}}", time.time()))
    return "".join(
        f"# TYPE vllm:{name} gauge\nvllm:{name}{labels} {value}\n" for name, labels, value in gauges
    )


class HttpDoor:
    """Serves `http_listen`. The clients of a gateway reach this worker there."""

    def __init__(
        self,
        host: WorkerHost,
        hosted: HostedWorker[DecodeConfig],
        attempts: Attempts,
        capacity: Capacity,
    ) -> None:
        self._config = config = hosted.config
        self._host = host
        self._model = _OwnModel(hosted, host.members)
        self._capacity = capacity
        self._hash_key = 0
        self.prefills = RouterPrefills(hosted.ref, lambda endpoint: open_channel(endpoint, config))
        self._ref, self._attempts = hosted.ref, attempts
        self._parts: ClientParts | None = None
        self._server: HttpServer | None = None

    def set_prefix_hash_key(self, key: int) -> None:
        """The deployment's key, from which the cache salts of tenants follow."""
        self._hash_key = key

    async def start(self) -> str:
        """Serves from now on. Returns the host:port at which gateways reach it. Raises ConfigError."""
        config = self._config
        folder = SIMULATED_MODEL if config.engine == "sim" else config.model
        codecs = await asyncio.to_thread(load_codecs, {self._model.name: folder})
        self._server = HttpServer(
            self._build_app(codecs),
            config.http_listen,
            setting="http_listen",
            tls=config.listen_tls,
            bounds=HttpBounds(config.connections_max()),
        )
        self._server.start()
        host, port = split_host_port(config.http_listen)
        if host in WILDCARD_HOSTS:
            host, _ = split_host_port(config.internal_advertise)
        return f"{host}:{port or self._server.port}"

    def _build_app(self, codecs: Mapping[str, TextCodec]) -> OpenAiApp:
        config, model, host = self._config, self._model, self._host
        telemetry = host.telemetry.for_worker(self._ref.worker_id)
        self._parts = parts = ClientParts(
            config,
            codecs,
            model,
            model,
            keep=self._keep,
            policy=lambda: host.members.policy,
            prefix_hash_key=lambda: self._hash_key,
            count_refused=host.metrics.count_refused,
        )
        parts.admission.resize_slots(model.name, self._capacity.max_num_seqs)
        blocks = BlockShares(
            self._attempts,
            self._capacity,
            lambda: host.members.policy.tenant_weights,
            config.admission_wait_s or math.inf,
        )
        dispatcher = OwnDispatcher(self._ref, model.name, blocks, self.prefills, host.members)
        runner = parts.new_runner(
            dispatch=dispatcher.run,
            tracer=RequestTracer(telemetry),
            # `Attempts` refuses requests once routers have noticed the drain.
            drain_error=self._attempts.refusal,
            runs_while_draining=True,
        )
        parts.run_by(runner)
        readers = load_tenants(config.metrics_keys_file, "metrics_keys_file")

        def metrics(kind: str) -> str:
            waiting = parts.admission.waiting + blocks.pool.waiting
            adapters = [*model.adapters()[model.name]]
            status = self._attempts.status()
            gauges = gateway_gauges(status, self._capacity, waiting, adapters)
            return gauges + telemetry.metrics.text(kind)

        return OpenAiApp(parts, MetricsPage(readers, metrics, config.http_listen))

    async def _keep(
        self, tenant: str, request: inference_pb2.KeepRequest, deadline: Deadline
    ) -> keep_pb2.Kept:
        asked = worker_request(tenant, request)
        try:
            answer = await self._attempts.keep(asked, deadline)
        except StaleIncarnation as error:
            raise no_promise() from error
        return kept_of(answer.kept, asked.incarnation, asked.transfer_id)

    def start_drain(self) -> None:
        """Reports that the worker is not ready."""
        if self._parts is not None:
            self._parts.runner.drain()

    async def drain(self, deadline: Deadline) -> None:
        """Returns when the requests in flight have ended, at the deadline at last."""
        if self._server is not None:
            await self._server.drain(deadline)

    async def stop(self) -> None:
        """Ends all requests."""
        if self._server is not None:
            await self._server.stop()
        if self._parts is not None:
            self._parts.close()
        await self.prefills.close()
