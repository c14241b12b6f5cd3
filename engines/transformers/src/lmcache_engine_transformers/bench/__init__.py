"""Bench for encodings of key/value memory: ``lmcache bench serde MODEL``."""
