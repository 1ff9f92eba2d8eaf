"""How fast a model reads on a device, beside what the device can do: the work of `bertie bench`.

The side-by-side runs in benchmarks/ take their texts and clocks from here, too.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from bertie.checkpoints import storage as store
from bertie.checkpoints.model_spec import model_spec
from bertie.config import Precision
from bertie.errors import ConfigError, InputError
from bertie.nn.linear import check_fp8, precision_of, to_fp8, to_int8
from bertie.nn.model import Model
from bertie.text.batch import Batch, pack
from bertie.training.mfu import ceiling, encoder_weights

if TYPE_CHECKING:
    from bertie.tasks import Embedder

IntArray = NDArray[np.int64]
BUDGETS = {"cpu": (2048, 8192), "cuda": (16384, 65536, 131072)}  # tokens of a batch that are tried
RECTANGLE = 32  # texts of a padded batch, as most libraries have it by default
GEMM_DTYPES: dict[Precision, torch.dtype] = {  # of the operands of matrix multiplications
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast something went."""

    texts_per_s: float
    tokens_per_s: float
    share_of_ceiling: float  # of its matrix products in what the device did at its best


@dataclass(frozen=True, slots=True)
class Speed:
    """What `measure` found."""

    device: str
    precision: str
    ceiling: float  # operations a second in large products
    texts: int
    tokens: int
    budget: int  # tokens a batch: the fastest of those tried
    from_ids: Rate  # to the last hidden state
    from_text: Rate | None  # to vectors; None: there is no tokenizer
    padding: float  # what batches of 32 padded to their longest would have computed on top, by tokens
    padding_sorted: float  # the same, if texts were sorted by length before
    peak_bytes: int | None  # of the device's memory, the weights included; on a CPU, of the whole process
    per_million_tokens: float | None  # what a million tokens cost, in the currency of the price an hour


def measure(
    model: Model,
    *,
    texts: Sequence[str] | None = None,
    embedder: Embedder | None = None,
    seconds: float = 10.0,
    price: float | None = None,
) -> Speed:
    """Measure a model where it lies, for about so many seconds. `embedder` is the same model with its tokenizer.

    Without `texts` they are of random tokens and mixed length (see `mixed_lengths`), as many as fit into the time.

    >>> found = measure(random_model("1x16"), seconds=0.1)
    >>> found.from_ids.tokens_per_s > 0 and found.padding > found.padding_sorted >= 0
    True
    """
    if not seconds > 0:
        raise InputError(f"seconds={seconds} must be greater than 0")
    if texts is not None and not texts:
        raise InputError("there are no texts to measure with")
    device = model.device
    precision = precision_of(model.encoder)
    top = ceiling(device, GEMM_DTYPES[precision], min(0.5, seconds / 10))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    max_length = model.config.max_length if embedder is None else embedder.checkpoint.max_length
    with torch.inference_mode():
        ids = _ids(model, embedder, texts, max_length, seconds)
        lengths = np.array([len(one) for one in ids])
        tokens = int(lengths.sum())
        passes = {budget: over(model, flat_batches(ids, budget, device)) for budget in _budgets(device)}
        share = seconds / (4 * len(passes))
        tried = {budget: middle(_seconds_of(call, device, share)) for budget, call in passes.items()}
    budget = min(tried, key=lambda one: tried[one])
    work = 2.0 * encoder_weights(model.config)

    def rate(spent: float, count: int) -> Rate:
        return Rate(len(ids) / spent, count / spent, work * count / spent / top)

    read = None
    if embedder is not None:
        given = list(texts) if texts is not None else [embedder.tokenizer.decode(one) for one in ids]
        whole = int(embedder.tokenizer.encode_flat(given).lengths.sum())
        read = rate(middle(_seconds_of(lambda: embedder.embed(given), device, seconds / 3)), whole)
    from_ids = rate(tried[budget], tokens)
    pace = (read or from_ids).tokens_per_s
    return Speed(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        precision=precision,
        ceiling=top,
        texts=len(ids),
        tokens=tokens,
        budget=budget,
        from_ids=from_ids,
        from_text=read,
        padding=padded_tokens(lengths, RECTANGLE) / tokens - 1,
        padding_sorted=padded_tokens(np.sort(lengths), RECTANGLE) / tokens - 1,
        peak_bytes=_peak(device),
        per_million_tokens=None if price is None else price / (pace * 3600 / 1e6),
    )


def _ids(
    model: Model, embedder: Embedder | None, texts: Sequence[str] | None, max_length: int, seconds: float
) -> list[IntArray]:
    """Of the texts, what the model reads at once; or random ones, as many as take about a tenth of the time."""
    if embedder is not None and texts is not None:
        flat = embedder.tokenizer.encode_flat(texts)
        return [one[:max_length] for one in np.split(flat.ids, np.cumsum(flat.lengths)[:-1])]
    few = random_ids(mixed_lengths(32, max_length), model.config.vocab)
    call = over(model, [Batch.from_ids(few).to(model.device)])
    each = middle(_seconds_of(call, model.device, 0.0)) / len(few)
    count = int(np.clip(seconds / 10 / each, 32, 4096))
    return random_ids(mixed_lengths(count, max_length), model.config.vocab)


def over(model: Model, batches: Sequence[Batch]) -> Callable[[], None]:
    """A call that reads them all, to the last hidden state."""

    def call() -> None:
        for batch in batches:
            model.hidden(batch)

    return call


def _seconds_of(call: Callable[[], object], device: torch.device, most: float) -> list[float]:
    """Seconds of each of at least two calls after a first that does not count, and of more while there is time."""
    until = settled(device) + most
    call()
    found = [seconds(call, device), seconds(call, device)]
    while time.perf_counter() + found[-1] < until:
        found.append(seconds(call, device))
    return found


def _budgets(device: torch.device) -> tuple[int, ...]:
    return BUDGETS.get(device.type, BUDGETS["cuda"])


def _peak(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if find_spec("resource") is None:  # Windows
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def random_model(shape: str, device: torch.device | str = "cpu", precision: Precision = "fp32") -> Model:
    """A model with random weights: of a config.json of any family, or BERT's make by layers and width: "12x768"."""
    said = re.fullmatch(r"(\d+)x(\d+)", shape)
    if said:
        depth, width = map(int, said.groups())
        heads = max(1, width // 64)
        config = {"model_type": "bert", "vocab_size": 30522, "max_position_embeddings": 512}
        config |= {"hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads}
        config |= {"intermediate_size": 4 * width}
    elif Path(shape).is_file():
        config = store.read_json(Path(shape))
    else:
        raise ConfigError(f"shape={shape!r} must be layers x width, as in 12x768, or the path of a config.json")
    model = Model(model_spec(config, None, head="none").encoder, {}).eval()
    if precision == "fp8":
        check_fp8(device)
        to_fp8(model.to(device, torch.bfloat16).encoder)
        return model
    if precision == "int8":
        to_int8(model.encoder)
        return model.to(device)
    return model.to(device, GEMM_DTYPES[precision])


# --- texts and clocks ---


def mixed_lengths(count: int, most: int = 512, seed: int = 4) -> IntArray:
    """Tokens of texts as they come in practice: log-normal, mean 117, median 87, one in twenty over 324.

    The seed is one by which 4,096 texts have just these numbers.

    >>> found = mixed_lengths(4096)
    >>> int(np.median(found)), round(float(found.mean())), int(found.max())
    (87, 117, 512)
    """
    found = np.exp(np.random.default_rng(seed).normal(np.log(87), 0.8, count))
    return np.clip(found, 3, most).astype(np.int64)


def random_ids(lengths: Sequence[int] | IntArray, vocab: int, seed: int = 0) -> list[IntArray]:
    """Texts of these lengths. The lowest ids, which are mostly special, are left out."""
    draw = np.random.default_rng(seed)
    every = draw.integers(min(5, vocab - 1), vocab, int(np.sum(lengths)))
    return np.split(every, np.cumsum(lengths)[:-1])


def flat_batches(ids: Sequence[IntArray], budget: int, device: torch.device) -> list[Batch]:
    """Texts of like length together, at most `budget` tokens at a time."""
    groups = pack([len(one) for one in ids], budget)
    return [Batch.from_ids([ids[i] for i in group]).to(device) for group in groups]


def padded_tokens(lengths: Sequence[int] | IntArray, batch_size: int) -> int:
    """How many places rectangles of so many texts have, in the order given."""
    sizes = np.asarray(lengths)
    rows = [sizes[at : at + batch_size] for at in range(0, len(sizes), batch_size)]
    return int(sum(row.max() * len(row) for row in rows))


def settled(device: torch.device) -> float:
    """Now, when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """How long one call takes."""
    began = settled(device)
    call()
    return settled(device) - began


def in_turns(
    calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, until: float = float("inf")
) -> dict[str, list[float]]:
    """Seconds of each call, one after the other and again: a chip that slows down slows down for all.

    After `until` (by `time.perf_counter`) no round begins but the first.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        if turn and time.perf_counter() > until:
            break
        for name, call in calls.items():
            found[name].append(seconds(call, device))
    return found


def middle(times: Sequence[float]) -> float:
    """The median."""
    return statistics.median(times)
