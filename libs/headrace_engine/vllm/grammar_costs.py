"""Bounds the processor time of grammars in vLLM's scheduler, by tenant. Reaches into vLLM's structured outputs.

All answers of a step wait for its grammars. The library bounds the work of one answer in a step only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headrace_engine.vllm.settings import TENANT_KEY

if TYPE_CHECKING:
    import torch
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

log = logging.getLogger(__name__)

GRAMMARS_STEP_S: Final = 0.05
"""Processor time of a tenant's grammars in each step. Those of usual JSON Schemas take 0.05 ms a token."""
GRAMMARS_BURST_S: Final = 0.1
"""So much more before answers end."""
# Of the newest time, in a grammar's time for a token.
_NEWEST_SHARE: Final = 0.25


@dataclass(slots=True)
class _Tenant:
    debt_s: float = 0.0
    """Time beyond that of the steps."""
    first_s: float = 0.0
    """Time for first tokens in this step."""
    filled: int = 0
    filled_before: int = 0
    """Answers in this step and in the one before."""

    def begin_step(self) -> bool:
        """False for one without grammars, which owes nothing."""
        self.debt_s, self.first_s = max(0.0, self.debt_s - GRAMMARS_STEP_S), 0.0
        self.filled, self.filled_before = 0, self.filled
        return self.debt_s > 0 or self.filled_before > 0

    def count(self, spent_s: float, *, is_first: bool) -> None:
        self.filled += 1
        self.debt_s += spent_s
        self.first_s += spent_s * is_first

    def exceeds(self, token_s: float | None) -> bool:
        if self.debt_s <= GRAMMARS_BURST_S:
            return False
        if token_s is None:
            return self.first_s > GRAMMARS_STEP_S
        return token_s * max(1, self.filled, self.filled_before) > GRAMMARS_STEP_S


class GrammarCosts:
    """The time that the grammars of each tenant have taken."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}

    def begin_step(self) -> None:
        """A step begins."""
        self._tenants = {name: one for name, one in self._tenants.items() if one.begin_step()}

    def count(self, tenant: str, spent_s: float, *, is_first: bool) -> None:
        """An answer's grammar has taken so much time for a token, which may be its first one."""
        self._tenants.setdefault(tenant, _Tenant()).count(spent_s, is_first=is_first)

    def exceeds(self, tenant: str, token_s: float | None) -> bool:
        """Whether the tenant is beyond its time, and a grammar that takes `token_s` for a token is a cause.

        It is a cause when all the tenant's answers would exceed the time of a step at that cost. None: its first token,
        when the first tokens of this step have exceeded it.
        """
        found = self._tenants.get(tenant)
        return found is not None and found.exceeds(token_s)


class BoundedGrammar:
    """One answer's grammar, as vLLM uses it. Beyond a bound it permits every token and accepts none.

    Then vLLM ends the request with an error. At a limit of its library, a grammar permits the end of the answer only.
    Without this, the request would end as if its answer were complete.
    """

    def __init__(
        self,
        plain: Any,
        tenant: str,
        costs: GrammarCosts,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._plain, self._tenant, self._costs, self._clock = plain, tenant, costs, clock
        self._token_s: float | None = None
        self._accepting_s = 0.0
        self._ended = False

    def fill_bitmask(self, bitmask: torch.Tensor, index: int) -> None:
        """See vLLM."""
        if self._ended or self._costs.exceeds(self._tenant, self._token_s):
            if not self._ended:
                log.warning(
                    "a grammar ends: its tenant's take more than %g s a step", GRAMMARS_STEP_S
                )
            self._ended = True
            bitmask[index].fill_(-1)
            return
        start_s = self._clock()
        self._plain.fill_bitmask(bitmask, index)
        spent_s = self._clock() - start_s + self._accepting_s
        self._accepting_s = 0.0
        self._costs.count(self._tenant, spent_s, is_first=self._token_s is None)
        known_s = spent_s if self._token_s is None else self._token_s
        self._token_s = known_s + _NEWEST_SHARE * (spent_s - known_s)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See vLLM."""
        matcher = getattr(self._plain, "ll_matcher", None)
        if self._ended or (matcher is not None and matcher.is_error()):
            return False
        start_s = self._clock()
        accepted: bool = self._plain.accept_tokens(request_id, tokens)
        self._accepting_s += self._clock() - start_s
        return accepted

    def validate_tokens(self, tokens: list[int]) -> Sequence[int]:
        """See vLLM."""
        found: Sequence[int] = self._plain.validate_tokens(tokens)
        return found

    def rollback(self, num_tokens: int) -> None:
        """See vLLM."""
        self._plain.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """See vLLM."""
        terminated: bool = self._plain.is_terminated()
        return terminated

    def reset(self) -> None:
        """See vLLM."""
        self._plain.reset()


def install() -> None:
    """On the scheduler, before its first request."""
    from vllm.v1.structured_output import StructuredOutputManager

    costs = GrammarCosts()
    create = _plain(StructuredOutputManager._create_grammar)  # noqa: SLF001 - it has no hook
    fill = _plain(StructuredOutputManager.grammar_bitmask)

    def create_grammar(manager: StructuredOutputManager, request: Request) -> BoundedGrammar:
        extra = (request.sampling_params and request.sampling_params.extra_args) or {}
        return BoundedGrammar(create(manager, request), extra.get(TENANT_KEY, ""), costs)

    def grammar_bitmask(manager: StructuredOutputManager, *arguments: Any) -> Any:
        costs.begin_step()
        return fill(manager, *arguments)

    create_grammar.__wrapped__ = create  # type: ignore[attr-defined]
    grammar_bitmask.__wrapped__ = fill  # type: ignore[attr-defined]
    StructuredOutputManager._create_grammar = create_grammar  # noqa: SLF001
    StructuredOutputManager.grammar_bitmask = grammar_bitmask


def _plain(method: Any) -> Any:
    """vLLM's own, also after an earlier install."""
    return getattr(method, "__wrapped__", method)
