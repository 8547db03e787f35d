"""A complete service in one file, for tests in a separate process.

Generate streams five responses, one each 0.2 s, or one a minute for the text "stuck".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from headrace.inference.v1 import inference_pb2, inference_pb2_grpc
from headrace_common.client_config import ClientFacingConfig
from headrace_common.deadlines import Deadline
from headrace_common.logs import setup_logging
from headrace_common.process.run import run_service
from headrace_common.process.settings import load_config
from headrace_common.rpc.server import ClientServices, GrpcServer

SERVICE = "headrace.inference.v1.InferenceService"


class Kiln(inference_pb2_grpc.InferenceServiceServicer):
    """Slow answers. Other RPCs are not implemented."""

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: object
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        for number in range(5):
            yield inference_pb2.GenerateResponse(text=str(number))
            await asyncio.sleep(60 if request.text == "stuck" else 0.2)

    async def ListModels(
        self, request: inference_pb2.ListModelsRequest, context: object
    ) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse()


async def serve() -> None:
    config = load_config(
        ClientFacingConfig, None, prog="headrace-kiln", env_prefix="HEADRACE_KILN_"
    )
    setup_logging(config.log_level, "headrace-kiln", "kiln-0")
    server = GrpcServer(config, (), ClientServices([SERVICE]))
    assert server.client_server is not None
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        Kiln(),  # type: ignore[abstract]
        server.client_server,
    )
    await server.start()
    print(server.client_endpoint, flush=True)

    async def on_drain(deadline: Deadline) -> None:
        print("draining", flush=True)

    await server.serve_until_signal(on_drain)
    print("stopped", flush=True)


if __name__ == "__main__":
    run_service("headrace-kiln", serve)
