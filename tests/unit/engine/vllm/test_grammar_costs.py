"""The processor time of grammars in a step is bounded by tenant, and the costly ones end."""

from __future__ import annotations

from typing import Any

from headrace_engine.vllm.grammar_costs import BoundedGrammar, GrammarCosts
from tests.set_clock import SetClock

_TOKEN = [5]
_NORMAL_S = 0.0001


class Plain:
    """A grammar that takes `fill_s` for a token."""

    def __init__(self, clock: SetClock, fill_s: float) -> None:
        self.clock, self.fill_s = clock, fill_s

    def fill_bitmask(self, bitmask: Any, index: int) -> None:
        self.clock.now_s += self.fill_s

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return True


class Row:
    """A row of the bits, all of which an ended grammar permits."""

    def fill_(self, value: int) -> None:
        assert value == -1


class Engine:
    """Runs the grammars of all answers in steps."""

    def __init__(self) -> None:
        self.clock, self.costs = SetClock(0.0), GrammarCosts()
        self.answers: list[tuple[str, BoundedGrammar]] = []

    def add(self, tenant: str, count: int, fill_s: float) -> list[Plain]:
        plain = [Plain(self.clock, fill_s) for _ in range(count)]
        self.answers += [
            (tenant, BoundedGrammar(one, tenant, self.costs, self.clock)) for one in plain
        ]
        return plain

    def step(self) -> tuple[float, list[str]]:
        """The time that it takes, and the tenants with answers that end."""
        start_s = self.clock.now_s
        self.costs.begin_step()
        rows: Any = [Row()] * len(self.answers)
        for index, (_, grammar) in enumerate(self.answers):
            grammar.fill_bitmask(rows, index)
        ended = [one for one in self.answers if not one[1].accept_tokens("r", _TOKEN)]
        self.answers = [one for one in self.answers if one not in ended]
        return self.clock.now_s - start_s, [tenant for tenant, _ in ended]


def test_usual_grammars_never_end() -> None:
    engine = Engine()
    engine.add("aa", 256, _NORMAL_S)
    for _ in range(1_000):
        assert not engine.step()[1]


def test_many_answers_that_become_costly_together_end_and_others_go_on() -> None:
    engine = Engine()
    attack = engine.add("stranger", 16, _NORMAL_S)
    engine.add("bystander", 4, _NORMAL_S)
    ended: list[str] = []
    for _ in range(200):
        for one in attack:
            one.fill_s *= 1.1
        spent_s, tenants = engine.step()
        assert spent_s < 0.3
        ended += tenants
    assert 10 < len(ended) <= 16
    assert set(ended) == {"stranger"}


def test_new_costly_grammars_of_one_step_do_not_add_up() -> None:
    engine = Engine()
    engine.add("stranger", 64, 0.05)
    spent_s, ended = engine.step()
    assert spent_s < 0.3
    assert len(ended) > 50
    # A cheap grammar that begins meanwhile is no cause.
    engine.add("stranger", 1, _NORMAL_S)
    costly = len(engine.answers) - 1
    assert len(engine.step()[1]) <= costly
    assert engine.answers[-1][1].accept_tokens("r", _TOKEN)
