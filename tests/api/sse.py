"""Reading server-sent events in tests."""

import json
from typing import Any

import httpx


def read_events(response: httpx.Response) -> list[Any]:
    """Return the parsed chunks of a stream, checking its framing and its end."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]
