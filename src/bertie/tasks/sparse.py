"""Sparse embeddings (SPLADE): one weight per entry of the vocabulary, most of them 0.

A term's weight is the maximum of log(1 + relu(logit)) over all tokens of a text, where the logits are those of the
masked-language-modelling head. The maximum over the windows of a long text is the maximum over its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertie.arguments import explain_arguments
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.splade import Splade
from bertie.errors import InputError
from bertie.nn.heads import Head
from bertie.nn.model import Model
from bertie.nn.row_blocks import TOKEN_ROWS, in_row_blocks
from bertie.pipeline.chunk import WindowedText
from bertie.pipeline.inputs import TaskInput, check_positive, text_inputs
from bertie.pipeline.language_warnings import one_warning
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.pipeline import Overflow
from bertie.recipe import Recipe
from bertie.tasks.prompts import choose_prompt
from bertie.tasks.results import SparseEmbeddingResult
from bertie.tasks.sparse_matrix import SparseMatrix
from bertie.tasks.trainable import Hyperparameters, Trainable
from bertie.text.batch import Batch
from bertie.text.encoding import Encodings

TermWeights = tuple[NDArray[np.int32], FloatArray]  # ids, ascending, and weights, above 0
LOGIT_ROWS = 256  # tokens whose logits over the vocabulary are held in memory


class SparseEmbedder(Trainable[int | None, TermWeights, SparseEmbeddingResult]):
    """Embeds texts as weighted terms with a SPLADE model: a folder of sentence-transformers' SparseEncoder.

    >>> embedder = SparseEmbedder.load("naver/splade-cocondenser-ensembledistil")             # doctest: +SKIP
    >>> embedder.embed("What do cats eat?", top_k=3).tokens                                  # doctest: +SKIP
    ('cats', 'eat', 'cat')

    Any checkpoint with a masked-language-modelling head can be used, but its embeddings are neither sparse nor good
    before training. `fit` takes the same data as `Embedder.fit`: matching texts, with or without hard negatives, or
    queries with passages and a teacher's scores. The loss, by default with in-batch negatives, is over dot products,
    plus SPLADE's FLOPS regularizer, which keeps embeddings sparse: `query_regularizer` and `document_regularizer` are
    its weights; larger values give fewer terms.

    >>> embedder = SparseEmbedder("path/to/any/masked-lm", epochs=1)                         # doctest: +SKIP
    >>> embedder.fit([("What do cats eat?", "Cats eat meat."), …]).save("my-splade")         # doctest: +SKIP
    """

    kind = "mlm"
    needs = "a masked-language-modelling head"

    def __init__(
        self,
        model: Checkpoint | str | Path | None = None,
        *,
        overflow: Overflow = "window",
        head: str | None = None,
        deterministic: bool = False,
        loss: Any = None,
        query_regularizer: float = 5e-5,
        document_regularizer: float = 3e-5,
        device: str | torch.device | None = None,
        **hyperparameters: Unpack[Hyperparameters],
    ) -> None:
        self.loss = loss  # a name, or a `bertie.training.embedding.losses.EmbeddingLoss`
        self.query_regularizer, self.document_regularizer = query_regularizer, document_regularizer
        options: dict[str, Any] = {"overflow": overflow, "head": head, "deterministic": deterministic}
        super().__init__(model, device=device, **options, **hyperparameters)
        self.recipe = self.recipe.replace(loss=loss if isinstance(loss, str) else None)

    @classmethod
    def from_recipe(cls, model: Checkpoint | str | Path | None, recipe: Recipe, **options: Any) -> Self:
        """An embedder with the hyperparameters of a recipe; `options` are the other arguments of the constructor."""
        values = recipe.as_dict()
        for name in ("matryoshka", "pooling"):
            if (value := values.pop(name)) is not None:
                raise InputError(f"{name}={value!r} is for dense embeddings; leave it out")
        return cls(model, **options, **values)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        own = {name: getattr(self, name) for name in ("loss", "query_regularizer", "document_regularizer")}
        return super().get_params(deep) | own

    @property
    def settings(self) -> Splade:
        """The checkpoint's prompts and text preprocessing."""
        return self.checkpoint.splade or Splade.create()

    @property
    def vocabulary_size(self) -> int:
        """The number of terms: the dimension of the embeddings, most of whose components are 0."""
        return self.model.config.vocab

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Save a folder that sentence-transformers loads as a SparseEncoder."""
        checkpoint = self.checkpoint
        if checkpoint.splade is None:  # another model's head: only what sparse embeddings need is written
            checkpoint = checkpoint.with_head("mlm")
            checkpoint.splade = Splade.create(self.checkpoint.max_length)
        checkpoint.save(folder, overwrite=overwrite)

    @overload
    def embed(  # type: ignore[overload-overlap]
        self,
        texts: str,
        *,
        top_k: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> SparseEmbeddingResult: ...
    @overload
    def embed(
        self,
        texts: Iterable[str],
        *,
        top_k: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> list[SparseEmbeddingResult]: ...
    @explain_arguments
    def embed(
        self,
        texts: Any,
        *,
        top_k: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        progress: bool | None = None,
    ) -> Any:
        """Embed texts as weighted terms, highest weight first; a single text returns a single result.

        `top_k` keeps the terms with the highest weights. `prompt` is prepended to each text; `prompt_name` selects one
        of the checkpoint's prompts instead. `encode` is an alias.
        """

        def each(items: Iterable[str]) -> Iterator[SparseEmbeddingResult]:
            return self.embed_each(items, top_k=top_k, prompt=prompt, prompt_name=prompt_name)

        return self.collect(texts, each, "embed", progress)

    encode = embed

    def embed_each(
        self,
        texts: Iterable[str],
        *,
        top_k: int | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
    ) -> Iterator[SparseEmbeddingResult]:
        """Like `embed`, but yield results one by one."""
        check_positive(top_k=top_k)
        return self.run(self.inputs(texts, top_k, self.prompt_text(prompt, prompt_name)), texts)

    def matrix(self, results: Sequence[SparseEmbeddingResult]) -> SparseMatrix:
        """The results of `embed` as one matrix in compressed sparse rows, (N, vocabulary_size)."""
        return SparseMatrix.from_results(results, self.vocabulary_size)

    @overload
    def similarity(self, a: str, b: str, *, progress: bool | None = None) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def similarity(
        self, a: str | Iterable[str], b: str | Iterable[str] | None = None, *, progress: bool | None = None
    ) -> FloatArray: ...
    @explain_arguments
    @one_warning()
    def similarity(self, a: Any, b: Any = None, *, progress: bool | None = None) -> Any:
        """(N, M) dot products of the texts `a` and the texts `b`, or of `a` with each other.

        A single text adds no axis: (M,) for one text and several, a float for two texts.
        """
        if isinstance(a, str) and b is None:
            raise InputError("similarity takes two texts, or a list of texts that are compared with each other")
        first = self.matrix(self.embed([a] if isinstance(a, str) else a, progress=progress))
        second = first if b is None else self.matrix(self.embed([b] if isinstance(b, str) else b, progress=progress))
        rows = first.dot(second)
        if isinstance(a, str):
            return float(rows[0, 0]) if isinstance(b, str) else rows[0]
        return rows[:, 0] if isinstance(b, str) else rows

    def inputs(self, texts: Iterable[str], top_k: int | None, prompt: str) -> Iterator[TaskInput[int | None]]:
        """Create inputs: texts with the prepended prompt, lower-cased if the checkpoint requires it."""
        inputs = text_inputs(texts, "embed", top_k)
        return (i._replace(texts=(self.prepare_text(prompt + i.texts[0]),)) for i in inputs)

    def prepare_text(self, text: str) -> str:
        """Lower-case a text if the checkpoint requires it."""
        return text.lower() if self.settings.lower_case else text

    def prompt_text(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """The prompt to prepend: `prompt`, the checkpoint's prompt named `prompt_name`, or its default prompt."""
        settings = self.settings
        return choose_prompt(prompt, prompt_name, prompts=settings.prompts, default=settings.default_prompt)

    # --- stages of the pipeline ---

    def output_costs(self, windows: Encodings, parameters: Sequence[None] | None) -> Sequence[int]:
        """The logits of a token over the vocabulary take about as long as reading it."""
        return [int(n) for n in windows.lengths]

    def outputs(
        self, model: Model, hidden: Tensor, batch: Batch, parameters: Sequence[None] | None
    ) -> Sequence[TermWeights]:
        """The terms of each window."""
        assert self.head is not None
        head, words = model.head(self.head), model.encoder.embeddings.words.weight
        return [_terms(_largest_logits(head, part, words)) for part in torch.split(hidden, list(batch.lengths))]

    def decode(self, text: WindowedText[int | None], outputs: Sequence[TermWeights]) -> SparseEmbeddingResult:
        """The maximum over windows, highest weight first."""
        ids, weights = outputs[0]
        if len(outputs) > 1:
            terms, index = np.unique(np.concatenate([ids for ids, _ in outputs]), return_inverse=True)
            largest = np.zeros(len(terms), np.float32)
            np.maximum.at(largest, index, np.concatenate([weights for _, weights in outputs]))
            ids, weights = terms, largest
        order = np.lexsort((ids, -weights))[: text.input.options]
        tokens = tuple(map(self._token, ids[order].tolist()))
        return SparseEmbeddingResult(ids[order], weights[order], tokens, **text.counts())

    def _token(self, id: int) -> str:
        if id not in self._tokens:
            known = id < self.tokenizer.vocab_size  # some models have more embeddings than their tokenizer has tokens
            self._tokens[id] = self.tokenizer.token(id) if known else f"[{id}]"
        return self._tokens[id]

    @cached_property
    def _tokens(self) -> dict[int, str]:
        """Tokens by id, filled as they occur."""
        return {}


def _largest_logits(head: Head, hidden: Tensor, words: Tensor) -> Tensor:
    """(n, D) -> (V,) the largest logit of each term over the tokens of one window."""
    blocks = [
        in_row_blocks(lambda rows: head.project(rows, words), block, TOKEN_ROWS).float().amax(0)
        for block in torch.split(hidden, LOGIT_ROWS)
    ]
    return blocks[0] if len(blocks) == 1 else torch.stack(blocks).amax(0)


def _terms(logits: Tensor) -> TermWeights:
    """(V,) -> the terms with positive weights. log(1 + relu(x)) is monotonic: it is applied to the maximum."""
    weights: FloatArray = logits.relu().log1p().cpu().numpy()
    ids = np.flatnonzero(weights)
    return ids.astype(np.int32), weights[ids]
