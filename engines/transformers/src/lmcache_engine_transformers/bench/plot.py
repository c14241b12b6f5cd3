"""Two pictures of the table: how much quality a byte costs, and how fast it is made and read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmcache_core.spi import PluginUnavailable

FLOOR = 1e-6
"""Nats: an exact encoding is drawn there, as a logarithm has no zero."""


def plot(rows: Sequence[Any], folder: Path, title: str, /) -> list[Path]:
    """Write ``rate.png|svg`` and ``speed.png|svg`` and name them.

    Args:
        rows: ``command.Row`` of the encodings that were measured.

    Raises:
        PluginUnavailable: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise PluginUnavailable(f"plots need {error.name}: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, draw in (("rate", _rate), ("speed", _speed)):
        figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
        draw(axes, rows)
        axes.set_title(title, fontsize=9)
        axes.grid(alpha=0.3)
        for kind in ("png", "svg"):
            made.append(folder / f"{name}.{kind}")
            figure.savefig(made[-1], dpi=140)
        pyplot.close(figure)
    return made


def _rate(axes: Any, rows: Sequence[Any]) -> None:
    axes.set(xlabel="bits per element", ylabel="KL from exact memory, nats per token", yscale="log")
    for row in rows:
        kl = max(row.kl, FLOOR)
        axes.scatter(row.bits, kl, marker="o" if row.kl else "s", color="C0" if row.kl else "C2")
        axes.annotate(
            row.serde, (row.bits, kl), xytext=(4, 4), textcoords="offset points", fontsize=7
        )


def _speed(axes: Any, rows: Sequence[Any]) -> None:
    at = range(len(rows))
    axes.barh([y - 0.2 for y in at], [row.encode_gb_s for row in rows], 0.4, label="encode")
    axes.barh([y + 0.2 for y in at], [row.decode_gb_s for row in rows], 0.4, label="decode")
    axes.axvline(rows[0].copy_gb_s, color="0.5", linestyle="--", label="copy")
    axes.set_yticks(list(at), [row.serde for row in rows], fontsize=7)
    axes.set(xlabel="GB/s of bfloat16 per core", xscale="log")
    axes.legend(fontsize=8)
