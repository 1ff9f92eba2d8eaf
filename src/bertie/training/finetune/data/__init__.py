"""Labelled data in, checked examples out.

`labelled` reads files, tables and lists. Nothing is repaired, guessed or left out: rows that cannot be learned from are
named, the first few of them in one error, so that a file is mended once and not row by row. `split` holds a part out,
and `fingerprint` tells whether two runs have the same data.

    what was given ─► tables: pieces of rows ─► examples, one a row ─► Labelled
"""

from bertie.training.finetune.data.dataset import Labelled, fingerprint, labelled, split
from bertie.training.finetune.data.examples import Example
from bertie.training.finetune.data.tables import Kind

__all__ = ["Example", "Kind", "Labelled", "fingerprint", "labelled", "split"]
