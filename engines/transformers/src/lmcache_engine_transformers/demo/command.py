"""The command: cold, warm, and again in a new process."""

# No postponed annotations: the command line is made from the types.

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean, median
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_core.spi import ConfigError, Secret

app = typer.Typer(add_completion=False, rich_markup_mode=None)
DOCUMENT = "examples/documents/operators-handbook.md"
QUESTIONS = (
    "Which three things does an operator check first when the hit rate drops?",
    "What happens to a value whose digest does not match, and what is counted?",
    "How is a folder of the disk tier moved to a larger drive?",
)
CPU_SIZE = "1GiB"
BAR = 0.15
"""Most that a first token from memory may take, as a share of a cold one."""


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
        own: seconds in the cache's own code while nothing was found, and while everything was in memory.
        difference: first token with an empty cache minus without one, and the spread of the latter.
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
    own: dict[str, float]
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
            settings=settings_for(tier, serde, chunk, place),
            text=_read(document),
            say=say,
            step=lambda: progress.advance(task),
        )
    if as_json:
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
    else:
        _print(report)
    for finding in report.findings:
        console.print(f"demo: {finding}", style="red")
    return int(bool(report.findings))


def settings_for(tier: str, serde: str, chunk: int, place: Path, /) -> dict[str, Any]:
    """Memory above, and the tier that outlives the process below it, empty.

    Raises:
        ConfigError: ``tier`` is neither a name nor one mapping.
        PluginError: no such tier.
        Unsupported: the tier has neither a folder nor a server that it can start by itself.
    """
    written = yaml.safe_load(tier)
    if isinstance(written, str):
        written = {written: _empty(written, place)}
    if not (isinstance(written, dict) and len(written) == 1):
        raise ConfigError(f"--tier takes a name or one 'PLUGIN: {{OPTIONS}}', not {tier!r}")
    ((plugin, options),) = written.items()
    # A demo on a busy machine shows hits, not deadlines.
    lower = {"deadline": "60s", "write": "through", **(options or {})}
    if serde:
        lower["serde"] = yaml.safe_load(f"[{serde}]")
    return {
        "chunk_size": chunk,
        "tiers": [{"cpu": {"size": CPU_SIZE}}, {plugin: lower}],
        "manager": {"cost_gate": False, "dirty_cap": 0.9},
    }


def _empty(plugin: str, place: Path) -> dict[str, Any]:
    """Options of a tier with nothing in it: in a new folder, or in a server that ends with this process."""
    from lmcache_core.config import permissions

    found = permissions().load("backends", plugin)
    if any(field.name == "path" for field in fields(found.config_type)):
        kept = place / "tier"
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        return {"path": str(kept), "size": "4GiB"}
    config = found.testing_config()
    written = ((field, getattr(config, field.name)) for field in fields(config))
    return {
        field.name: value.reveal() if isinstance(value, Secret) else value
        for field, value in written
        if value != field.default
    }


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
        empty = parts.through(cache, model, prompts[:1], tokens=1, step=step)
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
        own={"empty": empty.answers[0].own, "warm": median(a.own for a in warm.answers)},
        difference=empty.answers[0].first_token - median(times),
        spread=max(times) - min(times),
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

    command = [sys.executable, "-m", "lmcache_engine_transformers.demo.measure"]
    result = subprocess.run(
        command, input=json.dumps(asdict(job)), capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RuntimeError((result.stderr.strip().splitlines() or ["no word"])[-1])
    for _ in job.prompts:
        step()
    data = json.loads(result.stdout)
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
        f"top-1 agreement with the plain model after the restart: {agrees:.1%} of the answers' tokens; "
        f"the lower tier holds {report.denser:.2f}x the tokens it would hold plain"
    )
    console.print(
        f"first token, of a cold one: {share:.3f} from memory, {again:.3f} after a restart "
        f"(bar: {BAR} from memory, {'met' if share <= BAR else 'not met'})"
    )
    console.print(
        f"the cache's own code: {report.own['empty'] / report.cold:.2%} of a cold first token where nothing is "
        f"found, {report.own['warm'] / report.cold:.2%} where all is; with an empty cache the first token came "
        f"{report.difference:+.2f} s later than the median without a cache, whose spread is {report.spread:.2f} s"
    )
