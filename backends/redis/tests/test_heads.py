"""What is taken for a head, and what is not."""

from lmcache_backend_redis.heads import HEAD_NBYTES, MOST_PARTS, Head


def test_damaged_head_is_no_head():
    good = Head(bytes(range(16)), 1000, 5432).encoded
    assert Head.read(good) == Head(bytes(range(16)), 1000, 5432)
    for at in range(HEAD_NBYTES):
        assert Head.read(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]) is None
    assert Head.read(good + b"x") is Head.read(good[:-1]) is Head.read(None) is None
    assert (
        Head.read(Head(bytes(16), 0, 5).encoded) is Head.read(Head(bytes(16), 5, 0).encoded) is None
    )


def test_forged_head_of_endless_parts_is_no_head():
    """Deleting what it names would never end."""
    assert Head.read(Head(bytes(16), 1, MOST_PARTS).encoded) is not None
    assert Head.read(Head(bytes(16), 1, MOST_PARTS + 1).encoded) is None
