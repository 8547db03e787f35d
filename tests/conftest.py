"""Settings of all tests."""

from __future__ import annotations

import gc

import pytest
from hypothesis import settings

# A single example may well be slow on a busy machine; pytest's timeout bounds the test.
settings.register_profile("headrace", parent=settings(), deadline=None)
settings.load_profile("headrace")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> object:
    """What is collected stays: to look for garbage in it takes time, now and whenever a test makes some."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
