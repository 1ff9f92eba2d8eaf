"""All exceptions that Bertie raises.

    BertieError                  the base class of all of them
    ├── ConfigError              an invalid, contradictory or unsupported configuration
    ├── CheckpointError          files that cannot be read as a checkpoint, or weights that do not fit it
    ├── InputError               invalid texts, token ids or batches
    ├── NotFoundError            a model, file or head that does not exist
    ├── ExistsError              a file or folder that exists and would be overwritten
    ├── TrainingError            a run that cannot continue: non-finite loss, out of memory, disk full
    ├── ExportError              an exported model that does not compute what its source does
    └── MissingPackageError      an optional package is missing; the message has the install command

A message names the field, the value and what is allowed.
"""


class BertieError(Exception):
    """The base class of all exceptions that Bertie raises."""


class BertieWarning(UserWarning):
    """The base class of all warnings: something works, but perhaps not as intended."""


class UnknownTokenWarning(BertieWarning):
    """Texts that a model's vocabulary does not cover, such as texts in another script."""


class NonEnglishWarning(BertieWarning):
    """Texts that do not seem to be in English, for a model with an English vocabulary."""


class ConfigError(BertieError, ValueError):
    """An invalid, contradictory or unsupported configuration."""


class CheckpointError(BertieError):
    """Files that cannot be read as a checkpoint, or weights that do not fit it."""


class InputError(BertieError, ValueError):
    """Invalid texts, token ids or batches."""


class NotFoundError(BertieError, LookupError):
    """A model, file or head that does not exist."""


class ExistsError(BertieError, FileExistsError):
    """A file or folder that exists and would be overwritten."""


class TrainingError(BertieError, RuntimeError):
    """A run that cannot continue: non-finite loss, out of memory, disk full. The last saved state is intact."""


class ExportError(BertieError, RuntimeError):
    """An exported model that does not compute what its source does. Its files are not kept."""


class MissingPackageError(BertieError, ImportError):
    """An optional package is missing; the message has the install command."""
