"""Operations with several implementations, and the table that chooses between them (dispatch.py)."""

from bertie.ops.attention import attend
from bertie.ops.contracts import Relative
from bertie.switches import disable

__all__ = ["Relative", "attend", "disable"]
