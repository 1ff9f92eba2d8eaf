"""What a run says of itself, against slow counts of the same: losses, guesses, curves, work and alarms."""

from __future__ import annotations

import csv
import json
import math
import random
import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bertie.config import BlockSparse, Full, Sliding
from bertie.errors import ConfigError, InputError, MissingPackageError, NotFoundError
from bertie.nn.model import Model
from bertie.ops.reference import _times
from bertie.text.batch import Batch
from bertie.text.tokenizer import Tokenizer
from bertie.training.mfu import flops_per_token, peak_flops
from bertie.training.pretrain import curves, monitoring
from bertie.training.pretrain.corpus import Corpus, build_corpus
from bertie.training.pretrain.curves import Curves
from bertie.training.pretrain.masking import Masking, masking_rng
from bertie.training.pretrain.monitoring import (
    SENTENCES,
    HeldOutEvaluation,
    evaluate_with_intervals,
    fill_mask_samples,
    write_samples,
)
from bertie.training.pretrain.packing import PackedCorpus
from bertie.training.spikes import LossSpikeDetector
from tests.parity import tiny
from tests.parity.test_transformers import ours
from tests.training.test_corpus import PIECES, SPECIALS, sentence, tokenizer_of
from tests.training.tiny import masked

REACH = 24


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_of([*SPECIALS, ".", *PIECES, *(f"##{piece}" for piece in PIECES)])


@pytest.fixture(scope="module")
def corpus(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp("corpus")
    documents = [sentence(draw, draw.randint(1, 25)) for _ in range(40)]
    (folder / "in.txt").write_text("\n\n".join(documents) + "\n")
    build_corpus([str(folder / "in.txt")], tokenizer, folder / "out")
    return Corpus.open(folder / "out", tokenizer)


def model(vocab: int, std: float = 0.3) -> Model:
    return masked(vocab, REACH, dropout=0.5, std=std)


def held_out(corpus: Corpus, tokenizer: Tokenizer, step: int = 200, **options: Any) -> HeldOutEvaluation:
    return HeldOutEvaluation(PackedCorpus(corpus, step, REACH, seed=3), tokenizer, **({"budget": 150, "seed": 5} | options))


# --- held-out text ---


@torch.no_grad()
def each_document(of: Model, corpus: Corpus, tokenizer: Tokenizer, masking: Masking) -> dict[int, list[Any]]:
    """Loss, hits and count of each document: piece by piece, with all logits, from the corpus itself."""
    assert tokenizer.mask_id is not None
    never = corpus.manifest["tokenizer"]["special"]
    found: dict[int, list[Any]] = {}
    for d in range(len(corpus)):
        words = corpus.word_starts(d)
        for start in range(0, len(corpus.document(d)), REACH - 2):
            inner = corpus.document(d)[start : start + REACH - 2].astype(np.int64)
            ids = np.concatenate([[corpus.cls_id], inner, [corpus.sep_id]])
            special = np.isin(ids, never)
            begins = np.concatenate([[True], words[start : start + REACH - 2], [True]]) | special
            begins[1] = True
            rng = masking_rng(5, None, d * 1_000_003 + start)
            places = masking.choose(special, begins, np.array([0, len(ids)]), rng)
            masked, targets = masking.apply(
                ids, places, rng, vocab=tokenizer.vocab_size, mask_id=tokenizer.mask_id, never=never
            )
            logs = of(Batch.from_ids([masked]), "mlm").double().log_softmax(-1).numpy()[places]
            one = found.setdefault(d, [0.0, 0, 0])
            one[0] -= logs[np.arange(len(places)), targets].sum()
            one[1] += int((logs.argmax(1) == targets).sum())
            one[2] += len(places)
    return found


@pytest.mark.parametrize("unit", ["token", "word"])
def test_held_out_loss_is_that_of_each_hidden_token(corpus: Corpus, tokenizer: Tokenizer, unit: Any) -> None:
    of, masking = model(tokenizer.vocab_size), Masking(rate=0.3, unit=unit)
    slow = np.array(list(each_document(of.eval(), corpus, tokenizer, masking).values()))
    loss, right, count = slow.sum(0)
    found = held_out(corpus, tokenizer, masking=masking)(of)
    assert found["tokens"] == count > 200
    assert found["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert found["accuracy"] == right / count
    assert found["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-5)


def test_held_out_loss_does_not_depend_on_how_it_is_read(
    corpus: Corpus, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = model(tokenizer.vocab_size)
    of.train()
    whole = held_out(corpus, tokenizer)
    before = whole(of)
    assert of.training
    assert whole(of) == before  # no dropout, and the same masks
    assert held_out(corpus, tokenizer, seed=6)(of)["loss"] != before["loss"]
    for other in (held_out(corpus, tokenizer, budget=1), held_out(corpus, tokenizer, step=90, budget=10_000)):
        assert other(of) == pytest.approx(before, rel=1e-6)
    monkeypatch.setattr(monitoring, "MAX_LOGITS", 3 * tokenizer.vocab_size)
    assert whole(of) == pytest.approx(before, rel=1e-6)


def test_a_model_that_knows_nothing(corpus: Corpus, tokenizer: Tokenizer) -> None:
    vocab = tokenizer.vocab_size
    found = held_out(corpus, tokenizer)(model(vocab, std=1e-12))
    assert found["perplexity"] == pytest.approx(vocab, rel=1e-4)


def test_no_more_tokens_are_read_than_asked_for(corpus: Corpus, tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    masking = Masking(rate=1.0)  # all but the two around a piece are predicted
    whole = held_out(corpus, tokenizer, masking=masking)(of)["tokens"]
    assert whole == corpus.tokens
    part = held_out(corpus, tokenizer, masking=masking, limit=300)(of)["tokens"]
    assert 300 - REACH - 2 * 300 / 4 < part < 300
    assert 0 < held_out(corpus, tokenizer, masking=masking, limit=1)(of)["tokens"] <= REACH - 2


def test_intervals_draw_documents(corpus: Corpus, tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    slow = np.array(list(each_document(of.eval(), corpus, tokenizer, Masking()).values()))
    held = held_out(corpus, tokenizer)
    found = evaluate_with_intervals(of, held, resamples=300, seed=1)
    rng = np.random.default_rng(1)
    drawn = np.array([slow[rng.integers(0, len(slow), len(slow))].sum(0) for _ in range(300)])
    losses = drawn[:, 0] / drawn[:, 2]
    low, high = np.quantile(losses, (0.025, 0.975))
    assert (found["loss"].low, found["loss"].high) == pytest.approx((low, high), rel=1e-5)
    assert found["perplexity"].low == pytest.approx(math.exp(low), rel=1e-5)
    assert {name: score.value for name, score in found.items()} == pytest.approx(
        {name: value for name, value in held(of).items() if name != "tokens"}, rel=1e-12
    )


def test_held_out_refuses(corpus: Corpus, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="budget=0"):
        held_out(corpus, tokenizer, budget=0)
    with pytest.raises(ConfigError, match="limit=0"):
        held_out(corpus, tokenizer, limit=0)
    bare = tokenizer_of([*SPECIALS[:4], ".", *PIECES])
    with pytest.raises(InputError, match="no mask token"):
        held_out(corpus, bare)
    of = model(tokenizer.vocab_size)
    with pytest.raises(NotFoundError, match="no head 'other'"):
        held_out(corpus, tokenizer, head="other")(of)


# --- words for masks ---


def test_samples_are_the_likeliest_tokens(tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size + 3)  # rows of the table that no token has
    of.train()
    texts = ["ba [MASK] de", "[MASK] gi ko [MASK]."]
    found = fill_mask_samples(of, tokenizer, texts, top=4)
    assert of.training
    assert [one["text"] for one in found] == texts
    of.eval()
    for one in found:
        encoding = tokenizer.encode(one["text"])
        with torch.no_grad():
            chances = of(Batch.from_encodings([encoding]), "mlm").softmax(-1).numpy()
        places = np.flatnonzero(encoding.ids == tokenizer.mask_id)
        assert len(places) == len(one["masks"])
        for place, guesses in zip(places, one["masks"], strict=True):
            best = np.argsort(-chances[place][: tokenizer.vocab_size])[:4]
            assert list(guesses) == [tokenizer.token(int(i)) for i in best]
            assert list(guesses.values()) == pytest.approx(chances[place][best].tolist(), abs=1e-4)


def test_sentences_for_a_tokenizer_with_another_mask() -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *PIECES]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens(words[:5])
    found = fill_mask_samples(model(len(words)), Tokenizer(backend))
    assert len(found) == len(SENTENCES)
    assert [len(one["masks"]) for one in found] == [text.count("[MASK]") for text in SENTENCES]


def test_samples_refuse(tokenizer: Tokenizer) -> None:
    of = model(tokenizer.vocab_size)
    with pytest.raises(InputError, match=r"no \[MASK\]"):
        fill_mask_samples(of, tokenizer, ["ba de"])
    with pytest.raises(InputError, match="the model's limit is 24"):
        fill_mask_samples(of, tokenizer, ["ba " * 30 + "[MASK]"])
    with pytest.raises(InputError, match="no mask token"):
        fill_mask_samples(of, tokenizer_of([*SPECIALS[:4], *PIECES]))


def test_samples_of_a_step_that_is_done_again(tmp_path: Path) -> None:
    one = {"text": "a [MASK]", "masks": [{"\u2028é": 0.5}]}
    for step in (10, 20, 30):
        write_samples(tmp_path, step, [one, one])
    whole = (tmp_path / "samples.jsonl").read_bytes()
    for step in (20, 30):  # a run that was killed after its third went on from its first
        write_samples(tmp_path, step, [one, one])
    assert (tmp_path / "samples.jsonl").read_bytes() == whole
    lines = [json.loads(line) for line in whole.decode().split("\n") if line]
    assert [line["step"] for line in lines] == [10, 10, 20, 20, 30, 30]
    assert lines[0] == {"step": 10, **one}


# --- curves ---


def rows(count: int) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    logged: list[dict[str, float]] = [
        {
            "step": 10.0 * i,
            "epoch": i / 50,
            "loss": 2 + 8 / i,
            "lr": 1e-4 * i,
            "tokens": 4_000_003.0 * i,
            "tokens_per_second": 9e5 + i,
            "mfu": 0.41,
        }
        for i in range(1, count + 1)
    ]
    predictions = [
        {"step": row["step"], "epoch": row["epoch"], "loss": row["loss"] + 0.1, "accuracy": 0.5, "tokens": 777.0}
        for row in logged[4::5]
    ]
    return logged, predictions


def fed(folder: Path, count: int, known: int = 0, **options: Any) -> Curves:
    """Curves of a run of `count` rows, of which a state held the first `known`."""
    logged, predictions = rows(count)
    held = [one for one in predictions if one["step"] <= 10 * known]
    found = Curves(folder, logged[:known], held, **options)
    for row in logged[known:]:
        found.log(row)
        for one in predictions:
            if one["step"] == row["step"]:
                found.log_evaluation(one)
    found.close()
    return found


def test_files_are_a_function_of_the_rows(tmp_path: Path) -> None:
    fed(tmp_path / "whole", 40)
    fed(tmp_path / "stopped", 33)
    fed(tmp_path / "stopped", 40, known=22)
    names = ["curve.csv", "curve.html", "evaluations.csv"]
    assert sorted(one.name for one in (tmp_path / "stopped").iterdir()) == names
    for name in names:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes()
    Curves(tmp_path / "stopped").write()
    assert (tmp_path / "stopped" / "evaluations.csv").read_text() == "step\n"


def test_csv_holds_what_was_logged(tmp_path: Path) -> None:
    logged, predictions = rows(400)
    del logged[3]["mfu"]
    found = Curves(tmp_path, logged, predictions)
    found.write()
    for name, wanted in (("curve.csv", logged), ("evaluations.csv", predictions)):
        with (tmp_path / name).open() as file:
            read = [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]
        assert [one.keys() for one in read] == [one.keys() for one in wanted]
        for one, other in zip(read, wanted, strict=True):
            assert one == pytest.approx(other, rel=1e-8)
            assert one["tokens"] == other["tokens"]


def test_the_page_draws_losses_against_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, Any] = {}

    def lines(alt: str, series: Any, x: str, y: str) -> str:
        drawn[alt.split(" by ")[0]] = (series, x)
        return real(alt, series, x, y)

    real = curves.lines
    monkeypatch.setattr(curves, "lines", lines)
    fed(tmp_path, 1000)
    (training, held), unit = drawn["Loss"]
    assert unit == "billions of tokens"
    assert len(training.points) == 300
    assert training.points[-1] == pytest.approx((4.0, 2.008), abs=0.01)
    assert len(held.points) == 200
    assert held.points[0] == pytest.approx(
        (0.020000015, 2 + 8 / 5 + 0.1)
    )  # by what was read, not by what was predicted
    for line, whole in zip(drawn["Loss in the second half"][0], (training, held), strict=True):
        assert line.points == [point for point in whole.points if point[0] >= 2.0000015]
        assert 100 < len(line.points) < 170
    page = (tmp_path / "curve.html").read_text()
    assert page.count("<svg") == 6
    assert not re.search(r"<script|https?://", page)
    for fact in ("10,000", "4,000,003,000", "41.0%", "held-out accuracy"):
        assert fact in page


def test_a_page_of_little(tmp_path: Path) -> None:
    for i, (logged, predictions) in enumerate([([], []), ([], [{"step": 0.0, "loss": 9.0}]), rows(1)]):
        Curves(tmp_path / str(i), logged, predictions).write()
        assert (tmp_path / str(i) / "curve.html").read_text().count("<svg") == (0, 2, 5)[i]


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    fed(tmp_path, 33, tensorboard=True)
    fed(tmp_path, 40, known=22, tensorboard=True)
    found = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    logged, predictions = rows(40)
    for tag, wanted in (("train/loss", logged), ("held_out/loss", predictions)):
        points = found.Scalars(tag)
        assert [one.step for one in points] == [int(one["step"]) for one in wanted]
        assert [one.value for one in points] == pytest.approx([one["loss"] for one in wanted])
    assert "train/mfu" in found.Tags()["scalars"]


def test_tensorboard_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'bertie\[tensorboard\]'"):
        Curves(tmp_path, tensorboard=True)


# --- work ---


def counted(of: Model, lengths: list[int], rows: torch.Tensor) -> tuple[int, int]:
    """Operations there, and there and back, as torch counts them."""
    draw = np.random.default_rng(0)
    batch = Batch.from_ids([draw.integers(5, 60, n) for n in lengths])
    # torch has no count for its fused attention on a CPU; and on a GPU it counts scores that are computed twice.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        hidden = of.hidden(batch, "mlm")[rows]
        outputs = of.head("mlm")(hidden, batch, of.encoder.embeddings.words.weight)
        there = counter.get_total_flops()
        outputs.sum().backward()
    return there, counter.get_total_flops()


@pytest.mark.parametrize(
    "name",
    [
        *("bert", "albert", "electra", "mpnet", "eurobert", "modernbert", "longformer", "big_bird"),
        *("deberta", "deberta-near", "deberta-v2", "deberta-v3"),
    ],
)
def test_work_is_what_torch_counts(name: str) -> None:
    of, _ = ours(tiny.build(name, "ForMaskedLM"))
    of.train()
    cfg = of.config
    lengths = [tiny.TINY[name].longest, 17, 17, 5]
    tokens = sum(lengths)
    rows = torch.arange(0, tokens, 4)
    there, both = counted(of, lengths, rows)
    inner = cfg.heads * cfg.head_width
    # On a CPU what a pattern hides is computed, then hidden: torch counts it and we do not.
    for pattern, n in product(cfg.patterns, lengths):
        unseen = sum(not _times(pattern, i, j, n) for i in range(n) for j in range(n))
        there -= 4 * inner * unseen
        both -= 12 * inner * unseen
    if name == "deberta-v3":  # the table goes through the content's projections, that of values too, which none reads
        assert of.encoder.relative is not None
        spare = cfg.depth * 2 * len(of.encoder.relative.rows.weight) * cfg.width * inner
        there, both = there - spare, both - 3 * spare
        assert spare < 0.01 * there
    share = len(rows) / tokens
    assert tokens * flops_per_token(of, lengths, share) == pytest.approx(both, rel=1e-9)
    assert tokens * flops_per_token(of, lengths, share, backward=False) == pytest.approx(there, rel=1e-9)


def test_work_of_patterns() -> None:
    from bertie.training.mfu import _pairs

    sizes = np.array([1, 2, 5, 9, 30, 31, 33, 61])
    for pattern in (
        Full(),
        Sliding(1),
        Sliding(4),
        Sliding(40),
        BlockSparse(4, 0),
        BlockSparse(4, 1),
        BlockSparse(3, 2),
    ):
        seen = [sum(_times(pattern, i, j, n) > 0 for i in range(n) for j in range(n)) for n in sizes.tolist()]
        assert _pairs(pattern, sizes).tolist() == seen


def test_work_refuses() -> None:
    of = model(40)
    for lengths in ([], [3, 0], 512):
        with pytest.raises(InputError, match="lengths="):
            flops_per_token(of, lengths, 0.15)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rows_share="):
        flops_per_token(of, [3], 1.5)


def test_the_ceiling_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = peak_flops("cpu", torch.float32, seconds=0.02)
    assert 1e8 < found < 1e15
    monkeypatch.setattr(torch, "mm", None)
    assert peak_flops("cpu", torch.float32, seconds=0.02) == found
    with pytest.raises(ConfigError, match="seconds=0"):
        peak_flops("cpu", torch.float32, seconds=0)


# --- alarms ---


def curve(seed: int, steps: int, noise: float = 0.04) -> np.ndarray[Any, Any]:
    """A loss that falls from 10 to 2, with noise in proportion."""
    level = 2 + 8 * np.exp(-np.arange(steps) / 400)
    return np.asarray(level * (1 + noise * np.random.default_rng(seed).standard_normal(steps)))


def test_no_alarm_on_a_curve_that_falls() -> None:
    for seed in range(20):
        spikes = LossSpikeDetector()
        assert not any(spikes.update(loss) for loss in curve(seed, 5000))


@pytest.mark.parametrize("at", [600, 2000, 4500])
def test_alarm_on_a_jump(at: int) -> None:
    for seed in range(10):
        losses = curve(seed, at + 3)
        losses[at:] *= 2
        spikes = LossSpikeDetector()
        alarms = [i for i, loss in enumerate(losses) if spikes.update(loss)]
        assert alarms[0] in (at, at + 1, at + 2)


def test_alarms_end_where_a_level_lasts() -> None:
    spikes = LossSpikeDetector(window=100)
    alarms = [i for i, loss in enumerate([2.0] * 200 + [4.0] * 200 + [2.1] * 200) if spikes.update(loss)]
    assert alarms[0] == 200
    assert 245 < alarms[-1] < 255
    assert len(alarms) == alarms[-1] - 199


def test_no_alarm_before_there_is_something_to_compare() -> None:
    spikes = LossSpikeDetector()
    assert not any(spikes.update(loss) for loss in [2.0] * 49 + [9.0])
    assert spikes.update(9.0)
    assert not spikes.update(2.19)  # 10% above a median without any spread
    assert spikes.update(2.21)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_an_alarm_and_is_forgotten(loss: float) -> None:
    spikes = LossSpikeDetector()
    assert spikes.update(loss)
    assert spikes.state == []


def test_alarms_go_on_where_they_stopped() -> None:
    losses = curve(1, 1000, noise=0.3)  # noisy enough for some
    whole, part = LossSpikeDetector(100, 3.0), LossSpikeDetector(100, 3.0)
    wanted = [whole.update(loss) for loss in losses]
    assert 0 < sum(wanted) < 100
    found = [part.update(loss) for loss in losses[:437]]
    state = json.loads(json.dumps(part.state))
    part = LossSpikeDetector(100, 3.0, state)
    found += [part.update(loss) for loss in losses[437:]]
    assert found == wanted
    assert part.state == whole.state
    assert len(part.state) == 100


def test_alarms_refuse() -> None:
    with pytest.raises(ConfigError, match="window=49"):
        LossSpikeDetector(window=49)
    with pytest.raises(ConfigError, match="factor=0"):
        LossSpikeDetector(factor=0)
