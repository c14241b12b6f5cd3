"""A batch from one template: the examples in front are computed once, for the first batch."""

from __future__ import annotations

from small import generate, hit_rate, small_model

TEMPLATE = "Sort each report into one of: memory, disk, network, other.\n" + "".join(
    f"report: {text}\nkind: {kind}\n"
    for text, kind in (
        ("the pool is full and nothing is evicted", "memory"),
        ("the drive answers after ten seconds", "disk"),
        ("the store closed the connection", "network"),
        ("the configuration names a tier twice", "other"),
    )
)
REPORTS = [
    "a read came back short", "no route to the store", "the kernel killed the process",
    "the folder is read-only", "a lease was not released", "the certificate has expired",
    "an option is misspelt", "the breaker is open",
]  # fmt: skip
BATCH = 4


def main() -> int:
    """Sort all reports, some at a time; they differ in length and are padded on the left."""
    with small_model() as model:
        for at in range(0, len(REPORTS), BATCH):
            batch = [f"{TEMPLATE}report: {text}\nkind: " for text in REPORTS[at : at + BATCH]]
            generate(model, batch, tokens=4)
            print(f"batch of {model.last.prompt} tokens, {model.last.reused} reused")
        print(f"hit rate: {hit_rate(model)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
