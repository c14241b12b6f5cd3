"""The command: read, calibrate, and report what every level costs on two kinds of text."""

# No postponed annotations: the command line is made from the types.

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_json, print_table, remark
from lmcache_core.config import permissions
from lmcache_core.registry import Registry
from lmcache_core.spi import ConfigError

app = typer.Typer(add_completion=False, rich_markup_mode=None)
CODECS = ("cachegen", "klt")


@app.command()
def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a causal LM.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: NAME.tables here.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option(help="Text like what the model will read, once or often.")
    ] = None,
    texts: Annotated[
        int, typer.Option(min=2, help="Parts of it; the last one is kept to test.")
    ] = 7,
    context: Annotated[int, typer.Option(min=32, help="Tokens per part.")] = 1536,
    following: Annotated[int, typer.Option(min=2, help="Tokens read on top of it.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per chunk in the report.")] = 256,
    other: Annotated[Path | None, typer.Option(help="Text of another kind for the report.")] = None,
    report: Annotated[bool, typer.Option(help="Measure every level; without, only write.")] = True,
    config: Annotated[Path | None, typer.Option(help="Whose permissions to apply.")] = None,
    as_json: Json = False,
) -> int:
    """Make the tables that cachegen and klt need for one model, and report what each level costs."""
    from lmcache_engine_transformers.bench.quality import default_text
    from lmcache_engine_transformers.calibrate.samples import library_text, spread
    from lmcache_engine_transformers.demo.model import load

    registry = permissions(config)
    kind = registry.load("serdes", CODECS[-1])
    tokenizer, subject = load(model, "float32")
    written = "\n\n".join(each.read_text() for each in text) if text else library_text()
    parts = spread(tokenizer(written).input_ids, texts, context + following)
    if len(parts) < 2:
        raise ConfigError(
            f"a text of {len(parts)} times {context + following} tokens is too short: give a longer one"
        )
    about = {
        "source": hashlib.sha256(written.encode()).hexdigest()[:16] if text else "Python's library",
        "context": context,
    }
    data = made(kind, subject, parts[:-1], context, name=model.name, about=about)
    target = out or Path(f"{model.name}.tables")
    partial = target.with_name(f"{target.name}.partial")
    partial.write_bytes(data)
    partial.replace(target)
    remark(f"wrote {target}, {len(data) / 1e6:.1f} MB, digest {data[-32:].hex()[:32]}")
    found: dict[str, Any] = {"tables": str(target), "digest": data[-32:].hex(), **about}
    if report:
        foreign = tokenizer(other.read_text() if other else default_text()).input_ids
        sources = {"match": parts[-1:], "mismatch": spread(foreign, 3, context + following)[1:2]}
        found["rows"] = reported(registry, subject, sources, target, context, chunk)
        target.with_name(target.name + ".json").write_text(json.dumps(found, indent=2))
    if as_json:
        print_json(found)
    elif report:
        show(found["rows"])
    return 0


def made(
    kind: Any, model: Any, parts: Sequence[Sequence[int]], context: int, /, *, name: str,
    about: Mapping[str, Any],
) -> bytes:  # fmt: skip
    """Tables from these texts."""
    from lmcache_engine_transformers.calibrate.samples import frequencies, sample

    samples = []
    for number, ids in enumerate(parts, 1):
        remark(f"text {number} of {len(parts)}: reading {context} tokens")
        samples.append(sample(model, ids, context, seed=number))
    remark("fitting")
    try:
        data: bytes = kind.calibrate(samples, frequencies(model), model=name, about=about)
    except ValueError as error:
        raise ConfigError(f"{name} cannot be calibrated: {error}") from error
    return data


def reported(
    registry: Registry, model: Any, sources: Mapping[str, Sequence[Sequence[int]]], tables: Path,
    context: int, chunk: int, /,
) -> list[dict[str, Any]]:  # fmt: skip
    """Every level of every codec on the texts of each source."""
    from lmcache_engine_transformers.bench.command import measured, row_of
    from lmcache_engine_transformers.bench.quality import Subject

    chains = []
    for name in CODECS:
        codec = registry.load("serdes", name)
        for level in range(1, codec.levels + 1):
            options = codec.config_type(tables=str(tables), level=level)
            chains.append((f"{name} {level}", codec(options)))
    rows = []
    for source, texts in sources.items():
        results: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in chains}
        for ids in texts:
            read = Subject(model, ids, context)
            for name, codec in chains:
                remark(f"{source}: {name}")
                results[name].append(measured(read, [codec], chunk))
        rows += [
            {"text": source, **asdict(row_of(name, each))} for name, each in results.items() if each
        ]
    return rows


def show(rows: Sequence[Mapping[str, Any]], /) -> None:
    """The report, for people."""
    print_table(
        ("text", "codec", "bits", "ratio", "KL", "top-1 %", "dNLL", "enc GB/s", "dec GB/s"),
        [
            (
                row["text"], row["serde"] + (f" ({row['declined']} declined)" if row["declined"] else ""),
                f"{row['bits']:.2f}", f"{row['ratio']:.2f}", f"{row['kl']:.5f}", f"{100 * row['top1']:.1f}",
                f"{row['nll']:+.4f}", f"{row['encode_gb_s']:.2f}", f"{row['decode_gb_s']:.2f}",
            )
            for row in rows
        ],
    )  # fmt: skip
