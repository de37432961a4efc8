"""Eight clients at once, some of which leave or talk nonsense: right answers, and nothing is left.

The pool is too small for them and the queue is short, so that requests are preempted and refused.
"""

import asyncio
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import CancelledError
from typing import Any

import httpx
import pytest
from asked_engine import AskedEngine
from engine_runs import assert_idle, greedy, run
from tiny_models import tiny_engine

from prefixkv.api.app import create_app
from prefixkv.engine import Engine
from prefixkv.errors import QueueFull
from prefixkv.outputs import OutputDelta
from tests.api.live_server import eventually, running

NUM_THREADS = 8
SERVER_SECONDS, ASYNC_SECONDS, JOIN_SECONDS = 7.0, 3.0, 20.0
MAX_TOKENS = 6
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
STORY = "once upon a time there was a fox"
TEXTS = [STORY[:cut] + tail for cut in (32, 29, 20, 11, 4) for tail in ("", "!", " and a crow")]
DIALOGUES = [
    [{"role": "user", "content": "hi" * i}, {"role": "assistant", "content": "yes"}][:length]
    for i in (1, 2, 3)
    for length in (1, 2)
]
INVALID: list[tuple[str, Any]] = [
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": STORY * 20}),
    (COMPLETIONS, {"prompt": [5, 9999]}),
    (COMPLETIONS, {"prompt": STORY, "temperature": -1}),
    (COMPLETIONS, {"prompt": STORY, "cache_salt": ""}),
    (COMPLETIONS, '{"prompt": "a'),
    (CHATS, {"messages": []}),
    (CHATS, {"messages": [{"role": "wizard", "content": "hi"}]}),
]
Answer = tuple[str, list[int]]
SALTS = (None, None, "a", "b")
OPTIONS: dict[str, Any] = {
    "num_blocks": 32, "max_prefill_chunk": 16, "max_num_seqs": 6, "max_num_waiting": 2,
}  # fmt: skip


def alone(engine: Engine, prompt: list[int]) -> Answer:
    """Text and ids of a request that nobody else is with."""
    result, (request,) = run(engine, [prompt], MAX_TOKENS, poison_value=None)
    return result.text[request.request_id], result.token_ids[request.request_id]


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """What each text and dialogue is answered, by its JSON."""
    engine = tiny_engine(enable_prefix_caching=False)
    tokenizer = engine.tokenizer
    prompts: list[tuple[Any, list[int]]] = [(text, tokenizer.encode(text)) for text in TEXTS]
    prompts += [(dialogue, tokenizer.render_chat(dialogue)) for dialogue in DIALOGUES]
    return {json.dumps(asked): alone(engine, tokens) for asked, tokens in prompts}


class Client:
    """One client's thread: what it does is drawn from its seed until the time is over."""

    def __init__(self, seed: int, port: int, answers: dict[str, Answer], deadline: float) -> None:
        self.rng, self.port, self.answers, self.deadline = (
            random.Random(seed),
            port,
            answers,
            deadline,
        )
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.work)

    def work(self) -> None:
        try:
            base_url = f"http://127.0.0.1:{self.port}"
            with httpx.Client(base_url=base_url, timeout=JOIN_SECONDS) as http:
                while time.monotonic() < self.deadline:
                    act = self.rng.choices([self.ask, self.leave, self.be_wrong], [6, 3, 1])[0]
                    act(http)
        except BaseException as error:
            self.error = error

    def draw(self) -> tuple[str, dict[str, Any], Any]:
        """A request's path and body, and what it asks."""
        body: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}
        body |= {"stream": self.rng.random() < 0.5, "cache_salt": self.rng.choice(SALTS)}
        if self.rng.random() < 0.3:
            dialogue = self.rng.choice(DIALOGUES)
            return CHATS, {**body, "messages": dialogue}, dialogue
        text = self.rng.choice(TEXTS)
        return COMPLETIONS, {**body, "prompt": text}, text

    def ask(self, http: httpx.Client) -> None:
        """Wait for the answer, which must be the one that the prompt gets alone."""
        path, body, asked = self.draw()
        response = http.post(path, json=body)
        self.counts[f"{response.status_code}"] += 1
        if response.status_code == 429:
            assert response.headers["Retry-After"]
            return
        assert response.status_code == 200, response.text
        text = streamed_text(response.text) if body["stream"] else whole_text(response.json())
        assert text == self.answers[json.dumps(asked)][0]
        self.counts["streamed" if body["stream"] else "not streamed"] += 1
        self.counts["chats" if path == CHATS else "completions"] += 1

    def leave(self, http: httpx.Client) -> None:
        """Cut the connection: while sending, while waiting, or in the middle of the answer."""
        path, body, _ = self.draw()
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        message = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
        sent = len(message) if self.rng.random() < 0.9 else self.rng.randrange(len(message))
        with socket.create_connection(("127.0.0.1", self.port), JOIN_SECONDS) as connection:
            connection.sendall(message[:sent])
            time.sleep(self.rng.random() * 0.1)
            if sent == len(message) and self.rng.random() < 0.5:
                connection.recv(200)
        self.counts["cut"] += 1

    def be_wrong(self, http: httpx.Client) -> None:
        """Send what is refused."""
        path, body = self.rng.choice(INVALID)
        content = body if isinstance(body, str) else json.dumps(body)
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400, response.text
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        self.counts["refused"] += 1


def whole_text(body: Any) -> str:
    """The text of an answer that came at once."""
    (choice,) = body["choices"]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


def streamed_text(events: str) -> str:
    """The text of a stream, which must have an end."""
    *chunks, done = [line[6:] for line in events.splitlines() if line.startswith("data: ")]
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in json.loads(chunk)["choices"]]
    pieces = [c["delta"].get("content") if "delta" in c else c["text"] for c in choices]
    return "".join(piece or "" for piece in pieces)


def test_eight_clients_get_the_serial_answers_and_leave_nothing(answers: dict[str, Answer]) -> None:
    """Whoever stays is answered right, whoever goes is forgotten, and the server ends cleanly."""
    engine = AskedEngine(tiny_engine(**OPTIONS))
    with running(create_app(engine, ["tiny"])) as port:
        deadline = time.monotonic() + SERVER_SECONDS
        clients = [Client(seed, port, answers, deadline) for seed in range(NUM_THREADS)]
        join_all([client.thread for client in clients], SERVER_SECONDS)
        errors = [client.error for client in clients if client.error is not None]
        assert not errors, errors
        eventually(engine.is_idle)
        stats = engine.ask()
        last = httpx.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json={"prompt": STORY})
        assert last.status_code == 200
    counts: Counter[str] = sum((client.counts for client in clients), Counter())
    print(counts, stats)  # noqa: T201 # shown with -s and on failure
    assert all(client.counts["200"] for client in clients)
    for what in ("429", "streamed", "not streamed", "chats", "completions", "cut", "refused"):
        assert counts[what] > 0, what
    assert stats["num_preemptions"] > 0
    assert stats["num_evicted_blocks"] > 0
    assert stats["num_cached_tokens"] > 0
    assert not engine.is_running
    assert_idle(engine.engine)


def join_all(threads: list[threading.Thread], seconds: float) -> None:
    """Start threads that end after some seconds; none may hang."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join(seconds + JOIN_SECONDS)
        assert not thread.is_alive(), "a client hangs"


# -- without HTTP --------------------------------------------------------------------------------


async def tokens_of(stream: AsyncIterator[OutputDelta]) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


class Task:
    """A thread that runs requests on the loop of an async engine, and cancels some."""

    def __init__(self, seed: int, engine: AskedEngine, answers: dict[str, Answer]) -> None:
        self.rng, self.engine, self.answers = random.Random(seed), engine, answers
        self.counts: Counter[str] = Counter()

    def work(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            text = self.rng.choice(TEXTS)
            prompt = self.engine.tokenizer.encode(text)
            salt = self.rng.choice(SALTS)
            stream = self.engine.generate(
                prompt, greedy(MAX_TOKENS), request_id="same", cache_salt=salt
            )
            future = asyncio.run_coroutine_threadsafe(tokens_of(stream), self.engine.loop)
            if self.rng.random() < 0.4:
                time.sleep(self.rng.random() * 0.05)
                future.cancel()
            try:
                assert future.result(JOIN_SECONDS) == self.answers[json.dumps(text)][1]
                self.counts["answered"] += 1
            except CancelledError:
                self.counts["cancelled"] += 1
            except QueueFull:
                self.counts["queue full"] += 1


def test_eight_threads_on_the_loop_of_an_async_engine(answers: dict[str, Answer]) -> None:
    """Threads hand their requests to the engine's loop; each gets its own ids, or leaves."""
    engine = AskedEngine(tiny_engine(**OPTIONS))
    tasks = [Task(seed, engine, answers) for seed in range(NUM_THREADS)]

    async def main() -> None:
        await engine.start()
        deadline = time.monotonic() + ASYNC_SECONDS
        await asyncio.gather(*(asyncio.to_thread(task.work, deadline) for task in tasks))
        await asyncio.to_thread(eventually, engine.is_idle)
        await engine.stop()

    asyncio.run(main())
    counts: Counter[str] = sum((task.counts for task in tasks), Counter())
    print(counts, engine.engine.stats())  # noqa: T201 # shown with -s and on failure
    assert min(counts[what] for what in ("answered", "cancelled", "queue full")) > 0
    assert engine.engine.scheduler.num_preemptions > 0
    assert_idle(engine.engine)
