"""What a right answer is, without asking a model: which tokens, and how many of them were served."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine import Answer, Engine

PAGE = 128
"""Tokens of one block of vLLM on a CPU, and so of one chunk."""
TIE = 1e-4
"""Two logits this close may change places with the order of additions."""


@dataclass
class Expectation:
    """How many tokens of a prompt are there when those before it were computed to their end."""

    chunk: int = PAGE
    page: int = PAGE
    seen: set[tuple[int, ...]] = field(default_factory=set)

    def ask(self, prompt: Sequence[int]) -> int:
        """Tokens served; the prompt's own chunks are there from now on. The last token is always computed."""
        ends = range(self.chunk, len(prompt) + 1, self.chunk)
        found = 0
        for end in ends:
            if tuple(prompt[:end]) not in self.seen:
                break
            found = end
        self.seen.update(tuple(prompt[:end]) for end in ends)
        return min(found, full(len(prompt), self.page))


def full(tokens: int, page: int = PAGE) -> int:
    """Tokens of a prompt that can be served at all: full blocks, and the last token never."""
    return (tokens - 1) // page * page


def differences(answers: Sequence[Answer], baseline: Sequence[Answer]) -> int:
    """Compare with what was computed without a cache; the number of near ties that went the other way.

    Raises:
        AssertionError: a token differs although the two best logits lay apart, or near ties are many.
    """
    assert len(answers) == len(baseline)
    ties = 0
    for number, (got, wanted) in enumerate(zip(answers, baseline, strict=True)):
        assert got.reason == wanted.reason == "length", f"prompt {number}: {got.reason}"
        assert len(got.tokens) == len(wanted.tokens)
        pairs = zip(got.tokens, wanted.tokens, strict=True)
        at = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        gap = wanted.gaps[at]
        assert gap <= TIE, (
            f"prompt {number}: token {at} is {got.tokens[at]} instead of {wanted.tokens[at]}, "
            f"and the two best logits lie {gap:.6f} apart ({got.cached} tokens were served)"
        )
        ties += 1
    assert ties <= max(1, len(answers) // 10), f"{ties} of {len(answers)} answers are near ties"
    print(f"{len(answers)} answers compared, {ties} near ties")  # noqa: T201
    return ties


def every_block(
    engine: Engine, prompts: Sequence[Sequence[int]], baseline: Sequence[Answer], **how: Any
) -> list[Answer]:
    """Answers as in ``baseline``, every full block of each prompt served; where a call was late, asked again.

    Raises:
        AssertionError: other answers, or fewer blocks although every call was in time.
    """
    wanted = [full(len(prompt)) for prompt in prompts]
    for _ in range(4):
        answers = engine.generate(prompts, **how)
        differences(answers, baseline)
        served = [answer.cached for answer in answers]
        if served == wanted or not engine.missed:
            break
    assert served == wanted
    return answers


def make_prompts(
    count: int, *, seed: int = 0, longest: int = 900, vocabulary: int = 2048
) -> list[list[int]]:
    """Random ids that share prefixes as chats do: of three families, cut on, before and behind block edges."""
    draw = random.Random(seed)
    ids = range(4, vocabulary)
    families = [draw.choices(ids, k=longest) for _ in range(3)]
    edges = [PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 3 * PAGE + 1, 4 * PAGE - 1]
    prompts = []
    for number in range(count):
        shared = draw.choice([0, PAGE, 2 * PAGE, 300, 3 * PAGE])
        length = edges[number] if number < len(edges) else draw.randint(shared + 1, longest)
        if number % 2:  # a block's edge lies ahead: decoding asks for one more
            length = min(length // PAGE * PAGE + draw.randint(PAGE - 30, PAGE - 1), longest)
        start = families[number % 3][: min(shared, length - 1)]
        prompts.append(start + draw.choices(ids, k=length - len(start)))
    return prompts
