"""The command: cold, stored, found by another process in the lower tier, found again in its memory."""

# No postponed annotations: the command line is made from the types.

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_core.spi import ConfigError
from lmcache_engine_transformers.demo.settings import (
    calibrated,
    run_module,
    settings_for,
    two_caches,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
DOCUMENT = "examples/documents/operators-handbook.md"
QUESTIONS = (
    "Which three things does an operator check first when the hit rate drops?",
    "What happens to a value whose digest does not match, and what is counted?",
    "How is a folder of the disk tier moved to a larger drive?",
)
BAR = 0.15
"""Most that a first token from memory may take, as a share of a cold one."""
OWN = 0.01
"""Most CPU time in the cache's own code on the way of the model's thread, as a share of a cold first token's."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question. Seconds to the first token, tokens, and whether all four answers are the same ids.

    ``agrees``: share of the plain model's tokens that the answer from the lower tier repeats in their places.
    """

    question: str
    prompt: int
    reused: int
    cold: float
    lower: float
    warm: float
    equal: bool
    agrees: float


@dataclass(frozen=True, slots=True)
class Report:
    """What ``--json`` prints.

    Attributes:
        findings: what is not as it should be; empty when all is.
        daemons: whether two daemons shared the lower tier; else one process did after the other.
        hits: chunks by tier, where what was ``stored`` had been found before, and what the other process found at
            first (``lower``) and again (``warm``).
        served: tokens that were reused, and those that had to be, likewise.
        cold, warm: medians.
        lower: of the first question alone: what it brings up, the next find in memory.
        denser: how many times more tokens the lower tier holds by its encodings; 1 without.
        tokens: of full chunks that the lower tier holds.
        own, beside: CPU seconds of the cache's own code in the model's thread and of its other threads, while nothing
            was found and while everything was in memory.
        own_share: of them, in the model's thread with nothing found: share of a cold first token's, by thread.
        difference, spread: first token with an empty cache minus the mean without one, asked right before and
            after, and how far those two are apart.
    """

    model: str
    dtype: str
    settings: dict[str, Any]
    chunk: int
    daemons: bool
    rows: list[Row]
    hits: dict[str, dict[str, int]]
    served: dict[str, tuple[int, int]]
    nbytes: dict[str, int]
    cold: float
    lower: float
    warm: float
    tokens: int
    own: dict[str, float]
    beside: dict[str, float]
    own_share: float
    difference: float
    spread: float
    denser: float
    findings: list[str]


@app.command()
def main(
    model: Annotated[Path | None, typer.Option(help="Folder of another causal LM.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bf16 or fp16.")] = "float32",
    serde: Annotated[
        str,
        typer.Option(
            help="Encodings of the lower tier, by commas: x12, 'quant: {mode: k8v4h}, zstd'."
        ),
    ] = "",
    tier: Annotated[
        str,
        typer.Option(
            help="Lower tier: a name (a server it needs is started), or PLUGIN: {OPTIONS}. Two daemons share a server."
        ),
    ] = "disk",
    document: Annotated[Path | None, typer.Option(help="Text to ask about.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Ask three questions about one long document: without a cache, from memory, and in a new process."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started ends as by Ctrl-C
    from lmcache_engine_transformers.demo import model as models

    console = Console(stderr=True)
    place = models.home()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=14)

        def say(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(f"demo: {text}")

        folder = model or models.prepare(place, say)
        report = measure(
            folder,
            dtype=dtype,
            settings=calibrated(settings_for(tier, serde, chunk, place), folder, place, say),
            text=_read(document),
            say=say,
            step=lambda: progress.advance(task),
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        _print(report)
    findings = report.findings
    if model is None and report.own_share > OWN:  # another model may be smaller
        findings.append(f"the cache's own code takes {report.own_share:.2%}, over {OWN:.0%}")
    for finding in findings:
        console.print(f"demo: {finding}", style="red")
    return int(bool(findings))


def measure(
    folder: Path,
    /,
    *,
    dtype: str,
    settings: dict[str, Any],
    text: str,
    questions: Sequence[str] = QUESTIONS,
    say: Any = lambda text: None,
    step: Any = lambda: None,
) -> Report:
    """Run all phases and compare them."""
    from lmcache_core.engine import Cache
    from lmcache_engine_transformers.cached import CachedModel
    from lmcache_engine_transformers.demo import measure as parts
    from lmcache_engine_transformers.demo.model import load

    say("loading the model")
    tokenizer, plain = load(folder, dtype)
    prompts = [tokens_of(tokenizer, text, question) for question in questions]
    parts.warm_up(tokenizer, plain)
    say("cold: without a cache")
    cold = []
    for prompt in prompts:
        cold.append(parts.ask(plain, prompt))
        step()
    with two_caches(settings) as (here, there):
        with Cache.from_config(here) as cache:
            exact = cache.fidelity == "exact"
            model = CachedModel(plain, cache)
            parts.warm_up(tokenizer, model)
            say("storing: the first question, nothing found")
            # The machine changes its pace meanwhile, so what an empty cache costs is seen between two neighbours only.
            neighbours = [parts.ask(plain, prompts[0], tokens=1).first_token]
            empty = parts.through(cache, model, prompts[:1], tokens=1, step=step)
            neighbours.append(parts.ask(plain, prompts[0], tokens=1).first_token)
            say("storing: all questions")
            stored = parts.through(cache, model, prompts, step=step)
        say("another process: from the lower tier, then from memory")
        job = parts.Job(str(folder), dtype, there, prompts)
        lower, warm = _in_a_new_process(job, step)

    phases = {"stored": stored, "lower": lower, "warm": warm}
    size = settings["chunk_size"]
    known: set[tuple[int, ...]] = set()
    expected_reused(known, prompts[:1], size)
    wanted = {name: expected_reused(known, prompts, size) for name in phases}
    findings = [
        f"{name}, question {number + 1}: {answer.reused} tokens reused, {count} expected"
        for name, phase in phases.items()
        for number, (answer, count) in enumerate(zip(phase.answers, wanted[name], strict=True))
        if answer.reused != count
    ]
    *_, tier = lower.nbytes
    if (found := lower.hits.get(tier, 0)) < len(known):
        findings.append(f"{tier} gave {found} of the {len(known)} chunks that were stored there")
    answers = list(zip(cold, *(phase.answers for phase in phases.values()), strict=True))
    rows = [
        Row(question, len(prompt), there.reused, c.first_token, there.first_token, again.first_token,
            all(each.ids == c.ids for each in (here, there, again)),
            mean(a == b for a, b in zip(c.ids, there.ids, strict=True)))
        for question, prompt, (c, here, there, again) in zip(questions, prompts, answers, strict=True)
    ]  # fmt: skip
    if exact and dtype == "float32":
        findings += [f"answers differ: {row.question}" for row in rows if not row.equal]
    if exact:  # in any dtype: the same bytes, and as many of them
        findings += [
            f"answers from the lower tier and from memory differ: {row.question}"
            for row, (_, _, there, again) in zip(rows, answers, strict=True)
            if there.reused == again.reused and there.ids != again.ids
        ]
    return Report(
        model=folder.name,
        dtype=dtype,
        settings=settings,
        chunk=size,
        daemons="daemon" in there,
        rows=rows,
        hits={name: phase.hits for name, phase in phases.items()},
        served={
            name: (sum(answer.reused for answer in phase.answers), sum(wanted[name]))
            for name, phase in phases.items()
        },
        nbytes=warm.nbytes,
        cold=median(answer.first_token for answer in cold),
        lower=rows[0].lower,
        warm=median(row.warm for row in rows),
        tokens=len(known) * size,
        own={"empty": empty.answers[0].own, "warm": median(a.own for a in warm.answers)},
        beside={
            "empty": empty.answers[0].beside,
            "warm": median(a.beside for a in warm.answers),
        },
        own_share=empty.answers[0].own * parts.threads() / cold[0].cpu,
        difference=empty.answers[0].first_token - mean(neighbours),
        spread=max(neighbours) - min(neighbours),
        denser=stored.denser,
        findings=findings,
    )


def tokens_of(tokenizer: Any, text: str, question: str, /) -> list[int]:
    """A prompt as ids: the document, then the question, in the form the model was trained on."""
    content = f"{text}\n\nAnswer in one sentence. {question}"
    if getattr(tokenizer, "chat_template", None):
        turn = [{"role": "user", "content": content}]
        whole = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(whole, add_special_tokens=False).input_ids)
    return list(tokenizer(content).input_ids)


def expected_reused(
    known: set[tuple[int, ...]], prompts: Sequence[Sequence[int]], size: int, /
) -> list[int]:
    """Tokens each prompt must find, asked in order; every full chunk is known afterwards."""
    counts = []
    for prompt in prompts:
        ends = range(size, len(prompt) + 1, size)
        found = next((end - size for end in ends if tuple(prompt[:end]) not in known), None)
        counts.append(min(len(prompt) // size * size if found is None else found, len(prompt) - 1))
        known.update(tuple(prompt[:end]) for end in ends)
    return counts


def _in_a_new_process(job: Any, step: Any) -> Any:
    from lmcache_engine_transformers.demo.measure import Answer, Phase

    output = run_module(["lmcache_engine_transformers.demo.measure"], json.dumps(asdict(job)))
    for _ in job.prompts * 2:
        step()
    return [
        Phase(**phase | {"answers": [Answer(**answer) for answer in phase["answers"]]})
        for phase in json.loads(output)
    ]


def _read(document: Path | None) -> str:
    from lmcache_engine_transformers.demo.model import tree

    root = tree()
    if document is None and root is not None:
        document = root / DOCUMENT
    if document is None or not document.exists():
        raise ConfigError(f"no document at {document}; name one: --document FILE")
    return document.read_text()


def _print(report: Report) -> None:
    console = Console()
    memory, *_, lower = report.nbytes
    two = "daemons" if report.daemons else "processes"
    title = (
        f"{report.model}, {report.dtype}, two {two} over one {lower}: seconds to the first token"
    )
    names = ("question", "prompt", "reused", "cold", lower, "memory", "faster", "equal")
    table = Table(*names, title=title)
    for number, row in enumerate(report.rows, 1):
        console.print(f"{number}  {row.question}")
        table.add_row(
            str(number),
            str(row.prompt),
            str(row.reused),
            f"{row.cold:.2f}",
            f"{row.lower:.2f}",
            f"{row.warm:.2f}",
            f"{row.cold / row.lower:.0f}x / {row.cold / row.warm:.0f}x",
            "yes" if row.equal else "no",
        )
    console.print(table)
    # Not every store tells.
    told = ((name, nbytes) for name, nbytes in report.nbytes.items() if nbytes)
    kept = ", ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, nbytes in told)
    said = {"stored": "while stored", "lower": f"by the second of two {two}", "warm": "by it again"}
    for name, hits in report.hits.items():
        found = ", ".join(f"{count} in {tier}" for tier, count in hits.items() if count)
        served, expected = report.served[name]
        console.print(
            f"found {said[name]}: {served} of {expected} tokens; chunks: {found or 'none'}"
        )
    console.print(f"kept: {kept}")
    agrees = mean(row.agrees for row in report.rows)
    console.print(
        f"top-1 agreement with the plain model, from {lower}: {agrees:.1%} of the answers' tokens"
    )
    plain = report.tokens / max(1, report.nbytes[memory]) * 1e9
    console.print(
        f"{lower} holds {report.tokens} tokens, {plain * report.denser:,.0f} in a GB; without encodings "
        f"{plain:,.0f} ({report.denser:.2f}x)"
    )
    share, brought = report.warm / report.cold, report.lower / report.rows[0].cold
    console.print(
        f"first token, of a cold one: {share:.3f} from memory, {brought:.3f} from {lower} (question 1) "
        f"(bar: {BAR} from memory, {'met' if share <= BAR else 'not met'})"
    )
    console.print(
        f"the cache's own code where nothing is found: {report.own['empty'] * 1e3:.0f} ms of CPU in the model's "
        f"thread, {report.own_share:.2%} of a cold first token (bar: {OWN:.0%}, "
        f"{'met' if report.own_share <= OWN else 'not met'}), {report.beside['empty'] * 1e3:.0f} ms in others; where "
        f"all is: {report.own['warm'] * 1e3:.0f} and {report.beside['warm'] * 1e3:.0f} ms"
    )
    console.print(
        f"with an empty cache the first token came {report.difference:+.2f} s later than without, asked right before "
        f"and after; these two are {report.spread:.2f} s apart"
    )
