"""Headrace's use of vLLM, checked by types against a source tree that is not imported."""

from __future__ import annotations

import pytest

from tests.vllm.vllm_source import differences, installed

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]


def test_the_installed_vllm_lacks_nothing_that_headrace_uses() -> None:
    assert differences(installed()) == ([], [])
