"""A conversation: every turn begins with all turns before it, answers included (``save_decode``)."""

from __future__ import annotations

from small import generate, hit_rate, small_model

SYSTEM = "You are a patient assistant who answers in one sentence and never guesses. " * 3
QUESTIONS = [
    "What is a tier?",
    "And a chunk?",
    "Which one is evicted?",
    "Thank you. Anything else?",
]


def main() -> int:
    """Talk for a while."""
    with small_model(save_decode=True) as model:
        talk = SYSTEM
        for question in QUESTIONS:
            talk += f"\nuser: {question}\nassistant: "
            (answer,) = generate(model, [talk])
            (reused,), (length,) = model.last.reused, model.last.prompt
            print(f"turn of {length} tokens, {reused} reused")
            talk += answer
        print(f"hit rate: {hit_rate(model)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
