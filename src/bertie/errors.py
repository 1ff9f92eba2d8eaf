"""Every error that Bertie raises on purpose.

    BertieError                  catch this one to catch them all
    ├── ConfigError              a configuration that contradicts itself or asks for what is not supported
    ├── CheckpointError          files that cannot be read as a checkpoint, or weights that do not fit it
    ├── InputError               texts, ids or batches that the model cannot take
    ├── NotFoundError            a model, file or head that is not there
    ├── ExistsError              a file or folder that is there and would be overwritten
    ├── TrainingError            a run that cannot go on: no finite loss, no memory, no room on the disk
    └── MissingPackageError      an optional package is needed; the message holds the line that installs it

A message names the field, the value and what is allowed.
"""


class BertieError(Exception):
    """The root of all errors that Bertie raises on purpose."""


class ConfigError(BertieError, ValueError):
    """A configuration that contradicts itself or asks for what is not supported."""


class CheckpointError(BertieError):
    """Files that cannot be read as a checkpoint, or weights that do not fit it."""


class InputError(BertieError, ValueError):
    """Texts, ids or batches that the model cannot take."""


class NotFoundError(BertieError, LookupError):
    """A model, file or head that is not there."""


class ExistsError(BertieError, FileExistsError):
    """A file or folder that is there and would be overwritten."""


class TrainingError(BertieError, RuntimeError):
    """A run that cannot go on: no finite loss, no memory, no room on the disk. The last saved state is whole."""


class MissingPackageError(BertieError, ImportError):
    """An optional package is needed; the message holds the line that installs it."""
