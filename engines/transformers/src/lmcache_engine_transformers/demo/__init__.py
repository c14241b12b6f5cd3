"""``lmcache demo``: what a cache does for one model, one document and three questions, measured here and now."""
