"""What a decode engine may send of a request's cached KV. Pure."""

from __future__ import annotations

from headrace_common.errors import DuplicateTransfer, InvalidRequest, NotFound
from headrace_kv.handoff.messages import TransferTarget


def check_prefix(target: TransferTarget, cached_tokens: int | None, *, sent: bool) -> None:
    """Raises as Engine.send_prefix does, unless the request can send this part of its cached KV.

    `cached_tokens` is None without such a request. `sent`: a part of it was sent before.
    """
    name = target.transfer_id
    if cached_tokens is None:
        raise NotFound(
            f"no request of transfer {name} holds blocks", metadata={"transfer_id": name}
        )
    if not 0 <= target.start_token < target.end_token <= cached_tokens:
        remedy = f"give tokens below {cached_tokens}, which are cached"
        raise InvalidRequest({"end_token": remedy})
    if sent:
        raise DuplicateTransfer(
            f"the prefix of transfer {name} was sent before", metadata={"transfer_id": name}
        )
