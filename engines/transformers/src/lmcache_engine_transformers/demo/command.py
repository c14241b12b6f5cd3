"""The command: cold, warm, and again in a new process."""

# No postponed annotations: the command line is made from the types.

import json
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
from lmcache_engine_transformers.demo.settings import calibrated, run_module, settings_for

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
    """One question. Seconds to the first token, tokens, and whether all three answers are the same ids.

    ``agrees``: share of the plain model's tokens that the answer after the restart repeats in their places.
    """

    question: str
    prompt: int
    reused_warm: int
    reused_restart: int
    cold: float
    warm: float
    restart: float
    equal: bool
    agrees: float


@dataclass(frozen=True, slots=True)
class Report:
    """What ``--json`` prints.

    Attributes:
        findings: what is not as it should be; empty when all is.
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
    rows: list[Row]
    hits: dict[str, dict[str, int]]
    nbytes: dict[str, int]
    cold: float
    warm: float
    restart: float
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
            help="Lower tier: a name (a server it needs is started), or PLUGIN: {OPTIONS}."
        ),
    ] = "disk",
    document: Annotated[Path | None, typer.Option(help="Text to ask about.")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk.")] = 256,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> int:
    """Ask three questions about one long document: without a cache, from memory, and in a new process."""
    from lmcache_engine_transformers.demo import model as models

    console = Console(stderr=True)
    place = models.home()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=12)

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
    with Cache.from_config(settings) as cache:
        exact = cache.fidelity == "exact"
        model = CachedModel(plain, cache)
        parts.warm_up(tokenizer, model)
        say("filling the cache with the first question")
        # The machine changes its pace meanwhile, so what an empty cache costs is seen between two neighbours only.
        neighbours = [parts.ask(plain, prompts[0], tokens=1).first_token]
        empty = parts.through(cache, model, prompts[:1], tokens=1, step=step)
        neighbours.append(parts.ask(plain, prompts[0], tokens=1).first_token)
        say("warm: from memory")
        warm = parts.through(cache, model, prompts, step=step)
    say("restart: a new process")
    again = _in_a_new_process(parts.Job(str(folder), dtype, settings, prompts), parts.Phase, step)

    size = settings["chunk_size"]
    known: set[tuple[int, ...]] = set()
    expected_reused(known, prompts[:1], size)
    wanted = {"warm": expected_reused(known, prompts, size)}
    wanted["restart"] = expected_reused(known, prompts, size)
    findings = [
        f"{name}, question {number + 1}: {answer.reused} tokens reused, {count} expected"
        for name, phase in (("warm", warm), ("restart", again))
        for number, (answer, count) in enumerate(zip(phase.answers, wanted[name], strict=True))
        if answer.reused != count
    ]
    rows = [
        Row(question, len(prompt), w.reused, r.reused, c.first_token, w.first_token, r.first_token,
            c.ids == w.ids == r.ids, mean(a == b for a, b in zip(c.ids, r.ids, strict=True)))
        for question, prompt, c, w, r in zip(
            questions, prompts, cold, warm.answers, again.answers, strict=True
        )
    ]  # fmt: skip
    if exact and dtype == "float32":
        findings += [f"answers differ: {row.question}" for row in rows if not row.equal]
    if exact:  # in any dtype: the same bytes, and as many of them
        findings += [
            f"answers from memory and after the restart differ: {row.question}"
            for row, w, r in zip(rows, warm.answers, again.answers, strict=True)
            if w.reused == r.reused and w.ids != r.ids
        ]
    times = [answer.first_token for answer in cold]
    return Report(
        model=folder.name,
        dtype=dtype,
        settings=settings,
        chunk=size,
        rows=rows,
        hits={"warm": warm.hits, "restart": again.hits},
        nbytes=again.nbytes,
        cold=median(times),
        warm=median(row.warm for row in rows),
        restart=median(row.restart for row in rows),
        tokens=len(known) * size,
        own={"empty": empty.answers[0].own, "warm": median(a.own for a in warm.answers)},
        beside={
            "empty": empty.answers[0].beside,
            "warm": median(a.beside for a in warm.answers),
        },
        own_share=empty.answers[0].own * parts.threads() / cold[0].cpu,
        difference=empty.answers[0].first_token - mean(neighbours),
        spread=max(neighbours) - min(neighbours),
        denser=warm.denser,
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


def _in_a_new_process(job: Any, phase: Any, step: Any) -> Any:
    from lmcache_engine_transformers.demo.measure import Answer

    output = run_module(["lmcache_engine_transformers.demo.measure"], json.dumps(asdict(job)))
    for _ in job.prompts:
        step()
    data = json.loads(output)
    return phase(**data | {"answers": [Answer(**answer) for answer in data["answers"]]})


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
    title = f"{report.model}, {report.dtype}: seconds to the first token"
    names = ("question", "prompt", "reused", "cold", "warm", "restart", "faster", "equal")
    table = Table(*names, title=title)
    for number, row in enumerate(report.rows, 1):
        console.print(f"{number}  {row.question}")
        table.add_row(
            str(number),
            str(row.prompt),
            f"{row.reused_warm} / {row.reused_restart}",
            f"{row.cold:.2f}",
            f"{row.warm:.2f}",
            f"{row.restart:.2f}",
            f"{row.cold / row.warm:.0f}x / {row.cold / row.restart:.0f}x",
            "yes" if row.equal else "no",
        )
    console.print(table)
    share, again = report.warm / report.cold, report.restart / report.cold
    kept = ", ".join(f"{name} {nbytes / 1e6:.0f} MB" for name, nbytes in report.nbytes.items())
    for name, hits in report.hits.items():
        found = ", ".join(f"{count} in {tier}" for tier, count in hits.items() if count)
        console.print(f"chunks found, {name}: {found or 'none'}")
    console.print(f"kept: {kept}")
    agrees = mean(row.agrees for row in report.rows)
    console.print(
        f"top-1 agreement with the plain model after the restart: {agrees:.1%} of the answers' tokens"
    )
    memory, *_, lower = report.nbytes
    plain = report.tokens / max(1, report.nbytes[memory]) * 1e9
    console.print(
        f"{lower} holds {report.tokens} tokens, {plain * report.denser:,.0f} in a GB; without encodings "
        f"{plain:,.0f} ({report.denser:.2f}x)"
    )
    console.print(
        f"first token, of a cold one: {share:.3f} from memory, {again:.3f} after a restart "
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
