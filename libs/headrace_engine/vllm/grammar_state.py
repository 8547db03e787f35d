"""Advances the grammar of a structured output over tokens that another engine has generated.

vLLM compiles a grammar on a thread, while the request waits. Only the scheduler's process has grammars.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class GrammarMismatch(Exception):
    """The tokens are not the beginning of an answer that the grammar allows."""


class _EndedGrammar:
    """Replaces a grammar that rejects tokens: vLLM ends the request with an error at its next token."""

    def is_terminated(self) -> bool:
        return True

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return False


def advance_grammar(request: Request, token_ids: Sequence[int]) -> None:
    """On the scheduler, before the request's first step: its grammar continues after these tokens of its output.

    Without a match, the request ends with an error. Does nothing for a request without a grammar.
    """
    structured = request.structured_output_request
    if structured is None:
        return
    compiled = structured._grammar  # noqa: SLF001 - the property waits for the compiler
    if isinstance(compiled, Future):
        structured.grammar = _advanced(compiled, request.request_id, token_ids)
        return
    try:
        _accept(compiled, request.request_id, token_ids)
    except GrammarMismatch:
        log.error("the grammar of %s rejects the first token of prefill", request.request_id)
        structured.grammar = _EndedGrammar()


def _advanced(compiled: Future[Any], request_id: str, token_ids: Sequence[int]) -> Future[Any]:
    """The grammar after these tokens, once it is compiled."""
    advanced: Future[Any] = Future()

    def advance(done: Future[Any]) -> None:
        try:
            advanced.set_result(_accept(done.result(), request_id, token_ids))
        # vLLM raises it again for this request.
        except Exception as error:  # noqa: BLE001
            advanced.set_exception(error)

    compiled.add_done_callback(advance)
    return advanced


def _accept(grammar: Any, request_id: str, token_ids: Sequence[int]) -> Any:
    if not grammar.accept_tokens(request_id, list(token_ids)):
        raise GrammarMismatch(f"{len(token_ids)} generated tokens do not follow the grammar")
    return grammar
