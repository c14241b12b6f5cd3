"""The entropy coder that codecs share: rANS with static tables, 32 interleaved streams.

Coding after J. Duda, "Asymmetric numeral systems" (2013), with 32-bit states in [2**16, 2**32) and 16-bit
renormalisation. Symbol *i* belongs to stream ``i % 32`` and is coded with table ``classes[i % period]``,
``period`` the length of ``classes``; a codec repeats the classes of its channels. Encoded form: 32 states,
u32 each, then the words, u16 each, in the order in which a decoder that walks all symbols needs them.

``Reference`` is the specification, in pure Python; the native part takes its place where it is installed.
Decoding trusts nothing: damaged bytes give False or other symbols, never a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache_core import ops

if TYPE_CHECKING:
    from typing_extensions import Buffer

LANES = 32
LOW = 1 << 16
BITS = range(1, 13)
"""Widths of probabilities that tables may have."""
NAMES = ("RansTables", "rans_bound", "rans_encode", "rans_decode")


class Reference:
    """The coder in plain Python: what every other implementation is compared with."""

    class RansTables:
        """Tables of several classes; made once, used for many values from any thread.

        Args:
            freqs: uint16, 256 for each class: how often each symbol comes in ``1 << bits`` symbols.

        Raises:
            ValueError: frequencies of a class that do not sum to ``1 << bits``.
        """

        def __init__(self, freqs: Buffer, bits: int) -> None:
            table = memoryview(freqs).cast("B").cast("H")
            if len(table) % 256 or not len(table) or bits not in BITS:
                raise ValueError(f"{len(table)} frequencies are not 256 per class of {bits} bits")
            self.bits, self.classes = bits, len(table) // 256
            self.coded: list[list[tuple[int, int]]] = []
            """For each class and symbol: frequency and where its slots begin."""
            self.slots: list[list[int]] = []
            """For each class and slot: the symbol."""
            for at in range(0, len(table), 256):
                rows, slots = [], list[int]()
                for symbol, freq in enumerate(table[at : at + 256]):
                    rows.append((freq, len(slots)))
                    slots += [symbol] * freq
                if len(slots) != 1 << bits:
                    raise ValueError(f"frequencies sum to {len(slots)}, not to 1 << {bits}")
                self.coded.append(rows)
                self.slots.append(slots)

    @staticmethod
    def rans_bound(count: int, bits: int) -> int:
        """Most bytes that so many symbols take."""
        return 4 * LANES + 2 * ((count * bits + 15) // 16 + LANES + 1)

    @staticmethod
    def rans_encode(tables: RansTables, classes: Buffer, symbols: Buffer, into: Buffer) -> int:
        """Write the encoded form and return its length.

        Args:
            classes: uint8, a table number for each position of the period.
            symbols: uint8.
            into: at least ``rans_bound`` bytes.

        Raises:
            ValueError: a symbol of frequency 0, no such class, or too little room.
        """
        groups, data, out = (memoryview(each).cast("B") for each in (classes, symbols, into))
        if not len(groups) or max(groups) >= tables.classes:
            raise ValueError(f"classes are not below {tables.classes}")
        if out.nbytes < (most := Reference.rans_bound(len(data), tables.bits)):
            raise ValueError(f"encoding may need {most} bytes, got {out.nbytes}")
        states, words = [LOW] * LANES, bytearray()
        for i in reversed(range(len(data))):
            freq, start = tables.coded[groups[i % len(groups)]][data[i]]
            if not freq:
                raise ValueError(f"symbol {data[i]} at {i} is not in its table")
            x = states[i % LANES]
            if x >> 32 - tables.bits >= freq:
                words += (x & 0xFFFF).to_bytes(2, "big")
                x >>= 16
            states[i % LANES] = (x // freq << tables.bits) + x % freq + start
        words.reverse()
        coded = b"".join(x.to_bytes(4, "little") for x in states) + words
        out[: len(coded)] = coded
        return len(coded)

    @staticmethod
    def rans_decode(tables: RansTables, classes: Buffer, source: Buffer, into: Buffer) -> bool:
        """Rebuild ``into``; False when ``source`` is not what an encoder with these tables wrote.

        Raises:
            ValueError: no such class, or a target that cannot be written.
        """
        groups, data, out = (memoryview(each).cast("B") for each in (classes, source, into))
        if not len(groups) or max(groups) >= tables.classes:
            raise ValueError(f"classes are not below {tables.classes}")
        if len(data) < 4 * LANES:
            return False
        states = list(data[: 4 * LANES].cast("I"))
        at, mask = 4 * LANES, (1 << tables.bits) - 1
        for i in range(len(out)):
            table, x = groups[i % len(groups)], states[i % LANES]
            slot = x & mask
            out[i] = symbol = tables.slots[table][slot]
            freq, start = tables.coded[table][symbol]
            x = freq * (x >> tables.bits) + slot - start
            if x < LOW:
                if at + 2 > len(data):
                    return False
                x = x << 16 | int.from_bytes(data[at : at + 2], "little")
                at += 2
            states[i % LANES] = x & 0xFFFFFFFF
        return at == len(data) and states == [LOW] * LANES


if TYPE_CHECKING:
    RansTables, rans_bound = Reference.RansTables, Reference.rans_bound
    rans_encode, rans_decode = Reference.rans_encode, Reference.rans_decode
else:

    def __getattr__(name: str) -> Any:
        """Bind all names at the first use of one (PEP 562): all native, or none."""
        if name not in NAMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = {each: ops.extra(each) for each in NAMES}
        if None in found.values():
            found = {each: getattr(Reference, each) for each in NAMES}
        globals().update(found)
        return globals()[name]
