"""An agent: tools described once, then a transcript that only ever grows. Branches share their trunk."""

from __future__ import annotations

from small import generate, hit_rate, small_model

TOOLS = "".join(
    f"tool {name}(argument): {what}.\n"
    for name, what in (
        ("search", "returns the three best passages for a few words"),
        ("read", "returns a file by its path, at most a hundred lines"),
        ("run", "runs the tests of one folder and returns the last lines"),
        ("write", "replaces a file, and says what has changed"),
    )
)
RESULTS = ["found in cache.py, line 40", "def close(self): ...", "1 failed, 39 passed", "40 passed"]


def main() -> int:
    """Work on one task, and try two ways at the end."""
    with small_model(save_decode=True) as model:
        transcript = f"{TOOLS}\ntask: find out why closing twice fails, and repair it.\n"
        for result in RESULTS:
            (call,) = generate(model, [f"{transcript}call: "])
            print(f"step of {model.last.prompt[0]} tokens, {model.last.reused[0]} reused")
            transcript += f"call: {call}\nresult: {result}\n"
        generate(model, [f"{transcript}summary: ", f"{transcript}what is left to do: "])
        print(f"two ends of one trunk: {model.last.reused} of {model.last.prompt} reused")
        print(f"hit rate: {hit_rate(model)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
