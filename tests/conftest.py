"""Profiles of Hypothesis: `HYPOTHESIS_PROFILE=thorough pytest` looks longer and at random."""

import os

from hypothesis import HealthCheck, settings

COMMON = settings(deadline=None, stateful_step_count=50, suppress_health_check=list(HealthCheck))
settings.register_profile("default", COMMON, max_examples=300, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
