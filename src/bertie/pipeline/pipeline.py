"""The pipeline: texts -> encodings -> windows -> batches -> forward pass -> decoded results.

Offline calls pass an iterable, which is read in chunks. The windows of each chunk are packed into batches by a token
budget; chunks are tokenized in advance, and results are copied from a GPU asynchronously and returned in order. In a
server, an `executor` runs the forward pass instead, in batches shared by many requests. All other code is shared, so a
text has the same result either way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.pipeline.chunk import Chunk, WindowedText
from bertie.pipeline.inputs import Options, TaskInput
from bertie.pipeline.language_warnings import LanguageCounter, current_counter
from bertie.pipeline.outputs import Output, Outputs
from bertie.pipeline.reporting import report
from bertie.text.batch import Batch, pack
from bertie.text.encoding import Encoding, Encodings
from bertie.text.tokenizer import Tokenizer, checked_text
from bertie.text.windows import Window, sentence_windows, truncate, windows
from bertie.threads import use_one_thread_in_forks

Overflow = Literal["window", "error", "truncate"]
OVERFLOW = ("window", "error", "truncate")

CHUNK_ITEMS = 1024  # inputs per chunk, so that texts of similar length can share a batch
CHUNK_CHARACTERS = 1 << 20
CPU_BATCH_TOKENS = 8192  # at most; the activations of a layer should also fit into the cache:
CACHE_BYTES = 24 << 20
GPU_BATCH_TOKENS = 1 << 16  # smaller batches do not fill a GPU
TOKENIZER_THREADS = 2  # one calls the library, which uses all cores, while the other converts results to arrays

Result = TypeVar("Result")
Decoded = TypeVar("Decoded", covariant=True)
Item = TypeVar("Item")
Value = TypeVar("Value")


class Stages(Protocol[Options, Output, Decoded]):
    """The stages of the pipeline that a task implements."""

    head: str | None  # whose segments and global tokens the encoder uses; None: the plain encoder

    def encode_inputs(self, inputs: Sequence[TaskInput[Options]], tokenizer: Tokenizer) -> Encodings:
        """Tokenize inputs with the pipeline's tokenizer."""

    def parameters(self, chunk: Chunk[Options]) -> Sequence[Any] | None:
        """What `outputs` needs for each window besides its hidden states: small and serializable."""

    def outputs(self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[Any] | None) -> Sequence[Output]:
        """Compute the head's output for each window of a batch; `hidden` is (T, D)."""

    def output_costs(self, windows: Encodings, parameters: Sequence[Any] | None) -> Sequence[int] | None:
        """The cost of each window's outputs, as the number of tokens that take as long to encode; None: negligible."""

    def decode_chunk(self, chunk: Chunk[Options], outputs: Outputs[Output]) -> Iterable[Decoded]:
        """Decode the outputs of a chunk's windows into one result per input."""


class Executor(Protocol):
    """Runs the forward pass of many callers, such as the requests of a server."""

    def admit(self, characters: int) -> AbstractContextManager[None]:
        """A context for tokenizing this many characters; raises an error if they would be refused afterwards."""

    def compute(self, task: Any, windows: Encodings, parameters: Sequence[Any] | None) -> Sequence[Any]:
        """Compute the task's outputs for windows, given by their token ids and the parameters of each."""

    def check(self) -> None:
        """Raise an error if nobody is waiting for the result any more. Long computations call it periodically."""


class NonFiniteError(InputError):
    """The hidden states of a window are not finite."""

    def __init__(self, window: int) -> None:
        super().__init__(f"window {window}: the model's outputs are not finite")
        self.window = window


class Pipeline(Generic[Options, Output, Result]):
    """The pipeline of one task over one checkpoint.

    `overflow` applies to texts beyond the model's maximum length: "window" reads them in overlapping windows, "error"
    refuses them, "truncate" reads their beginning. With the compiled CPU encoder, a text's result does not depend on
    its batch. On a GPU its last bits may, because kernels are chosen by batch size; `deterministic` avoids that by
    running a separate forward pass for each window, which is slow.
    """

    executor: Executor | None = None  # None: the forward pass runs here
    counts_languages: bool = True  # whether texts that are not in a language of the model are warned about

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        task: Stages[Options, Output, Result],
        *,
        overflow: Overflow = "window",
        deterministic: bool = False,
        max_length: int | None = None,
    ) -> None:
        self.checkpoint, self.tokenizer, self.task = checkpoint, tokenizer, task
        self._max_length = max_length  # of a window; None: the checkpoint's
        self.overflow, self.deterministic = overflow, deterministic
        use_one_thread_in_forks()
        if deterministic:
            # A size is replayed from its eighth batch on, by other attention kernels: the last bits would change.
            checkpoint.model.replay = False

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of a window, special tokens included."""
        return self.checkpoint.max_length if self._max_length is None else self._max_length

    def chunks(self, inputs: Iterable[TaskInput[Options]], texts: object = None) -> Iterator[Iterable[Result]]:
        """Results in order, chunk by chunk, with a bounded number of inputs in memory.

        `texts` is the argument of the public call. If it has a length, on a GPU a chunk's results are copied while
        the next one runs; any other iterable is read lazily. Slow tokenizers prefetch in threads; fast ones would only
        keep the interpreter from launching kernels.
        """
        if self.executor is not None and isinstance(texts, list) and len(texts) <= CHUNK_ITEMS:  # a small request
            only = list(inputs)
            if only and sum(len(text) for task_input in only for text in task_input.texts) <= CHUNK_CHARACTERS:
                yield self._run_chunk(only)
                return
            inputs = only
        late = self._overlaps(texts)
        lists = split_chunks(inputs)
        threads = 0
        if late and (first := next(lists, None)) is not None:
            lists = chain([first], lists)
            threads = 0 if self.tokenizer.is_compiled([text for i in first for text in i.texts]) else TOKENIZER_THREADS
        pending: deque[tuple[Chunk[Options], Outputs[Output]]] = deque()
        for chunk in self._counted(prefetch(self.encode, lists, threads)):
            pending.append((chunk, self.forward(chunk)))
            if len(pending) > late:
                yield self.task.decode_chunk(*pending.popleft())
        for chunk, outputs in pending:
            yield self.task.decode_chunk(chunk, outputs)

    def _run_chunk(self, inputs: list[TaskInput[Options]]) -> Iterable[Result]:
        chunk = self.encode(inputs)
        counter = current_counter()
        if counter is None or not counter.silent:
            (chunk,) = self._counted([chunk])
        return self.task.decode_chunk(chunk, self.forward(chunk))

    def _counted(self, chunks: Iterable[Chunk[Options]], *, late: bool = True) -> Iterator[Chunk[Options]]:
        """Pass chunks through, and warn after the last one if some texts are not in a language of the model.

        `late`: leave the warning to the end of an enclosing call, if there is one.
        """
        outer = current_counter()
        counter = LanguageCounter() if outer is None else outer
        for chunk in chunks:
            if self.counts_languages:
                chunk.count_languages(counter)
            yield chunk
        if outer is None or not late:
            counter.warn()

    def _overlaps(self, texts: object) -> bool:
        """Whether a chunk's results are copied while the next one runs."""
        many = isinstance(texts, Sized) and len(texts) > CHUNK_ITEMS
        return many and self.executor is None and self.checkpoint.model.device.type != "cpu"

    def encode(self, inputs: Sequence[TaskInput[Options]]) -> Chunk[Options]:
        """Tokenize inputs and split them into windows."""
        if self.executor is None:
            return self._encode(inputs)
        with self.executor.admit(sum(len(text) for task_input in inputs for text in task_input.texts)):
            return self._encode(inputs)

    def _encode(self, inputs: Sequence[TaskInput[Options]]) -> Chunk[Options]:
        try:
            encodings = self.task.encode_inputs(inputs, self.tokenizer)
        except InputError:
            for task_input in inputs:
                for text in task_input.texts:
                    checked_text(text, task_input.name)
            raise
        coverage = self.tokenizer.coverage
        unknown, non_english = coverage.count_unknown(encodings), coverage.count_non_english(encodings)
        size, limit = inputs[0].window_size, self.max_length
        limit = 0 if size == "sentence" else min(limit, size or limit)
        return Chunk(inputs, encodings, limit, self.split, unknown, non_english)

    def check(self) -> None:
        """Raise an error if nobody is waiting for the result any more; long decoding calls it periodically."""
        if self.executor is not None:
            self.executor.check()

    def read(self, inputs: Iterable[TaskInput[Options]]) -> Iterator[WindowedText[Options]]:
        """Tokenize inputs and split them into windows, one by one, for training."""
        for chunk in self._counted(map(self.encode, split_chunks(inputs)), late=False):
            yield from chunk

    def split(self, task_input: TaskInput[Any], encoding: Encoding) -> list[Window]:
        """Split one input into windows according to `overflow`."""
        max_length = self.max_length
        if len(encoding) > max_length and self.overflow == "error":
            raise InputError(
                f"{task_input.name} has {len(encoding)} tokens, but the maximum length is {max_length}; shorten it, "
                "or pass overflow='window' to read it in windows or overflow='truncate' to read its beginning only"
            )
        size = task_input.window_size
        if size == "sentence":
            return sentence_windows(encoding, task_input.texts, max_length)
        if size is not None:
            return windows(encoding, task_input.texts, min(size, max_length))
        method = truncate if self.overflow == "truncate" else windows
        return method(encoding, task_input.texts, max_length)

    def forward(self, chunk: Chunk[Options]) -> Outputs[Output]:
        """Run the forward pass over all windows of a chunk, in batches of texts of similar length."""
        try:
            return self.compute(chunk.windows, self.task.parameters(chunk), len(chunk))
        except NonFiniteError as error:
            index = int(chunk.starts.searchsorted(error.window, side="right")) - 1
            raise InputError(f"{chunk.inputs[index].name}: the model's outputs are not finite") from None

    def compute(self, windows: Encodings, parameters: Sequence[Any] | None, texts: int = 0) -> Outputs[Output]:
        """Compute the task's outputs for windows, given by their token ids; report progress of `texts` texts."""
        task, model, count = self.task, self.checkpoint.model, len(windows.lengths)
        outputs: Outputs[Output] = Outputs(count)
        if self.executor is not None:
            outputs.add(range(count), self.executor.compute(task, windows, parameters))
            return outputs
        device = model.device
        with torch.inference_mode():
            for group in [[0]] if count == 1 else pack(windows.lengths, self.batch_tokens):
                batch = Batch.select(windows, group).to(device)
                own = None if parameters is None else [parameters[window] for window in group]
                outputs.add(group, task.outputs(model, model.hidden(batch, task.head), batch, own))
                report(len(group) * texts / count)
        return outputs

    @property
    def batch_tokens(self) -> int:
        """Token budget of a batch. A longer window forms a batch by itself."""
        model = self.checkpoint.model
        if self.deterministic:
            return 1
        if model.device.type != "cpu":
            return GPU_BATCH_TOKENS
        config = model.config
        return min(CPU_BATCH_TOKENS, CACHE_BYTES // (4 * config.ff_width * (2 if config.gated else 1)))


def split_chunks(inputs: Iterable[TaskInput[Options]]) -> Iterator[list[TaskInput[Options]]]:
    """Split inputs into lists of at most `CHUNK_ITEMS` items and about `CHUNK_CHARACTERS` characters."""
    chunk: list[TaskInput[Options]] = []
    size = 0
    for task_input in inputs:
        chunk.append(task_input)
        size += sum(map(len, task_input.texts))
        if len(chunk) >= CHUNK_ITEMS or size > CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def prefetch(call: Callable[[Item], Value], items: Iterable[Item], threads: int) -> Iterator[Value]:
    """Apply a function to items in order, prefetching results in this many threads; with 0, lazily.

    >>> list(prefetch(str.upper, ["a", "b", "c"], threads=2))
    ['A', 'B', 'C']
    """
    if not threads:
        yield from map(call, items)
        return
    waiting: deque[Future[Value]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(call, item))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
