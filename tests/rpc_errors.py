"""Errors of RPCs, as tests await them."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio
import pytest

from headrace_common.errors import HeadraceError
from headrace_common.rpc.status import error_from_rpc

Kind = TypeVar("Kind", bound=HeadraceError)


async def error_of(kind: type[Kind], call: Awaitable[object]) -> Kind:
    """The error of this kind with which the call fails. Any other outcome fails the test."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error = error_from_rpc(caught.value)
    assert isinstance(error, kind)
    return error
