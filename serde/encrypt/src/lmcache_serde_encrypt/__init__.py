"""Serde that encrypts values: ``encrypt``."""

from lmcache_serde_encrypt.serde import Encrypt, EncryptOptions

__all__ = ["Encrypt", "EncryptOptions"]
