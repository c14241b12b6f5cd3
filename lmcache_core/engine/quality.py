"""What lossy serdes cost on one model, as measured once and kept, and whether an engine may work with that.

A report file is a JSON list of records, one for each model and serde: ``model`` (``model_id``), ``serde`` (its
name and options as in the fidelity of a key space), ``kl``, ``top1``, ``date``. ``lmcache bench serde MODEL --record
FILE`` writes it, and whatever else measures may; the key ``quality_report`` of the configuration names it.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from lmcache_core.config import EngineConfig
from lmcache_core.identity import weights_fingerprint
from lmcache_core.identity.space import APPROXIMATE
from lmcache_core.spi import ConfigError

_LABELS = re.compile(r"\+(?![^(]*\))")
"""Between labels of a fidelity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One measurement.

    Attributes:
        model: see ``model_id``.
        serde: label, such as ``quant(mode=int8)``.
        kl: divergence of predictions from those on exact memory, nats per token.
        top1: share of tokens whose most likely successor is the same.
        date: ISO 8601.
    """

    model: str
    serde: str
    kl: float
    top1: float
    date: str


def model_id(model: str | Path, /) -> str:
    """The fingerprint of the weights in a folder, in hexadecimal; of anything else its name."""
    try:
        return weights_fingerprint(Path(model)).hex()
    except OSError:
        return str(model)


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def read(path: Path, /) -> list[Report]:
    """Every record of a report; none when there is no such file.

    Raises:
        ConfigError: it is something else.
    """
    try:
        return msgspec.convert(json.loads(path.read_text()), list[Report])
    except FileNotFoundError:
        return []
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no quality report: {error}") from error


def record(path: Path, reports: Sequence[Report], /) -> None:
    """Add measurements to a report, in place of earlier ones of the same model and serde."""
    kept = {(each.model, each.serde): each for each in (*read(path), *reports)}
    rows = [asdict(each) for _, each in sorted(kept.items())]
    path.write_text(json.dumps(rows, indent=1) + "\n")


def complaints(options: EngineConfig, fidelity: str, model: str, /) -> list[str]:
    """What speaks against this fidelity for this model, one line for each lossy serde.

    Args:
        fidelity: of the key space; of a ladder all levels count, so the worst decides.
        model: ``model_id``.

    Raises:
        ConfigError: the report cannot be read.
    """
    if not fidelity.startswith(APPROXIMATE):
        return []
    reports = read(Path(options.quality_report)) if options.quality_report else []
    known = {each.serde: each for each in reports if each.model == model}
    found = []
    for label in _LABELS.split(fidelity.removeprefix(APPROXIMATE)):
        report = known.get(label)
        if report is None:
            where = (
                f"is not in {options.quality_report}" if options.quality_report else "is unknown"
            )
            found.append(
                f"what {label} costs on this model {where}: "
                "run lmcache bench serde MODEL --record FILE and name it in quality_report"
            )
        elif not report.kl <= options.quality_kl:
            found.append(
                f"{label} costs {report.kl:.4g} nats per token on this model ({report.date}), "
                f"over quality_kl: {options.quality_kl:g}; choose a finer serde"
            )
    return found
