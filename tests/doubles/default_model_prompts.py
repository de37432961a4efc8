"""Prompts on which the default model is sure of itself.

For each, the two likeliest tokens are at least 2e-3 apart in their logits at all of 32 greedy steps
(found by trying; asserted by the test), so that no order of summation can change the answer.
"""

from collections.abc import Sequence

import torch

MIN_MARGIN = 2e-3
NUM_TOKENS = 32

PROMPTS = [
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n",
    "The three primary colours are",
    "Water boils at a temperature of",
    "To make a good cup of tea, first",
    "The largest planet in the solar system is",
    "import numpy as np\n\ndef mean(values):\n",
    "In 1969, the first people to walk on the Moon were",
    "A list of fruits: apple, banana,",
    "The quick brown fox",
    "Photosynthesis is the process by which",
    "Shakespeare wrote many plays, among them",
    "1, 2, 3, 4, 5,",
    "SELECT name, age FROM users WHERE",
    "Dear Sir or Madam,\n\nI am writing to",
    "The Great Wall of China was built",
    "A triangle has three sides. A square has",
    "Roses are red, violets are",
    "The human heart has four chambers:",
    "Albert Einstein was born in",
    "for i in range(10):\n    print(",
    "The Pacific Ocean is the",
    "The mitochondria is the",
    "An electron has a negative charge, and a proton has",
]


def left_padded(prompts: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and attention mask, as `transformers.generate` wants several prompts at once.

    For the reference: it reads the weights once a step, not once a step and prompt.
    """
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)
