"""The shared coder: the reference and the native part are one thing."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_core import codecs, ops
from lmcache_core.codecs import Reference


def frequencies(draw: random.Random, bits: int, alphabet: int) -> list[int]:
    """Of one class; symbols from ``alphabet`` on never come."""
    cuts = sorted(draw.sample(range(1, 1 << bits), alphabet - 1))
    table = [b - a for a, b in zip([0, *cuts], [*cuts, 1 << bits], strict=True)]
    return table + [0] * (256 - alphabet)


def case(seed: int, count: int, bits: int, classes: int) -> tuple[array[int], bytes, bytes]:
    """Tables, classes of a period, symbols."""
    draw = random.Random(seed)
    alphabet = draw.randrange(1, 1 << min(bits, 6))
    freqs = array("H")
    for _ in range(classes):
        freqs.extend(frequencies(draw, bits, alphabet))
    period = bytes(draw.randrange(classes) for _ in range(draw.choice((1, 7, 32, 96))))
    return freqs, period, bytes(draw.randrange(alphabet) for _ in range(count))


def encode(subject, freqs, bits, period, symbols):
    tables = subject.RansTables(freqs, bits)
    room = bytearray(subject.rans_bound(len(symbols), bits))
    return bytes(room[: subject.rans_encode(tables, period, symbols, room)])


def decode(subject, freqs, bits, period, coded, count):
    back = bytearray(count)
    good = subject.rans_decode(subject.RansTables(freqs, bits), period, coded, back)
    return good, bytes(back)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(0, 300), st.integers(1, 12), st.integers(1, 5))
def test_both_encode_alike_and_decode_each_other(seed, count, bits, classes):
    freqs, period, symbols = case(seed, count, bits, classes)
    coded = encode(Reference, freqs, bits, period, symbols)
    assert coded == encode(codecs, freqs, bits, period, symbols)
    for subject in (Reference, codecs):
        assert decode(subject, freqs, bits, period, coded, count) == (True, symbols)


def test_a_skewed_alphabet_takes_what_its_entropy_says():
    freqs = array("H", [4000, 90, 6] + [0] * 253)
    symbols = bytes(random.Random(1).choices((0, 1, 2), (4000, 90, 6), k=20000))
    assert len(encode(codecs, freqs, 12, b"\0", symbols)) < 128 + 20000 * 0.18 / 8


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_damage_is_false_or_other_symbols(data):
    freqs, period, symbols = case(3, 200, 9, 3)
    coded = bytearray(encode(codecs, freqs, 9, period, symbols))
    coded[data.draw(st.integers(0, len(coded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    coded = coded[: data.draw(st.integers(0, len(coded)))]
    answers = [decode(subject, freqs, 9, period, coded, 200) for subject in (Reference, codecs)]
    assert answers[0][0] == answers[1][0]
    assert not answers[0][0] or answers[0][1] != symbols


@pytest.mark.parametrize("subject", [Reference, codecs])
def test_what_makes_no_sense_is_refused(subject):
    freqs, period, symbols = case(3, 200, 9, 2)
    tables, room = subject.RansTables(freqs, 9), bytearray(1000)
    for wrong in (array("H", [1] * 256), array("H", [512] * 256), array("H"), freqs[:100]):
        with pytest.raises(ValueError, match="frequencies"):
            subject.RansTables(wrong, 9)
    with pytest.raises(ValueError, match=r"class"):
        subject.rans_encode(tables, b"\2", symbols, room)
    with pytest.raises(ValueError, match=r"class"):
        subject.rans_decode(tables, b"", room, bytearray(3))
    with pytest.raises(ValueError, match="may need"):
        subject.rans_encode(tables, period, symbols, room[:100])
    with pytest.raises(ValueError, match="not in its table"):
        subject.rans_encode(tables, period, b"\xff", room)


def test_the_native_coder_is_used_where_it_is_there():
    assert (codecs.rans_encode is Reference.rans_encode) == (ops.extra("rans_encode") is None)
    with pytest.raises(AttributeError, match="no attribute 'huffman'"):
        _ = codecs.huffman
