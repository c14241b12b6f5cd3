"""Retrieval: documents in front, the question at the end, so that what is found again is reused.

A prefix is shared from the first token on. Documents that are always put in one order (here: by name)
share more than documents in the order of their score.
"""

from __future__ import annotations

from small import generate, hit_rate, small_model

SYSTEM = "Answer from the documents only. Say so when they do not tell.\n\n"
DOCUMENTS = {
    "evictions": "Values leave a tier when it is full, the least recently used first. " * 6,
    "leases": "A value that somebody reads in place is never evicted and never overwritten. " * 6,
    "tiers": "Tiers are asked in the order of the configuration, memory first. " * 6,
}
FOUND = [  # question, and what the search returned, best first
    ("Who leaves first?", ["leases", "evictions"]),
    ("Can a value leave while it is read?", ["evictions", "leases"]),
    ("Which tier is asked first?", ["tiers", "leases", "evictions"]),
    ("Who leaves first, and who never?", ["evictions", "leases"]),
]


def main() -> int:
    """Answer all questions twice: by score, and by name."""
    for name, order in (("by score", lambda names: names), ("by name", sorted)):
        with small_model() as model:
            for question, names in FOUND:
                context = "".join(f"[{each}] {DOCUMENTS[each]}\n" for each in order(names))
                generate(model, [f"{SYSTEM}{context}\nquestion: {question}\nanswer: "])
            print(f"documents {name}: hit rate: {hit_rate(model)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
