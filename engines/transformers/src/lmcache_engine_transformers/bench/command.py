"""``lmcache bench serde MODEL``: every encoding of key/value memory in one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import typer
import yaml

from lmcache_core.cli.config import Json
from lmcache_core.cli.output import print_json, print_table, remark
from lmcache_core.config import permissions
from lmcache_core.engine import quality as reports
from lmcache_core.registry import Registry
from lmcache_core.spi import ConfigError, PluginError
from lmcache_core.storage.build import label
from lmcache_core.wrappers import Serde

app = typer.Typer(add_completion=False, rich_markup_mode=None)
OFFSETS = (0, 30_000, 60_000)
"""Where the texts begin, in tokens; of a shorter text as far as they fit."""


@dataclass(frozen=True, slots=True)
class Row:
    """One encoding, over all texts.

    Attributes:
        exact: every bit came back.
        bits: per element, everything beside it included; ratio: against 16.
        key_error, value_error: relative root mean square.
        nll, kl, top1: see ``quality.Quality``.
        encode_gb_s, decode_gb_s, copy_gb_s: bytes of bfloat16 per second of one core.
        pays_below_gbit_s: where reading a link and then decoding on one core is as fast as reading it raw.
        declined: segments it would not take, stored raw.
    """

    serde: str
    exact: bool
    bits: float
    ratio: float
    key_error: float
    value_error: float
    nll: float
    kl: float
    top1: float
    encode_gb_s: float
    decode_gb_s: float
    copy_gb_s: float
    pays_below_gbit_s: float
    declined: int


@app.command()
def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a causal LM.")],
    serde: Annotated[
        list[str] | None,
        typer.Option(
            help="As in a configuration, such as 'x12' or '[xr, zstd]'; all when none is named."
        ),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Another text than Python's reference.")] = None,
    texts: Annotated[int, typer.Option(min=1, max=3, help="Slices of it.")] = 3,
    context: Annotated[int, typer.Option(min=16, help="Tokens whose memory is encoded.")] = 1536,
    following: Annotated[int, typer.Option(min=2, help="Tokens read on top of it.")] = 512,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens per chunk.")] = 256,
    plots: Annotated[Path | None, typer.Option(help="Folder for pictures (PNG, SVG).")] = None,
    record: Annotated[
        Path | None, typer.Option(help="File to note what the lossy ones cost, for quality_report.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Whose permissions to apply.")] = None,
    as_json: Json = False,
) -> int:
    """Encode a model's memory with every serde: size, error, what the model says on top of it, speed."""
    from lmcache_engine_transformers.bench.quality import Subject, default_text
    from lmcache_engine_transformers.demo.model import load

    registry = permissions(config)
    chains = chains_of(registry, serde)
    tokenizer, subject = load(model, "float32")
    ids = tokenizer(text.read_text() if text else default_text()).input_ids
    parts = slices(ids, texts, context + following)
    results: dict[str, list[dict[str, Any]]] = {name: [] for name, _ in chains}
    for number, part in enumerate(parts, 1):
        remark(f"text {number} of {len(parts)}: reading {context} tokens")
        made = Subject(subject, part, context)
        for name, chain in chains:
            remark(f"text {number} of {len(parts)}: {name}")
            results[name].append(measured(made, chain, chunk))
    rows = [row_of(name, found) for name, found in results.items() if found]
    if record is not None:
        note(record, model, registry, rows)
    if as_json:
        print_json({"model": str(model), "chunk": chunk, "rows": [asdict(row) for row in rows]})
    else:
        show(rows)
    if plots is not None:
        from lmcache_engine_transformers.bench.plot import plot

        for path in plot(
            rows, plots, f"{model.name}, {len(parts)} texts, chunks of {chunk} tokens"
        ):
            remark(f"wrote {path}")
    return 0


def note(path: Path, model: Path, registry: Registry, rows: Sequence[Row], /) -> None:
    """Add what each chain with one lossy serde costs to a quality report."""
    found = []
    for row in rows:
        named = _named(yaml.safe_load(row.serde))
        lossy = [each for each in named if not registry.load("serdes", each[0]).lossless]
        if len(lossy) == 1:
            name, options = lossy[0]
            made = registry.load("serdes", name).config_type(**options)
            found.append(
                reports.Report(
                    model=reports.model_id(model), serde=label(name, made), kl=row.kl, top1=row.top1,
                    date=reports.today(),
                )
            )  # fmt: skip
    reports.record(path, found)
    remark(f"noted {len(found)} in {path}")


def slices(ids: Sequence[int], texts: int, length: int, /) -> list[Sequence[int]]:
    """Parts of a text that do not overlap.

    Raises:
        ConfigError: it is too short for one.
    """
    if len(ids) < length:
        raise ConfigError(
            f"a text of {len(ids)} tokens is shorter than {length}: give a longer one"
        )
    begins = (
        OFFSETS if len(ids) >= OFFSETS[-1] + length else range(0, len(ids) - length + 1, length)
    )
    return [ids[begin : begin + length] for begin in list(begins)[:texts]]


def chains_of(
    registry: Registry, written: Sequence[str] | None, /
) -> list[tuple[str, list[Serde]]]:
    """Names and serdes: those that were asked for, or every installed one that needs no options.

    Raises:
        ConfigError: no chain of serdes, or options it does not have.
        PluginError: no such serde.
    """
    if written:
        return [(each, _chain(registry, yaml.safe_load(each))) for each in written]
    found = list[tuple[str, list[Serde]]]()
    for name in sorted(registry.names("serdes")):
        try:
            found.append((name, _chain(registry, name)))
        except (PluginError, ConfigError) as error:
            remark(f"left out: {name}: {error}")
    return found


def _named(written: Any) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of a chain."""
    found = []
    for each in written if isinstance(written, list) else [written]:
        single = {each: None} if isinstance(each, str) else each
        if not (isinstance(single, dict) and len(single) == 1):
            raise ConfigError(f"a serde is a name or one 'NAME: {{OPTIONS}}', not {each!r}")
        ((name, options),) = single.items()
        found.append((name, options or {}))
    return found


def _chain(registry: Registry, written: Any) -> list[Serde]:
    chain = list[Serde]()
    for name, options in _named(written):
        kind = registry.load("serdes", name)
        try:
            chain.append(kind(kind.config_type(**options)))
        except TypeError as error:
            raise ConfigError(f"serde {name!r}: {error}") from error
    return chain


def measured(subject: Any, chain: Sequence[Serde], chunk: int, /) -> dict[str, Any]:
    """One chain on one text."""
    import torch

    from lmcache_engine_transformers.bench.coding import code, errors

    coded = code(subject.kv, chain, chunk)
    same = torch.equal(coded.kv.view(torch.int16), subject.kv.view(torch.int16))
    quality = None if same else subject.judge(coded.kv)
    key_error, *others = errors(subject.kv, coded.kv)
    return {
        "exact": same,
        "stored": coded.stored / coded.raw,
        "key_error": key_error,
        "value_error": others[0] if others else 0.0,
        "nll": quality.nll if quality else 0.0,
        "kl": quality.kl if quality else 0.0,
        "top1": quality.top1 if quality else 1.0,
        "declined": coded.declined,
        "encode": coded.raw / coded.encode,
        "decode": coded.raw / coded.decode,
        "copy": coded.raw / coded.copy,
    }


def row_of(name: str, found: Sequence[dict[str, Any]], /) -> Row:
    """Means over the texts; the best of the speeds."""
    stored = mean(each["stored"] for each in found)
    averages = {
        key: mean(each[key] for each in found)
        for key in ("key_error", "value_error", "nll", "kl", "top1")
    }
    encode, decode, copy = (
        max(each[key] for each in found) / 1e9 for key in ("encode", "decode", "copy")
    )
    return Row(
        serde=name, exact=all(each["exact"] for each in found), bits=16 * stored, ratio=1 / stored,
        encode_gb_s=encode, decode_gb_s=decode, copy_gb_s=copy,
        pays_below_gbit_s=max(0.0, 8 * decode * (1 - stored)),
        declined=sum(each["declined"] for each in found), **averages,
    )  # fmt: skip


def show(rows: Sequence[Row], /) -> None:
    """The table, for people."""
    head = (
        "serde", "bits", "ratio", "K err", "V err", "dNLL", "KL", "top-1 %",
        "enc GB/s", "dec GB/s", "pays below Gbit/s",
    )  # fmt: skip
    print_table(
        head,
        [
            (
                row.serde + (f" ({row.declined} declined)" if row.declined else ""),
                f"{row.bits:.2f}", f"{row.ratio:.3f}", f"{row.key_error:.3f}", f"{row.value_error:.3f}",
                "exact" if row.exact else f"{row.nll:+.4f}", "0" if row.exact else f"{row.kl:.5f}",
                f"{100 * row.top1:.1f}", f"{row.encode_gb_s:.2f}", f"{row.decode_gb_s:.2f}",
                f"{row.pays_below_gbit_s:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    if rows:
        best = max(row.copy_gb_s for row in rows)
        typer.echo(
            f"copy: {best:.2f} GB/s on the same clock and buffers; one of {os.cpu_count()} cores"
        )
