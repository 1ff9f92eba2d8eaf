"""The base class of tasks: a checkpoint, one of its heads, and the pipeline from texts to results."""

from __future__ import annotations

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, get_args

import torch
from torch import Tensor

from bertie.arguments import ATTRIBUTE_HINTS, explain_arguments, explain_options, missing_attribute
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.hub import default_model
from bertie.checkpoints.upload import push_folder
from bertie.config import PAIR_LABELS, HeadInfo, HeadName
from bertie.errors import InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import Options, TaskInput
from bertie.pipeline.outputs import Output, Outputs
from bertie.pipeline.pipeline import OVERFLOW, Overflow, Pipeline
from bertie.pipeline.reporting import length, show_progress
from bertie.tasks.display import html_table, shorten
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings
from bertie.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from bertie.tasks.attention import AttentionResult, HiddenStatesResult

Result = TypeVar("Result")


class TaskType(ABCMeta):
    """The metaclass of tasks: class methods of other libraries raise errors that suggest what to use."""

    def __getattr__(cls, name: str) -> Any:
        raise missing_attribute(f"type object {cls.__name__!r}", name)


class Task(ABC, Generic[Options, Output, Result], metaclass=TaskType):
    """A checkpoint used for one task.

    `overflow` applies to texts beyond the model's maximum length: "window" reads them in overlapping windows (each task
    documents how it combines them), "error" refuses them, "truncate" reads their beginning. `deterministic` runs a
    separate forward pass for each window: on a GPU, the last bits of a result may otherwise depend on the batch.
    """

    kind: ClassVar[HeadName | None] = None  # of the head; None: the task needs none
    needs: ClassVar[str] = "a head for its task"
    needs_offsets: bool = False  # whether decoding needs character offsets of every text
    checkpoint: Checkpoint
    model: Model
    tokenizer: Tokenizer
    head: str | None  # name of the head in the model
    pipeline: Pipeline[Options, Output, Result]

    @explain_arguments
    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        deterministic: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self._set_options(overflow, deterministic)
        if not isinstance(model, Checkpoint):
            model, head = self._load_checkpoint(model, head, {} if device is None else {"device": device})
        elif device is not None:
            model.to(device)
        self._use(model, head)

    def __getattr__(self, name: str) -> Any:
        known = () if name.startswith("_") else [known for known in dir(type(self)) if not known.startswith("_")]
        raise missing_attribute(f"{type(self).__name__!r} object", name, known)

    def __setattr__(self, name: str, value: object) -> None:
        if name in ATTRIBUTE_HINTS:  # `model.max_seq_length = 128` would have no effect
            raise missing_attribute(f"{type(self).__name__!r} object", name)
        super().__setattr__(name, value)

    def _set_options(self, overflow: Overflow, deterministic: bool) -> None:
        if overflow not in OVERFLOW:
            raise InputError(f"overflow={overflow!r} must be one of {', '.join(OVERFLOW)}")
        self.overflow, self.deterministic = overflow, deterministic

    def _use(self, checkpoint: Checkpoint, head: str | None) -> None:
        """Set the checkpoint and the head."""
        self._set_checkpoint(checkpoint, None if self.kind is None else self._find_head(checkpoint, head))

    def _set_checkpoint(self, checkpoint: Checkpoint, head: str | None) -> None:
        if checkpoint.tokenizer is None:
            raise NotFoundError(f"{checkpoint.source} has no tokenizer, which is needed to read texts")
        self.head = head
        self.checkpoint, self.model, self.tokenizer = checkpoint, checkpoint.model, checkpoint.tokenizer
        self.pipeline = Pipeline(
            checkpoint, self.tokenizer, self, overflow=self.overflow, deterministic=self.deterministic
        )

    @classmethod
    def _fits(cls, info: HeadInfo) -> bool:
        """Whether a head is for this task."""
        return info.kind == cls.kind

    @classmethod
    def _is_default(cls, info: HeadInfo) -> bool:
        """Whether a matching head may be chosen by default if several match."""
        return True

    @classmethod
    def _find_head(cls, checkpoint: Checkpoint, name: str | None) -> str:
        """The head with this name, or the only matching one; of several, the only one that may be a default."""
        fitting = [head for head, info in checkpoint.heads.items() if cls._fits(info)]
        defaults = [head for head in fitting if cls._is_default(checkpoint.heads[head])]
        if name is None and cls.kind in fitting:
            name = cls.kind
        for choice in (fitting, defaults):
            if name is None and len(choice) == 1:
                name = choice[0]
        if name is None and len(fitting) > 1:
            raise InputError(
                f"{checkpoint.source} has several heads for this; pass head= with one of {', '.join(fitting)}"
            )
        if name is None:
            assert cls.kind is not None
            name = cls.kind
        if name not in checkpoint.model.heads and checkpoint.spec.family.decoder:
            raise NotFoundError(
                f"{checkpoint.source} is a {checkpoint.spec.family.model_type} model, which Bertie uses for embeddings "
                f"only (bertie.Embedder): it has no head for {cls.__name__}, and text generation is not implemented"
            )
        if name not in checkpoint.model.heads:
            have = ", ".join(checkpoint.model.heads) or "none"
            train = f"; train one with bertie.{cls.__name__}(…).fit or bertie train" if hasattr(cls, "fit") else ""
            raise NotFoundError(f"{checkpoint.source} has no head {name!r}; it has: {have}{train}")
        if name not in fitting:
            info = checkpoint.heads[name]
            raise InputError(
                f"{cls.__name__} needs {cls.needs}; the head {name!r} of {checkpoint.source} is for "
                f"{info.task or info.kind}, with {len(info.labels)} labels"
            )
        return name

    @property
    def info(self) -> HeadInfo:
        """The head's labels, problem type and calibration."""
        assert self.head is not None
        return self.checkpoint.heads[self.head]

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device, in place: "cpu", "cuda", "cuda:1", "mps". Other tasks that share it move too."""
        self.checkpoint.to(device)
        return self

    def _facts(self) -> dict[str, object]:
        """What `repr` shows, without loading the model."""
        info = {} if self.head is None else {"head": self.head, "labels": list(self.info.labels.values())}
        return {"model": self.checkpoint.source, **info, **self.checkpoint.facts()}

    def __repr__(self) -> str:
        facts = [(name, value) for name, value in self._facts().items() if value not in (None, [])]
        return f"{type(self).__name__}({', '.join(f'{name}={shorten(value)}' for name, value in facts)})"

    def _repr_html_(self) -> str:
        return html_table(type(self).__name__, self._facts())

    @classmethod
    @explain_options(Checkpoint.load)
    def load(
        cls,
        name: str | Path | None = None,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        deterministic: bool = False,
        **options: Any,
    ) -> Self:
        """Load a checkpoint, by default the built-in model; `options` are passed to `Checkpoint.load`.

        `head` selects one of several heads by name; or it is the kind of the only head, if config.json does not
        declare it.
        """
        checkpoint, head = cls._load_checkpoint(name, head, options)
        return cls(checkpoint, overflow=overflow, head=head, deterministic=deterministic)

    @staticmethod
    def _load_checkpoint(
        name: str | Path | None, head: str | None, options: dict[str, Any]
    ) -> tuple[Checkpoint, str | None]:
        """The checkpoint, and the name of the head if `head` is a name and not a kind."""
        name = default_model() if name is None else name
        if head in get_args(HeadName):
            checkpoint = Checkpoint.load(name, head=head, **options)  # type: ignore[arg-type]
            return checkpoint, head if head in PAIR_LABELS else None  # a classifier's head may be of another kind
        return Checkpoint.load(name, **options), head

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save the checkpoint."""
        self.checkpoint.save(folder, overwrite=overwrite)

    def push_to_hub(
        self,
        repository: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        message: str = "Upload model",
    ) -> str:
        """Save the checkpoint and upload it to a repository (owner/name) of the Hugging Face hub; return its address.

        `token`: by default that of `hf auth login`. `bertie push` uploads a folder with its model card and report.
        """
        with TemporaryDirectory(prefix="bertie-") as folder:
            self.save(Path(folder) / "model")
            return push_folder(
                Path(folder) / "model", repository, private=private, token=token, revision=revision, message=message
            )

    def run(self, inputs: Iterable[TaskInput[Options]], texts: object = None) -> Iterator[Result]:
        """Yield results one by one, in order; see `Pipeline.chunks`."""
        return chain.from_iterable(self.pipeline.chunks(inputs, texts))

    def collect(
        self,
        items: Any,
        each: Callable[[Any], Iterator[Any]],
        label: str,
        progress: bool | None,
        *,
        total: int | None = None,
        unit: str = "texts",
    ) -> Any:
        """Collect the results of `each` in a list, with a progress bar; a single text returns a single result.

        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """
        single = isinstance(items, str)
        if single:
            items = [items]
        with show_progress(label, length(items) if total is None else total, progress, unit):
            results = list(each(items))
        return results[0] if single else results

    # --- inspecting the encoder ---

    def attention(self, text: str, *, layer: int | None = None, head: int | None = None) -> AttentionResult:
        """The attention weights of one layer (by default the last), of one head or averaged over all.

        Layers and heads are counted from 0. The text must fit into the model's maximum length.
        """
        from bertie.tasks.attention import attention_weights

        return attention_weights(self.checkpoint, text, layer=layer, head=head)

    def hidden_states(self, text: str) -> HiddenStatesResult:
        """The hidden states of every token after every layer, (layers + 1, n, D), the input embeddings first.

        The text must fit into the model's maximum length; `Embedder.token_embeddings` reads longer ones.
        """
        from bertie.tasks.attention import hidden_states

        return hidden_states(self.checkpoint, text)

    # --- the task's stages of the pipeline ---

    def encode_inputs(self, inputs: Sequence[TaskInput[Options]], tokenizer: Tokenizer) -> Encodings:
        """Tokenize inputs with the pipeline's tokenizer."""
        return tokenizer.encode_flat([i.item for i in inputs], offsets=self.needs_offsets)

    def parameters(self, chunk: Chunk[Options]) -> Sequence[Any] | None:
        """What `outputs` needs for each window besides its hidden states; None: nothing."""
        return None

    def output_costs(self, windows: Encodings, parameters: Sequence[Any] | None) -> Sequence[int] | None:
        """The cost of each window's outputs, as the number of tokens that take as long to encode; None: negligible."""
        return None

    @abstractmethod
    def outputs(self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[Any] | None) -> Sequence[Output]:
        """Compute the head's output for each window of a batch; `hidden` is (T, D)."""

    @abstractmethod
    def decode(self, text: WindowedText[Options], outputs: Sequence[Output]) -> Result:
        """Combine the outputs of one input's windows into its result."""

    def decode_chunk(self, chunk: Chunk[Options], outputs: Outputs[Output]) -> Iterable[Result]:
        """Decode all inputs of a chunk."""
        rows, results = outputs.collect(), list[Result]()
        for text, (start, end) in zip(chunk, pairwise(chunk.starts.tolist()), strict=True):
            self.pipeline.check()
            results.append(self.decode(text, rows[start:end]))
        return results

    def head_outputs(self, model: Model, hidden: Tensor, batch: Batch) -> Tensor:
        """The outputs of the task's head: one row per token or one row per text."""
        assert self.head is not None
        out: Tensor = model.head(self.head)(hidden, batch, model.encoder.embeddings.words.weight)
        return out.float()


def refuse_other_embeddings(checkpoint: Checkpoint) -> None:
    """Refuse to pool a model that was trained for sparse or token embeddings: dense ones would be meaningless."""
    if checkpoint.splade is not None:
        raise InputError(f"{checkpoint.source} is a SPLADE model, with sparse embeddings: use bertie.SparseEmbedder")
    if checkpoint.late_interaction is not None:
        raise InputError(
            f"{checkpoint.source} is a late-interaction (ColBERT) model, with one embedding per token: use "
            "bertie.LateInteraction"
        )
