"""Pretraining speed compared with transformers, on the same text and the same machine.

    python -m benchmarks.pretrain [--corpus DIR --tokenizer DIR] [--parts kernels,mlm,deberta,rtd] [--json FILE]

`mlm` is BERT-base with random weights and 15% masked tokens. Bertie runs as in `bertie pretrain`: `Trainer` with a
`MaskedLMSampler`, which packs, masks and collates during the run. transformers runs in its best configuration: bf16
autocast, sdpa, fused AdamW, with batches masked and moved to the device beforehand; in blocks of 512 tokens across
documents, as in its run_mlm.py; the same with torch.compile; and one text per row, sorted by length. Each is tried at
several batch sizes, and the best size of each is measured again, interleaved.

`deberta` is the same for DeBERTa-v3-base, against transformers with one text per row.

`rtd` is replaced-token detection with DeBERTa-v3-base and a generator of half its depth, in eager mode on both sides.
`kernels` times the fused operations between matrix multiplications against unfused ones, and reports their difference.

Speed is in tokens of the text; padding does not count. "TF" is the number of operations that the model needs (see
bertie.training.mfu), with logits for masked tokens only, whatever is actually computed; "TF 6N" is six operations per
weight of the blocks. The share is TF divided by the measured throughput of a large matrix multiplication. Without a
corpus, texts are random ids with realistic lengths (mean 117, up to 510).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from bertie.config import Disentangled, EmbeddingConfig, EncoderConfig, Full, HeadConfig, Learned, NormConfig
from bertie.errors import InputError
from bertie.nn.model import Model
from bertie.ops import disable
from bertie.ops.torch import eager
from bertie.ops.triton import activation, cross_entropy, norm
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.loop import Trainer
from bertie.training.mfu import flops_per_token, peak_flops
from bertie.training.pretrain.corpus import Corpus
from bertie.training.pretrain.masking import Masking
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.pretrain.replaced_tokens import ReplacedTokenDetection
from bertie.training.pretrain.run import PREFETCH_WORKERS
from bertie.training.pretrain.samplers import MaskedLMSampler

HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if HERE.type == "cuda" else torch.float32
SPARE = 64  # tokens below a round number: a recorded batch has a little room
RATE = 0.15


@dataclass(frozen=True)
class Shape:
    """The sizes of the models."""

    width: int = 768
    depth: int = 12
    heads: int = 12
    vocab: int = 30522
    rtd_vocab: int = 128100
    max_length: int = 512
    dropout: float = 0.1


TINY = Shape(width=16, depth=2, heads=2, rtd_vocab=30522, max_length=32)


class Generated:
    """A corpus of random ids, with the interface that `PackedCorpus` needs. Ids 0 to 4 are special."""

    def __init__(self, vocab: int, tokens: int, seed: int = 0) -> None:
        draw = np.random.default_rng(seed)
        mean = 117  # 87 in the middle
        found = np.exp(draw.normal(math.log(87), 0.77, max(8, tokens // mean))).astype(np.int64)
        self.lengths = found.clip(4, 510)
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        self._ids = draw.integers(5, vocab, int(self._starts[-1]))
        self.folder, self.cls_id, self.sep_id = Path("generated"), 1, 2
        self.about: dict[str, Any] = {"tokenizer": {"special": [0, 1, 2, 3, 4]}}
        self.tokens = int(self._starts[-1])

    def __len__(self) -> int:
        return len(self.lengths)

    def gather(self, documents: Any, starts: Any, sizes: Any) -> tuple[Any, Any]:
        ends = np.cumsum(sizes)
        at = np.arange(ends[-1]) + np.repeat(self._starts[documents] + starts - (ends - sizes), sizes)
        return self._ids[at], np.ones(len(at), np.bool_)


@dataclass
class Row:
    """One configuration at one batch size."""

    part: str
    who: str
    how: str
    tokens_per_s: list[float] = field(default_factory=list)  # of each stretch, settled
    flops_per_token: float = 0.0
    weights: int = 0  # of the blocks
    memory: float = 0.0  # GB
    error: str = ""

    @property
    def pace(self) -> float:
        return statistics.median(self.tokens_per_s) if self.tokens_per_s else 0.0


# --- clocks ---


def settled() -> float:
    """The time after synchronizing the device."""
    if HERE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def stretches(step: Callable[[], int], seconds: float, count: int = 3, warm: int = 3) -> list[float]:
    """Tokens per second of several measurements, after warmup steps."""
    for _ in range(warm):
        step()
    began = settled()
    step()
    each = settled() - began
    steps = max(1, round(seconds / count / each))
    found = []
    for _ in range(count):
        began = settled()
        tokens = sum(step() for _ in range(steps))
        found.append(tokens / (settled() - began))
    return found


def within(command: list[str], seconds: float) -> str:
    """The output of a process, unless it times out: a compilation cannot be interrupted otherwise."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the processes that compile for it
            raise TimeoutError(f"not done after {seconds:.0f} s") from None
    if process.returncode:
        raise RuntimeError(f"ended with {process.returncode}")
    return said


def cleared() -> None:
    gc.collect()
    if HERE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def autocast() -> Any:
    return nullcontext() if HERE.type == "cpu" else torch.autocast(HERE.type, HALF)


# --- Bertie ---


def bert(shape: Shape) -> Model:
    cfg = EncoderConfig(
        vocab=shape.vocab,
        width=shape.width,
        layer_map=tuple(range(shape.depth)),
        heads=shape.heads,
        head_width=shape.width // shape.heads,
        kv_heads=shape.heads,
        ff_width=4 * shape.width,
        activation="gelu",
        embeddings=EmbeddingConfig(width=shape.width, segments=2),
        positions=(Learned(shape.max_length),),
        patterns=(Full(),) * shape.depth,
        max_length=shape.max_length,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        pad_id=0,
    )
    return Model(cfg, {"mlm": vocabulary(shape, shape.vocab)}).to(HERE)


def vocabulary(shape: Shape, vocab: int) -> HeadConfig:
    return HeadConfig(
        kind="vocabulary", outputs=vocab, dense=shape.width, activation="gelu", norm=NormConfig(), tied=True
    )


class Clocked(Trainer):
    """A trainer that records the time every few steps."""

    every = warm = 1

    def _step(self) -> int:
        step = self.state.step
        if step == 0:
            self.marks: list[tuple[float, int]] = []  # when, and how many tokens were read before
        if step >= self.warm and (step - self.warm) % self.every == 0:
            self.mark()
        return super()._step()

    def mark(self) -> None:
        self.marks.append((settled(), self.state.tokens))

    @property
    def paces(self) -> list[float]:
        return [(more - tokens) / (later - now) for (now, tokens), (later, more) in pairwise(self.marks)]


def bertie_mlm(row: Row, model: Model, corpus: Any, tokenizer: Any, size: int, steps: int, on: bool) -> None:
    """A run of the trainer as in `bertie pretrain`, with or without fused kernels."""
    packed = PackedCorpus(corpus, size - SPARE, model.config.max_length, seed=0)
    recipe = Recipe(lr=1e-4, warmup=0.1, micro_tokens=size, schedule="constant")
    readers = PREFETCH_WORKERS if HERE.type == "cuda" else 0
    trainer = Clocked(
        model, MaskedLMSampler(packed, tokenizer, steps), recipe, progress=False, prefetch_workers=readers
    )
    trainer.every = max(1, (steps - steps // 3) // 3)
    trainer.warm = steps - 3 * trainer.every
    with nullcontext() if on else disable("triton.fused"):
        trainer.run()
        trainer.mark()
    row.tokens_per_s += trainer.paces


def lengths_of(corpus: Any, max_length: int, size: int) -> list[int]:
    packed = PackedCorpus(corpus, size, max_length, seed=0)
    return [end - start + 2 for n in range(min(4, packed.steps())) for _, start, end in packed.step(n)]


# --- transformers ---


def hidden(corpus: Any, tokenizer: Any, packed: PackedCorpus, number: int) -> tuple[Any, Any, Any, Any, Any]:
    """A step's masked ids, cu_seqlens, masked positions, original tokens, and special tokens."""
    ids, cu, special, words = packed.batch(number)
    rng = np.random.default_rng(number)
    masking = Masking(rate=RATE)
    places = masking.choose(special, words, cu, rng)
    never = corpus.manifest["tokenizer"]["special"]
    masked, targets = masking.apply(
        ids, places, rng, vocab=tokenizer.vocab_size, mask_id=tokenizer.mask_id, never=never
    )
    return masked, cu, places, targets, special


def read_dataset(*args: Any) -> tuple[Any, Any, Any]:
    """The same with labels: −100 for tokens that are not masked."""
    masked, cu, places, targets, _ = hidden(*args)
    labels = np.full(len(masked), -100)
    labels[places] = targets
    return masked, labels, cu


Inputs = dict[str, torch.Tensor]


def in_blocks(corpus: Any, tokenizer: Any, size: int, batch: int, count: int = 12) -> list[tuple[Inputs, int]]:
    """Concatenated texts, split every `size` tokens."""
    packed = PackedCorpus(corpus, max(size * batch + 4 * size, 512), size, seed=0)
    found: list[tuple[Inputs, int]] = []
    for n in range(min(count, packed.steps())):
        masked, labels, _ = read_dataset(corpus, tokenizer, packed, n)
        whole = min(batch, len(masked) // size)
        if whole < batch and found:
            break  # the last step of an epoch is short, and compiled graphs have one size
        cut = slice(0, whole * size)
        tensors = [torch.from_numpy(x[cut]).view(whole, size).to(HERE) for x in (masked, labels)]
        found.append(({"input_ids": tensors[0], "labels": tensors[1]}, whole * size))
    return found


def in_rows(corpus: Any, tokenizer: Any, max_length: int, batch: int, count: int = 12) -> list[tuple[Inputs, int]]:
    """One text per row, sorted by length, padded to the longest of its batch."""
    packed = PackedCorpus(corpus, 131072 if len(corpus) > 1000 else max(max_length, 512), max_length, seed=0)
    texts: list[tuple[np.ndarray, np.ndarray]] = []
    for n in range(packed.steps()):
        masked, labels, cu = read_dataset(corpus, tokenizer, packed, n)
        texts += [(masked[a:b], labels[a:b]) for a, b in pairwise(cu)]
        if len(texts) >= batch * count:
            break
    texts = sorted(texts[: batch * count], key=lambda text: len(text[0]))
    found = []
    for at in range(0, len(texts) - len(texts) % batch or len(texts), batch):
        some = texts[at : at + batch]
        longest = -(-max(len(ids) for ids, _ in some) // 8) * 8
        rows = [np.full((len(some), longest), fill) for fill in (0, -100, 0)]
        for b, (ids, labels) in enumerate(some):
            rows[0][b, : len(ids)], rows[1][b, : len(ids)], rows[2][b, : len(ids)] = ids, labels, 1
        one = dict(zip(("input_ids", "labels", "attention_mask"), map(torch.from_numpy, rows), strict=True))
        found.append(({name: x.to(HERE) for name, x in one.items()}, sum(len(ids) for ids, _ in some)))
    order = np.random.default_rng(0).permutation(len(found))
    return [found[i] for i in order]


def peer_bert(shape: Shape) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    cfg = BertConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.width,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.max_length,
        hidden_dropout_prob=shape.dropout,
        attention_probs_dropout_prob=shape.dropout,
        attn_implementation="sdpa",
    )
    return BertForMaskedLM(cfg).to(HERE).train()


class Peer:
    """A simple training loop over batches on the device."""

    def __init__(self, modules: list[nn.Module], batches: list[tuple[Inputs, int]], loss: Callable[..., Any]) -> None:
        self.parameters = [p for module in modules for p in module.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4, weight_decay=0.01, fused=True)
        self.batches, self.loss, self.at = batches, loss, 0

    def step(self) -> int:
        inputs, tokens = self.batches[self.at % len(self.batches)]
        self.at += 1
        with autocast():
            loss = self.loss(inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return tokens


# --- parts ---


class Bench:
    """The rows of the table, each measured within the remaining time."""

    def __init__(self, options: argparse.Namespace, arguments: list[str]) -> None:
        self.options, self.arguments = options, arguments
        self.shape = TINY if options.tiny else Shape()
        self.until = self.end = time.perf_counter() + options.seconds
        self.rows: list[Row] = []
        self.top = 0.0 if options.only_compiled else peak_flops(HERE, HALF)
        self.left_out: list[str] = []

    @property
    def left(self) -> float:
        return self.until - time.perf_counter()

    def attempt(self, row: Row, call: Callable[[], None], needs: float = 0.0) -> bool:
        """Measure one row; an error becomes a line of the table."""
        if self.left < needs:
            self.left_out.append(f"{row.part} {row.who} {row.how}: {self.left:.0f} s were left")
            return False
        if row not in self.rows:
            self.rows.append(row)
        cleared()
        began = time.perf_counter()
        try:
            call()
        except Exception as error:
            row.error = f"{type(error).__name__}: {error}".splitlines()[0][:150]
            if self.options.verbose:
                traceback.print_exc()
        if HERE.type == "cuda":
            row.memory = torch.cuda.max_memory_allocated() / 1e9
        spent = time.perf_counter() - began
        said = row.error or f"{row.pace:,.0f} tokens/s"
        print(f"{row.part} {row.who} {row.how}: {said} ({spent:.1f} s)", file=sys.stderr, flush=True)
        return not row.error

    def text(self, vocab: int) -> tuple[Any, Any]:
        """The corpus and its tokenizer."""
        if self.options.corpus is None:
            tokens = 4000 if self.options.tiny else 8_000_000
            return Generated(vocab, tokens), SimpleNamespace(mask_id=4, vocab_size=vocab)
        tokenizer = Tokenizer.from_folder(self.options.tokenizer)
        return Corpus.open(self.options.corpus, tokenizer), tokenizer

    def kernels(self) -> None:
        """Forward and backward pass of each fused function under autocast, against the unfused one."""
        if HERE.type != "cuda":
            self.left_out.append("kernels: these need a GPU")
            return
        rows, width, words = 65536, self.shape.width, self.shape.vocab
        draw = torch.Generator(HERE).manual_seed(0)

        def drawn(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.randn(*size, generator=draw, device=HERE).to(dtype).requires_grad_()

        layer_norm, up = nn.LayerNorm(width).to(HERE), nn.Linear(width, 4 * width).to(HERE)
        x, y, table = drawn(rows, width), drawn(rows, width), drawn(words, width, dtype=torch.float32)
        some = drawn(rows // 7, width)
        targets = torch.randint(words, (len(some),), device=HERE)
        weights = torch.ones(len(some), device=HERE)
        fused = SimpleNamespace(
            add_norm=norm.add_norm,
            linear_activation=activation.linear_activation,
            linear_cross_entropy=cross_entropy.fused_linear_cross_entropy,
        )
        cases: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
            "add_norm": (lambda ops: ops.add_norm(x, y, layer_norm, 0.0), [x, y, *layer_norm.parameters()]),
            "add_norm, dropout": (lambda ops: ops.add_norm(x, y, layer_norm, 0.1), [x, y, *layer_norm.parameters()]),
            "linear_activation": (lambda ops: ops.linear_activation(x, up, "gelu", False), [x, *up.parameters()]),
            "fused_linear_cross_entropy": (
                lambda ops: ops.linear_cross_entropy(some, table * 0.05, None, targets, weights),
                [some, table],
            ),
        }
        for name, (call, wanted) in cases.items():
            found: list[list[torch.Tensor]] = []
            for on in (False, True):
                upstream: torch.Tensor | None = None

                def once(
                    call: Any = call, wanted: Any = wanted, ops: Any = fused if on else eager
                ) -> list[torch.Tensor]:
                    nonlocal upstream
                    with autocast():
                        out = call(ops)
                        if upstream is None:
                            draw.manual_seed(1)
                            upstream = torch.randn(out.shape, generator=draw, device=HERE).to(out.dtype)
                        return [out.detach(), *torch.autograd.grad(out, wanted, upstream)]

                row = Row("kernels", "bertie", f"{name}{', fused' if on else ''}", [])

                def clocked(row: Row = row, once: Any = once, found: Any = found) -> None:
                    found.append([one.float() for one in once()])
                    row.tokens_per_s += stretches(lambda: len(once()) and rows, 0.1)

                self.attempt(row, clocked)
            if len(found) == 2 and name != "add_norm, dropout":
                far = [float((a - b).norm() / b.norm().clamp(min=1e-9)) for b, a in zip(*found, strict=True)]
                print(f"  fused from plain, by norms: {', '.join(f'{one:.1e}' for one in far)}", flush=True)

    def mlm(self) -> None:
        options, shape = self.options, self.shape
        corpus, tokenizer = self.text(shape.vocab)
        if tokenizer.vocab_size > shape.vocab:
            raise InputError(f"the tokenizer has {tokenizer.vocab_size} words; this model has {shape.vocab}")
        model = bert(shape)
        weights = shape.depth * 12 * shape.width**2
        lengths = lengths_of(corpus, shape.max_length, options.sizes[0])
        own = flops_per_token(model, lengths, RATE)
        blocked = flops_per_token(model, [shape.max_length], RATE)  # blocks are long: more pairs for a token
        again: list[tuple[Row, Callable[[], None]]] = []

        def best(tried: list[tuple[Row, Callable[[], None]]]) -> None:
            sound = [one for one in tried if one[0].tokens_per_s]
            if sound:
                again.append(max(sound, key=lambda trial: trial[0].pace))

        for on in (False, True) if HERE.type == "cuda" else (False,):
            tried = []
            for size in options.sizes:
                row = Row("mlm", "bertie", f"{size} tokens{', fused' if on else ''}", [], own, weights)

                def ours(row: Row = row, size: int = size, on: bool = on) -> None:
                    bertie_mlm(row, model, corpus, tokenizer, size, options.steps, on)

                self.attempt(row, ours, needs=5)
                tried.append((row, ours))
            best(tried)  # type: ignore[arg-type]

        peer = peer_bert(shape)
        optimized: dict[str, Peer] = {}

        def theirs(row: Row, made: Callable[[], list[tuple[Inputs, int]]]) -> None:
            if row.how not in optimized:
                optimized.clear()  # one set of batches and of moments at a time
                cleared()
                optimized[row.how] = Peer([peer], made(), lambda inputs: peer(**inputs).loss)
            row.tokens_per_s += stretches(optimized[row.how].step, options.stretch)

        for kind, make, ratio in (("blocks", in_blocks, blocked), ("padded rows", in_rows, own)):
            tried = []
            for batch in options.batches if kind == "blocks" else [2 * n for n in options.batches]:
                row = Row("mlm", "transformers", f"{kind}, {batch} at a time", [], ratio, weights)

                def made(batch: int = batch, make: Any = make) -> list[tuple[Inputs, int]]:
                    found: list[tuple[Inputs, int]] = make(corpus, tokenizer, shape.max_length, batch)
                    return found

                def other(row: Row = row, made: Any = made) -> None:
                    theirs(row, made)

                self.attempt(row, other, needs=4)
                tried.append((row, other))  # type: ignore[arg-type]
            best(tried)  # type: ignore[arg-type]

        if options.compile:
            batch = options.batches[-1]
            row = Row("mlm", "transformers", f"blocks, {batch} at a time, compiled", [], blocked, weights)

            def quick() -> None:
                again = [*self.arguments, "--only-compiled"]
                said = within([sys.executable, "-m", "benchmarks.pretrain", *again], min(options.compile, self.left))
                row.tokens_per_s += json.loads(said.splitlines()[-1])

            optimized.clear()
            self.attempt(row, quick, needs=15)

        for _ in range(options.repeats):  # in turns
            for row, call in again:
                self.attempt(row, call, needs=4)

    def compiled(self) -> list[float]:
        """In a separate process."""
        corpus, tokenizer = self.text(self.shape.vocab)
        peer = peer_bert(self.shape)
        batches = in_blocks(corpus, tokenizer, self.shape.max_length, self.options.batches[-1])
        quick = torch.compile(peer)
        return stretches(Peer([peer], batches, lambda inputs: quick(**inputs).loss).step, self.options.stretch)

    def deberta(self) -> None:
        options, shape = self.options, self.shape
        corpus, tokenizer = self.text(shape.rtd_vocab)
        model = deberta(shape, shape.depth, "mlm").to(HERE)
        weights = shape.depth * 12 * shape.width**2
        needed = flops_per_token(model, lengths_of(corpus, shape.max_length, options.rtd_size), RATE)
        turns: list[tuple[Row, Callable[[], None]]] = []
        for size in {options.rtd_size, options.sizes[0]}:
            row = Row("deberta", "bertie", f"{size} tokens, fused", [], needed, weights)

            def ours(row: Row = row, size: int = size) -> None:
                bertie_mlm(row, model, corpus, tokenizer, size, options.steps, HERE.type == "cuda")

            turns.append((row, ours))
        peer = peer_deberta(shape, shape.depth)
        for batch in {options.rtd_batch, options.rtd_batch // 2}:
            row = Row("deberta", "transformers", f"padded rows, {batch} at a time", [], needed, weights)
            batches = in_rows(corpus, tokenizer, shape.max_length, batch, 8)

            def theirs(row: Row = row, batches: Any = batches) -> None:  # one set of moments at a time
                row.tokens_per_s += stretches(Peer([peer], batches, lambda x: peer(**x).loss).step, options.stretch)

            turns.append((row, theirs))
        for _ in range(1 + options.repeats):
            for row, call in turns:
                self.attempt(row, call, needs=6)

    def rtd(self) -> None:
        options, shape = self.options, self.shape
        corpus, tokenizer = self.text(shape.rtd_vocab)
        small, large = deberta(shape, shape.depth // 2, "mlm"), deberta(shape, shape.depth, "rtd")
        both = ReplacedTokenDetection(small, large, "gdes").to(HERE).train()
        lengths = lengths_of(corpus, shape.max_length, options.rtd_size)
        needed = flops_per_token(small, lengths, RATE) + flops_per_token(large, lengths, 1.0, head="rtd")
        weights = (shape.depth + shape.depth // 2) * 12 * shape.width**2

        def ours(row: Row, on: bool) -> None:
            batches = [replaced(corpus, tokenizer, shape.max_length, options.rtd_size, n) for n in range(4)]

            def loss(inputs: Any) -> Any:
                batch, rows, targets, special = inputs
                return both.total(both(batch, rows, targets, special), len(rows), len(special))

            with nullcontext() if on else disable("triton.fused"):
                row.tokens_per_s += stretches(Peer([both], batches, loss).step, options.stretch)

        for on in (False, True) if HERE.type == "cuda" else (False,):
            row = Row("rtd", "bertie", f"{options.rtd_size} tokens{', fused' if on else ''}", [], needed, weights)
            self.attempt(row, lambda row=row, on=on: ours(row, on), needs=6)
        batch = options.rtd_batch
        row = Row("rtd", "transformers", f"padded rows, {batch} at a time", [], needed, weights)

        def theirs() -> None:
            generator = peer_deberta(shape, shape.depth // 2)
            discriminator = peer_deberta(shape, shape.depth, "ForTokenClassification")
            discriminator_loss = nn.functional.binary_cross_entropy_with_logits

            def loss(inputs: Inputs) -> Any:
                labels, mask = inputs["labels"], inputs["attention_mask"]
                made = generator(**inputs)
                hidden = labels != -100
                scores = made.logits[hidden].detach().float()
                guesses = (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)
                ids = inputs["input_ids"].masked_scatter(hidden, guesses)
                wrong = torch.zeros_like(hidden).masked_scatter(hidden, guesses != labels[hidden])
                found = discriminator(input_ids=ids, attention_mask=mask).logits[..., 0].float()
                each = discriminator_loss(found, wrong.float(), reduction="none") * mask
                return made.loss + 50.0 * each.sum() / mask.sum()

            batches = in_rows(corpus, tokenizer, shape.max_length, batch, 8)
            peer = Peer([generator, discriminator], batches, loss)
            row.tokens_per_s += stretches(peer.step, options.stretch)

        self.attempt(row, theirs, needs=6)


def deberta(shape: Shape, depth: int, head: str) -> Model:
    norm = NormConfig(eps=1e-7)
    span = min(256, shape.max_length // 2)
    cfg = EncoderConfig(
        vocab=shape.rtd_vocab,
        width=shape.width,
        layer_map=tuple(range(depth)),
        heads=shape.heads,
        head_width=shape.width // shape.heads,
        kv_heads=shape.heads,
        ff_width=4 * shape.width,
        activation="gelu",
        norm=norm,
        embeddings=EmbeddingConfig(width=shape.width),
        positions=(Disentangled(("c2p", "p2c"), shape.max_length, buckets=span, shared=True, norm=norm),),
        patterns=(Full(),) * depth,
        max_length=shape.max_length,
        dropout=shape.dropout,
        attention_dropout=shape.dropout,
        pad_id=0,
    )
    heads = {
        "mlm": vocabulary(shape, shape.rtd_vocab),
        "rtd": HeadConfig(kind="token", outputs=1, dense=shape.width, activation="gelu"),
    }
    return Model(cfg, {head: heads[head]})


def replaced(corpus: Any, tokenizer: Any, max_length: int, size: int, number: int) -> tuple[Any, int]:
    """A batch for `ReplacedTokenDetection`, on the device."""
    packed = PackedCorpus(corpus, size, max_length, seed=0)
    masked, cu, places, targets, special = hidden(corpus, tokenizer, packed, number % packed.steps())
    batch = Batch.from_ids([masked[a:b] for a, b in pairwise(cu)]).to(HERE)
    tensors = (torch.from_numpy(x).to(HERE) for x in (places, targets, special))
    return (batch, *tensors), len(masked)


def peer_deberta(shape: Shape, depth: int, kind: str = "ForMaskedLM") -> Any:
    import transformers

    cfg = transformers.DebertaV2Config(
        vocab_size=shape.rtd_vocab,
        hidden_size=shape.width,
        num_hidden_layers=depth,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        max_position_embeddings=shape.max_length,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=min(256, shape.max_length // 2),
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        layer_norm_eps=1e-7,
        num_labels=1,
    )
    return getattr(transformers, f"DebertaV2{kind}")(cfg).to(HERE).train()


# --- the table ---


def table(bench: Bench) -> str:
    """As Markdown."""
    lines = [
        "| part | who | how | Mtokens/s | TF | TF 6N | share of the ceiling | to transformers' best | GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in bench.rows:
        first = [one.pace for one in bench.rows if one.part == row.part and one.who == "transformers"]
        rival = max(first, default=0.0)
        if not row.tokens_per_s:
            lines.append(f"| {row.part} | {row.who} | {row.how} | {row.error} | | | | | |")
            continue
        work, plain = row.pace * row.flops_per_token / 1e12, row.pace * 6 * row.weights / 1e12
        ratio = f"{row.pace / rival:.2f}×" if rival else ""
        low, high = min(row.tokens_per_s) / 1e6, max(row.tokens_per_s) / 1e6
        lines.append(
            f"| {row.part} | {row.who} | {row.how} | {row.pace / 1e6:.3f} ({low:.3f} to {high:.3f}) | {work:.1f} "
            f"| {plain:.1f} | {1e12 * work / bench.top:.1%} | {ratio} | {row.memory:.1f} |"
        )
    lines.append(f"\nCeiling: {bench.top / 1e12:.0f} TFLOP/s. The median of several stretches (least to most).")
    return "\n".join(lines + [f"Left out: {one}" for one in bench.left_out])


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main(arguments: list[str] | None = None) -> Bench:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        "benchmarks.pretrain", description=about, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", type=Path, help="a folder made by `bertie corpus`; else random ids")
    parser.add_argument("--tokenizer", type=Path, help="the checkpoint folder whose tokenizer made the corpus")
    parser.add_argument("--parts", default="kernels,mlm,deberta,rtd", help="which, by commas")
    parser.add_argument("--seconds", type=float, default=100.0, help="for everything; what is left then is left out")
    parser.add_argument("--stretch", type=float, default=1.5, help="seconds on the clock in a run of the peer's")
    parser.add_argument("--steps", type=int, default=18, help="of a run of Bertie's; a third do not count")
    parser.add_argument("--repeats", type=int, default=1, help="of the best of each, in turns")
    parser.add_argument("--sizes", type=numbers, default=[65536, 131072], help="tokens a step, for Bertie")
    parser.add_argument("--batches", type=numbers, default=[64, 128], help="blocks a step, for transformers")
    parser.add_argument("--compile", type=float, default=40.0, help="seconds for torch.compile of the peer; 0: without")
    parser.add_argument("--rtd-size", type=int, default=32768, help="tokens a step")
    parser.add_argument("--rtd-batch", type=int, default=128, help="texts a step, for transformers")
    parser.add_argument("--tiny", action="store_true", help="models and texts for trying this file out")
    parser.add_argument("--verbose", action="store_true", help="say in full what went wrong")
    parser.add_argument("--only-compiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="where to write all numbers")
    options = parser.parse_args(arguments)
    if (options.corpus is None) != (options.tokenizer is None):
        parser.error("--corpus and --tokenizer belong together")
    torch.manual_seed(0)
    bench = Bench(options, sys.argv[1:] if arguments is None else arguments)
    if options.only_compiled:
        print(json.dumps(bench.compiled()))
        return bench
    parts = options.parts.split(",")
    for part in parts:
        now = time.perf_counter()
        bench.until = bench.end if part == parts[-1] else now + 0.75 * (bench.end - now)
        try:
            {"kernels": bench.kernels, "mlm": bench.mlm, "deberta": bench.deberta, "rtd": bench.rtd}[part]()
        except Exception as error:
            traceback.print_exc()
            bench.left_out.append(f"{part}: {type(error).__name__}: {error}")
        cleared()
    print(table(bench))
    if options.json:
        found = [asdict(row) | {"pace": row.pace} for row in bench.rows]
        chip = torch.cuda.get_device_name() if HERE.type == "cuda" else "CPU"
        facts = {"chip": chip, "torch": torch.__version__, "ceiling": bench.top, "left_out": bench.left_out}
        options.json.write_text(json.dumps(facts | {"rows": found}, indent=1) + "\n")
    return bench


if __name__ == "__main__":
    main()
