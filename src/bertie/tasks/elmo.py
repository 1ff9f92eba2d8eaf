"""ELMo: contextual word embeddings from AllenNLP's options.json and weights.hdf5.

Sentences are lists of words, or texts, which `bertie.text.characters.split_words` splits into words. Sentences are
independent: AllenNLP carries the LSTM state over from one batch to the next, so its embeddings depend on earlier
batches; here they equal those of a newly loaded model. There is no maximum length. Words of more than 48 bytes are
truncated, as the model requires (50 characters with two markers); `words_cut` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
import torch

from bertie.arguments import explain_arguments, missing_attribute
from bertie.checkpoints import elmo, storage
from bertie.checkpoints.checkpoint import usable_device
from bertie.errors import InputError
from bertie.nn.elmo import ElmoConfig, ElmoModel
from bertie.pipeline.inputs import check_list
from bertie.pipeline.outputs import FloatArray
from bertie.pipeline.reporting import length, report, show_progress
from bertie.tasks.display import Displayed, shorten
from bertie.text.batch import pack
from bertie.text.characters import character_ids, is_cut, split_words
from bertie.text.tokenizer import checked_text

BATCH_WORDS = 2048
CHUNK_WORDS = 16384  # words read before the first results are returned
BEGIN, END = "<S>", "</S>"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ElmoResult(Displayed):
    """The words of a sentence and their embeddings in every layer; the first layer is the character CNN.

    `offsets` are the start and end of each word in the text, or in the words joined by spaces. `tokens_total` and
    `tokens_read` count words; `words_cut` of them are truncated.
    """

    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]
    layers: FloatArray  # (layers, n, D): forward direction, then backward
    words_cut: int
    tokens_total: int
    tokens_read: int
    windows: int = 1

    @property
    def mean(self) -> FloatArray:
        """(n, D) the mean of the layers, from which a learned scalar mix starts."""
        mean: FloatArray = self.layers.mean(axis=0)
        return mean


class Sentence(NamedTuple):
    """A text, its words and their offsets."""

    text: str
    words: tuple[str, ...]
    offsets: tuple[tuple[int, int], ...]


class Elmo:
    """Contextual word embeddings of ELMo.

    >>> model = Elmo.load("folder with options.json and weights.hdf5")                       # doctest: +SKIP
    >>> model.embed_tokens(["Stick to your guns .".split()])[0].layers.shape                 # doctest: +SKIP
    (3, 5, 1024)
    """

    def __init__(self, model: ElmoModel, source: str = "") -> None:
        self.model, self.source = model, source

    def __getattr__(self, name: str) -> Any:
        raise missing_attribute(
            f"{type(self).__name__!r} object", name, [known for known in dir(type(self)) if known[0] != "_"]
        )

    @classmethod
    def load(
        cls,
        source: str | Path,
        weights: str | Path | None = None,
        *,
        device: str | torch.device | None = None,
    ) -> Self:
        """Load a folder with options.json and weights.hdf5 (or with names ending in these), or the two files.

        `device`: by default a GPU, if there is one.
        """
        model = elmo.read_elmo(source, weights)
        return cls(model, str(source)).to(device or ("cuda" if torch.cuda.is_available() else "cpu"))

    @classmethod
    def random(cls, config: ElmoConfig | None = None, *, seed: int = 0) -> Self:
        """A model with random weights, for tests and as an untrained baseline."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ElmoModel(config or ElmoConfig())
        return cls(model.requires_grad_(False).eval(), "random")

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Write options.json and weights.hdf5, which AllenNLP can read."""
        storage.save_folder(Path(folder), elmo.files_of(self.model), {}, overwrite=overwrite)

    @property
    def config(self) -> ElmoConfig:
        """The configuration of the model."""
        return self.model.cfg

    @property
    def dimension(self) -> int:
        """Dimension of a word embedding in one layer, both directions included."""
        return self.config.dimension

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.model.device

    def to(self, device: str | torch.device) -> Self:
        """Move the model to a device, in place."""
        self.model.to(usable_device(device))
        return self

    def __repr__(self) -> str:
        cfg = self.config
        return (
            f"{type(self).__name__}(model={shorten(self.source)}, layers={cfg.layers + 1}, "
            f"dimension={cfg.dimension}, device={str(self.device)!r})"
        )

    @overload
    def embed_tokens(  # type: ignore[overload-overlap]
        self, sentences: str, *, progress: bool | None = None
    ) -> ElmoResult: ...
    @overload
    def embed_tokens(
        self, sentences: Iterable[str | Sequence[str]], *, progress: bool | None = None
    ) -> list[ElmoResult]: ...
    @explain_arguments
    def embed_tokens(self, sentences: Any, *, progress: bool | None = None) -> Any:
        """Embed every word of each sentence, in all layers; a single text returns a single result.

        A sentence is a list of words, or a text, which is split into words and punctuation marks
        (`bertie.text.characters.split_words`). For another tokenization, pass the words: `text.split()` for
        text that is already tokenized.
        `progress`: whether to show a progress bar; None: on a terminal or in a notebook.
        """
        single = isinstance(sentences, str)
        items = [sentences] if single else sentences
        with show_progress("embed", length(items), progress, "sentences"):
            results = list(self.embed_each(items))
        return results[0] if single else results

    def embed_each(self, sentences: Iterable[str | Sequence[str]]) -> Iterator[ElmoResult]:
        """Like `embed_tokens`, but yield results one by one."""
        for chunk in read_sentences(sentences, "embed_tokens"):
            yield from self._embed(chunk)

    def _embed(self, sentences: Sequence[Sentence]) -> Iterator[ElmoResult]:
        limit = self.config.max_characters
        for sentence, layers in zip(sentences, self.layers([s.words for s in sentences]), strict=True):
            count, cut = len(sentence.words), sum(is_cut(word, limit) for word in sentence.words)
            yield ElmoResult(sentence.words, sentence.offsets, layers, cut, count, count)

    def layers(self, sentences: Sequence[Sequence[str]]) -> list[FloatArray]:
        """(layers, n, D) of each sentence, a list of words."""
        results = [np.zeros((self.config.layers + 1, 0, self.dimension), np.float32)] * len(sentences)
        used = [i for i, words in enumerate(sentences) if words]
        report(len(sentences) - len(used))
        lengths = [len(sentences[i]) + 2 for i in used]
        for group in pack(lengths, BATCH_WORDS) if used else ():
            batch = [sentences[used[i]] for i in group]
            for i, layers in zip(group, self._forward(batch), strict=True):
                results[used[i]] = layers
            report(len(group))
        return results

    @torch.inference_mode()
    def _forward(self, sentences: Sequence[Sequence[str]]) -> Iterator[FloatArray]:
        """Embed one flat batch. Sentence boundary tokens are added, and left out of the results."""
        flat = [word for words in sentences for word in (BEGIN, *words, END)]
        vocabulary = {word: i for i, word in enumerate(dict.fromkeys(flat))}
        ids = torch.from_numpy(character_ids(vocabulary, self.config.max_characters)).to(self.device)
        words = torch.tensor([vocabulary[word] for word in flat], device=self.device)
        lengths = [len(words) + 2 for words in sentences]
        out = self.model(ids, words, lengths).float().cpu().numpy()
        ends = np.cumsum(lengths)
        return (out[:, end - n + 1 : end - 1].copy() for n, end in zip(lengths, ends, strict=True))


def read_sentences(items: Any, caller: str) -> Iterator[list[Sentence]]:
    """Check sentences, and split those that are texts into words; in chunks of about CHUNK_WORDS."""
    chunk: list[Sentence] = []
    words = 0
    for number, item in enumerate(check_list(items, caller, "texts or lists of words")):
        chunk.append(_read_sentence(item, f"text {number}"))
        words += len(chunk[-1].words)
        if words >= CHUNK_WORDS:
            yield chunk
            chunk, words = [], 0
    if chunk:
        yield chunk


def _read_sentence(item: Any, name: str) -> Sentence:
    if isinstance(item, str):
        text = checked_text(item, name)
        spans = split_words(text)
        return Sentence(text, tuple(text[start:end] for start, end in spans), tuple(spans))
    if hasattr(item, "tolist"):
        item = item.tolist()  # a numpy array
    if not isinstance(item, list | tuple):
        raise InputError(f"{name} must be a text or a list of words, not {type(item).__name__}")
    words = tuple(checked_text(word, f"{name}, word {i}") for i, word in enumerate(item))
    ends = np.cumsum([len(word) + 1 for word in words]).tolist()
    offsets = tuple((end - 1 - len(word), end - 1) for word, end in zip(words, ends, strict=True))
    return Sentence(" ".join(words), words, offsets)
