"""Profiles of Hypothesis, and the threads of torch.

`HYPOTHESIS_PROFILE=thorough pytest tests/core tests/proof` looks longer, and at random.
"""

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

COMMON = settings(deadline=None, stateful_step_count=50, suppress_health_check=list(HealthCheck))
settings.register_profile("default", COMMON, max_examples=200, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=20_000)
# where a first failure is enough, however long it is
FIRST = [Phase.explicit, Phase.generate]
settings.register_profile("planted", COMMON, max_examples=60, derandomize=True, phases=FIRST)
settings.register_profile(
    "quick",  # for mutation testing: a first failure is enough, however long it is
    COMMON,
    max_examples=12,
    stateful_step_count=30,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def _one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors gain nothing from threads, and lose much on a busy machine."""
    torch = sys.modules.get("torch")  # the core's tests do not wait for its import
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if torch is None or (alone and request.node.get_closest_marker("default_model")):
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
