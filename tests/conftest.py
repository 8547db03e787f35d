"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# A single example may well be slow on a busy machine; pytest's timeout bounds the test.
settings.register_profile("headrace", parent=settings(), deadline=None)
settings.load_profile("headrace")
