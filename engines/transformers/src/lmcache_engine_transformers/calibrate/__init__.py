"""Tables of codecs for one model: ``lmcache calibrate MODEL``."""
