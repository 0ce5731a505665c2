"""Hypothesis settings: no deadlines (no timing in tests), reproducible examples."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("dash", deadline=None, derandomize=True, max_examples=100)
settings.load_profile("dash")
