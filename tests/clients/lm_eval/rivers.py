"""The task of this folder as lm-eval makes requests of it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DESCRIPTION = (
    "The questions below are about rivers of Europe and of Africa, and about the cities that lie "
    "on them. Each question has one right answer. A river may flow through several cities, and a "
    "city may lie on several rivers; the one that is meant is the largest of them."
)


def prompts() -> Iterator[tuple[str, str]]:
    """Yield context and choice, four choices behind each context."""
    for line in (FOLDER / "rivers.jsonl").read_text(encoding="utf-8").splitlines():
        document = json.loads(line)
        context = f"{DESCRIPTION}\n\nQuestion: {document['question']}\nAnswer:"
        yield from ((context, f" {choice}") for choice in document["choices"])


def requests(encode: Callable[[str], list[int]]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield body and context length of each request, in lm-eval's fields."""
    for context, choice in prompts():
        num_context = len(encode(context))
        yield (
            {
                "model": "tiny",
                "prompt": [encode(context + choice)],
                "temperature": 0,
                "max_tokens": 1,
                "logprobs": 1,
                "seed": 1234,
                "echo": True,
            },
            num_context,
        )


def num_rows(prompts: list[list[int]]) -> int:
    """Tokens that a cache has to compute: each once, and for each prompt behind others one row.

    That row is the one of the last shared token: it scores the first token that is not.
    """
    seen: set[tuple[int, ...]] = set()
    num = 0
    for prompt in prompts:
        beginnings = [tuple(prompt[:length]) for length in range(1, len(prompt) + 1)]
        new = [beginning for beginning in beginnings if beginning not in seen]
        seen.update(new)
        num += len(new) + (len(new) < len(prompt))
    return num
