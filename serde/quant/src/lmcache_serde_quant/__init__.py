"""The serde ``quant``: keys and values in 8, 4 and 3 bits."""

from lmcache_serde_quant.config import MODES, QuantOptions
from lmcache_serde_quant.serde import Quant

__all__ = ["MODES", "Quant", "QuantOptions"]
