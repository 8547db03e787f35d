"""The times of workers: what one reports changes little for the others."""

from __future__ import annotations

import numpy as np
import pytest

from headrace_common.time_model.model import StepTimes, TimeModel
from headrace_router.workers.table import TOKEN_ROW, PromptWork, TimeColumns

_HONEST = StepTimes(fixed_s=0.01, s_per_prompt_token=1e-4, prompt_steps=9, answer_steps=9)
_NOTHING = PromptWork()


@pytest.mark.parametrize("lie_s", [0.0, 3_600.0])
def test_a_worker_far_from_the_others_decides_nothing_about_them(lie_s: float) -> None:
    # Two honest workers, one that lies, and one that has learned nothing yet.
    times = TimeColumns(np.zeros(4, np.intp))
    lie = StepTimes(lie_s, s_per_prompt_token=lie_s, prompt_steps=9, answer_steps=9)
    for row, steps in enumerate((_HONEST, _HONEST, lie)):
        times.set(row, _NOTHING, TimeModel(steps))
    times.fill(StepTimes())
    assert times.steps[TOKEN_ROW].tolist() == pytest.approx([1e-4, 1e-4, lie_s, 1e-4])
    assert times.mean_steps[TOKEN_ROW] == pytest.approx(1e-4)
