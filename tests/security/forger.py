"""Forges a handoff, in a process of its own: python -m tests.security.forger PLAN, a Plan in JSON.

Claims on a handoff stream that a whole transfer has landed, without writing a byte, and ends it. Prints one line for
each ticket: what the decode worker answered.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from queue import SimpleQueue

import grpc

from headrace.kv.v1 import handoff_pb2, handoff_pb2_grpc, layout_pb2
from headrace_common.access.roles import TOKEN_KEY
from headrace_kv.layout.proto import layout_from_proto

_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to forge. `layout` is a serialized KvLayout and `tickets` are tickets, in hex. An empty `token` is none."""

    endpoint: str
    token: str
    worker_id: str
    incarnation: str
    decode_worker_id: str
    decode_incarnation: str
    layout: str
    transfer_id: str
    start_token: int
    end_token: int
    tickets: list[str]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def _hello(plan: Plan) -> handoff_pb2.HandoffRequest:
    return handoff_pb2.HandoffRequest(
        hello=handoff_pb2.Hello(
            worker_id=plan.worker_id,
            incarnation=plan.incarnation,
            decode_worker_id=plan.decode_worker_id,
            decode_incarnation=plan.decode_incarnation,
            layout=layout_pb2.KvLayout.FromString(bytes.fromhex(plan.layout)),
        )
    )


def _lies(plan: Plan) -> list[handoff_pb2.HandoffRequest]:
    """All that a sender says after its reservation, and all that ends a transfer."""
    name = plan.transfer_id
    layout = layout_from_proto(layout_pb2.KvLayout.FromString(bytes.fromhex(plan.layout)))
    sizes = [
        layout.group_of(layer).bytes_between(
            plan.start_token, plan.end_token, layout.group_of(layer).head_count
        )
        for layer in range(layout.layer_count)
    ]
    layers = [
        handoff_pb2.LayerDone(
            transfer_id=name,
            layer=layer,
            start_token=plan.start_token,
            end_token=plan.end_token,
            payload_bytes=size,
        )
        for layer, size in enumerate(sizes)
    ]
    request = handoff_pb2.HandoffRequest
    return [
        request(layers_done=handoff_pb2.LayersDone(layers=layers)),
        request(commit=handoff_pb2.Commit(transfer_id=name, payload_bytes=sum(sizes))),
        request(failed=handoff_pb2.Failed(transfer_id=name, reason="KV_CORRUPT")),
        request(quiesced=handoff_pb2.Quiesced(transfer_id=name)),
    ]


def forge(plan: Plan) -> Iterator[str]:
    """The answers, or the status with which the stream ended."""
    sent: SimpleQueue[handoff_pb2.HandoffRequest] = SimpleQueue()
    sent.put(_hello(plan))
    metadata = ((TOKEN_KEY, plan.token),) if plan.token else ()
    with grpc.insecure_channel(plan.endpoint) as channel:
        stub = handoff_pb2_grpc.HandoffServiceStub(channel)
        call = stub.Handoff(iter(sent.get, None), metadata=metadata, timeout=_DEADLINE_S)
        answers = (one for one in call if one.WhichOneof("message") != "renewal")
        try:
            yield str(next(answers).WhichOneof("message"))
            for ticket in plan.tickets:
                opening = handoff_pb2.Open(
                    transfer_id=plan.transfer_id, ticket=bytes.fromhex(ticket)
                )
                sent.put(handoff_pb2.HandoffRequest(open=opening))
                answer = next(answers)
                for lie in _lies(plan):
                    sent.put(lie)
                cancel = answer.cancel
                yield f"{answer.WhichOneof('message')} {cancel.reason} {cancel.refused_claim}"
        except grpc.RpcError as error:
            yield str(error.code().name)
        finally:
            call.cancel()


if __name__ == "__main__":
    for line in forge(Plan(**json.loads(sys.argv[1]))):
        print(line)
