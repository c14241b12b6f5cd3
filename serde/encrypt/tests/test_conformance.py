"""The laws, with both ciphers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmcache_serde_encrypt import Encrypt, EncryptOptions

from lmcache_core.testing.serde import SerdeTests


class TestAESGCM(SerdeTests):
    deterministic = False
    cipher = "aes-256-gcm"

    @pytest.fixture(autouse=True)
    def _keys(self, tmp_path: Path) -> None:
        self.file = tmp_path / "keys"
        self.file.touch(0o600)
        self.file.write_text("ab" * 32 + "\n")
        self.serde = Encrypt(EncryptOptions(str(self.file), self.cipher))

    def make_serde(self) -> Any:
        return self.serde


class TestChaCha(TestAESGCM):
    cipher = "chacha20-poly1305"
