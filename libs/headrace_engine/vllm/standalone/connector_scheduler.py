"""The scheduler's half of the connector in a stock vLLM server."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_common.registry.adapters import ADAPTERS_MAX
from headrace_engine.vllm.layer_groups import LayerGroup
from headrace_engine.vllm.model_folder import digest_of_adapter
from headrace_engine.vllm.scheduler.connector_scheduler import ConnectorScheduler
from headrace_engine.vllm.scheduler.step_planner import SHORT_STEP_S
from headrace_engine.vllm.settings import ConnectorSettings
from headrace_engine.vllm.standalone.node import StandaloneNode, TransferEvents
from headrace_engine.vllm.standalone.pair_scheduler import PairScheduler, Prompt
from headrace_engine.vllm.standalone.settings import StandaloneSettings
from headrace_engine.vllm.step_plan import StepPlan
from headrace_engine.vllm.tiers.planner import TierPlanner
from headrace_kv.handoff.messages import Reservation
from headrace_kv.manager.lower_tiers import LowerTiers
from headrace_kv.receive.receiver import TransferSummary

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class StandaloneConnectorScheduler(ConnectorScheduler):
    """Arranges transfers with peers that requests name. Starts and closes the process's StandaloneNode.

    The constructor returns once all `rank_count` ranks have attached. Raises ConfigError or InternalError.
    """

    def __init__(
        self,
        groups: tuple[LayerGroup, ...],
        connector: ConnectorSettings,
        settings: StandaloneSettings,
        rank_count: int,
    ) -> None:
        super().__init__(
            groups, self._blocks_reserved, SHORT_STEP_S, TierPlanner(LowerTiers({}), 1)
        )
        events = TransferEvents(
            self._transfer_whole, self._transfer_failed, self._planner.transfer_overlap_ready
        )
        self._node = StandaloneNode(connector, settings, rank_count, events)
        self._pairs = PairScheduler(
            ref=self._node.ref,
            endpoint=self._node.start(),
            pending=self._node.pending_fetches,
            peer=self._node,
            can_send=connector.role != "decode",
            can_receive=connector.role != "prefill",
            timeout_s=settings.transfer_timeout_s,
            kv_hold_timeout_s=settings.kv_hold_timeout_s,
        )

    def _blocks_reserved(self, reservation: Reservation) -> None:
        self._pairs.blocks_reserved(reservation)

    def _transfer_whole(self, transfer_id: str, summary: TransferSummary) -> None:
        self._pairs.transfer_whole(transfer_id, summary)
        self._planner.transfer_settled(transfer_id, whole=True)

    def _transfer_failed(self, transfer_id: str) -> None:
        self._planner.transfer_settled(transfer_id, whole=False)

    def on_new_request(self, request: Request) -> None:
        """Does nothing: a client sets its requests' arguments itself, so none of them adds generated tokens."""

    def _may_schedule(self, request: Request) -> bool:
        return self._pairs.prepare(prompt_of(request))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        plan = super().build_connector_meta(scheduler_output)
        self._pairs.plan_held(plan)
        return plan

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        overlapped = self._planner.overlapped.request_finished(request.request_id)
        times = self._planner.request_finished(request.request_id)
        held, params = self._pairs.request_finished(
            prompt_of(request),
            self._planner.in_layout_order(block_ids),
            opened=times is not None,
            complete=is_complete(request),
        )
        return overlapped or held or times is not None, params

    def shutdown(self) -> None:
        self._node.close()


def prompt_of(request: Request) -> Prompt:
    """The request's prompt. One that is not made of tokens has none here, and is not transferred."""
    adapter = request.lora_request
    return Prompt(
        request_id=request.request_id,
        token_ids=() if request.prompt_embeds is not None else request.prompt_token_ids or (),
        extras=(
            _identity_of(adapter.lora_name, adapter.lora_path) if adapter is not None else "",
            *(feature.identifier for feature in request.mm_features),
        ),
        params=request.kv_transfer_params,
    )


@lru_cache(maxsize=ADAPTERS_MAX)
def _identity_of(name: str, path: str) -> str:
    """Adapters of one name differ when their files do. Without files in a folder, the name of the download counts."""
    try:
        return f"adapter {name} {digest_of_adapter(Path(path))}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"adapter {name} {path}"


def is_complete(request: Request) -> bool:
    """Whether the request has ended by itself, so that its whole prompt is in the cache."""
    from vllm.v1.request import RequestStatus

    ended = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)
    return request.status in ended and request.num_computed_tokens >= request.num_prompt_tokens
