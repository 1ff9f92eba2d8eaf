"""Reading of labelled data into checked examples.

`read_dataset` reads files, tables and lists. Nothing is repaired, guessed or dropped: one error names the
first few rows that cannot be used, so that a file is fixed once and not row by row. `split` holds a part
out, `split_folds` each of several parts in turn, and `fingerprint` tells whether two runs use the same data.

    input ─► tables: row sources ─► examples, one per row ─► LabelledDataset
"""

from bertie.training.finetune.data.dataset import (
    LabelledDataset,
    fingerprint,
    read_dataset,
    split,
    split_folds,
    warn_of_unseen,
)
from bertie.training.finetune.data.examples import Example
from bertie.training.finetune.data.tables import Kind

__all__ = [
    "Example",
    "Kind",
    "LabelledDataset",
    "fingerprint",
    "read_dataset",
    "split",
    "split_folds",
    "warn_of_unseen",
]
