"""Nothing moves, nothing is read by others, keys change without loss."""

from __future__ import annotations

import logging
import random

import pytest
from lmcache_serde_encrypt import Encrypt, EncryptOptions
from lmcache_serde_encrypt.serde import OVERHEAD

from lmcache_core.spi import ConfigError, Corrupt, Key, ValueInfo
from lmcache_core.testing.serde import kv_spec

KEYS = ["0f" * 32, "a5" * 32]
SECRET = bytes(range(200)) * 10


@pytest.fixture
def serde(tmp_path):
    """Makes one with these lines in its key file."""

    def make(*lines, **options):
        file = tmp_path / f"keys{len([*tmp_path.iterdir()])}"
        file.touch(0o600)
        file.write_text("\n".join(lines) + "\n\n")
        return Encrypt(EncryptOptions(str(file), **options))

    return make


def info(space=1, digest=2, group=0, layer=0):
    return ValueInfo(Key(bytes([space]) * 32, bytes([digest]) * 32, group), kv_spec(layer=layer))


def encrypted(serde, info, data=SECRET):
    into = bytearray(serde.bound(len(data)))
    assert serde.encode(info, memoryview(data), memoryview(into)) == len(into)
    return bytes(into)


def decrypted(serde, info, data):
    into = bytearray(len(data) - OVERHEAD)
    serde.decode(info, memoryview(data), memoryview(into))
    return bytes(into)


def test_nothing_of_the_plain_bytes_is_left_and_no_two_are_alike(serde):
    it = serde(KEYS[0])
    one, two = encrypted(it, info()), encrypted(it, info())
    assert one != two
    assert SECRET[:16] not in one
    assert decrypted(it, info(), one) == decrypted(it, info(), two) == SECRET


@pytest.mark.parametrize("change", [{"space": 9}, {"digest": 9}, {"group": 1}, {"layer": 1}])
def test_what_was_moved_to_another_place_is_refused(serde, change):
    it = serde(KEYS[0])
    with pytest.raises(Corrupt, match="for this place"):
        decrypted(it, info(**change), encrypted(it, info()))


def test_any_flipped_bit_is_refused(serde):
    it, draw = serde(KEYS[0]), random.Random(1)
    good = encrypted(it, info(), SECRET[:50])
    for _ in range(2000):
        bad = bytearray(good)
        bad[draw.randrange(len(bad))] ^= 1 << draw.randrange(8)
        with pytest.raises(Corrupt, match="cannot be decrypted"):
            decrypted(it, info(), bytes(bad))


def test_a_new_key_in_front_encrypts_and_the_old_one_still_reads(serde):
    old, both, new = serde(KEYS[0]), serde(KEYS[1], KEYS[0]), serde(KEYS[1])
    before, after = encrypted(old, info()), encrypted(both, info())
    assert decrypted(both, info(), before) == decrypted(new, info(), after) == SECRET
    with pytest.raises(Corrupt, match="is not in the key file"):
        decrypted(new, info(), before)


def test_either_cipher_reads_the_other(serde):
    aes, chacha = serde(KEYS[0]), serde(KEYS[0], cipher="chacha20-poly1305")
    assert decrypted(aes, info(), encrypted(chacha, info())) == SECRET
    assert decrypted(chacha, info(), encrypted(aes, info())) == SECRET


def test_more_spaces_than_are_remembered_are_served(serde):
    it = serde(KEYS[0])
    data = {
        n: encrypted(it, ValueInfo(Key(n.to_bytes(32), bytes(32)), kv_spec()), b"x")
        for n in range(1100)
    }
    for n in (0, 500, 1099):
        assert decrypted(it, ValueInfo(Key(n.to_bytes(32), bytes(32)), kv_spec()), data[n]) == b"x"


def test_a_key_file_that_others_may_read_is_refused(serde, tmp_path):
    file = tmp_path / "open"
    file.write_text(KEYS[0])
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Encrypt(EncryptOptions(str(file)))
    with pytest.raises(ConfigError, match="No such file"):
        Encrypt(EncryptOptions(str(tmp_path / "none")))


@pytest.mark.parametrize("line", ["zz" * 32, "ab" * 31, ""])
def test_what_is_no_key_is_refused_and_not_quoted(serde, line):
    with pytest.raises(ConfigError) as caught:
        serde(*([KEYS[0], line] if line else [line]))
    for secret in (line, KEYS[0]):
        assert not secret or secret not in str(caught.value)


def test_no_secret_is_printed(serde, caplog):
    caplog.set_level(logging.DEBUG)
    it = serde(KEYS[0])
    encrypted(it, info())
    for text in (repr(it), repr(vars(it)), repr(it._first), caplog.text):
        assert KEYS[0] not in text
        assert bytes.fromhex(KEYS[0]).hex(" ") not in text


def test_no_other_cipher_is_known():
    with pytest.raises(ConfigError, match="no cipher 'rot13': aes-256-gcm or chacha20-poly1305"):
        EncryptOptions("keys", cipher="rot13")
