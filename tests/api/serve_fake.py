"""`prefixkv` with the fake engine behind it, for tests that need a process of their own."""

import os
import time

from prefixkv.api import cli
from prefixkv.api.engine_interface import ServingEngine
from prefixkv.api.serving import server
from prefixkv.config import EngineConfig
from tests.api.fake_engine import FakeEngine


def build_engine(config: EngineConfig) -> ServingEngine:
    """Return a fake engine, as slow to load and to answer as the test wants it."""
    print(f"loading {config.model}", flush=True)  # noqa: T201 # the test waits for this line
    time.sleep(float(os.environ.get("FAKE_LOAD_S", "0")))
    engine = FakeEngine()
    engine.step_s = float(os.environ.get("FAKE_STEP_S", "0"))
    if "FAKE_FAIL_AFTER" in os.environ:
        engine.fail_after = int(os.environ["FAKE_FAIL_AFTER"])
    return engine


if __name__ == "__main__":
    server.build_engine = build_engine
    cli.main()
