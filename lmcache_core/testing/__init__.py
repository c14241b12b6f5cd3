"""The conformance kit: laws as tests, fakes that obey them, and a world that is deterministic.

Needs pytest and hypothesis (extra ``testing``) for the law classes; the simulation and the contexts need neither.
"""
