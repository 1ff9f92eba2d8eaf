"""How attention is executed. `attend` is the only door; the model code reads the same whichever path runs."""

from bertie.ops.attention import Relative, attend

__all__ = ["Relative", "attend"]
