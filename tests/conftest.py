"""Profiles of Hypothesis: `HYPOTHESIS_PROFILE=thorough pytest` looks longer and at random."""

import os

from hypothesis import HealthCheck, settings

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile(
    "default", max_examples=300, stateful_step_count=50, derandomize=True, **COMMON
)
settings.register_profile("thorough", max_examples=20_000, stateful_step_count=50, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
