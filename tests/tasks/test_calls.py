"""How tasks are called: lists, generators, mistakes, several calls at a time; and which task a checkpoint gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bertie
from bertie import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from bertie.errors import ConfigError, InputError, NotFoundError
from bertie.nn.model import Model
from bertie.pipeline import pipeline
from tests.tasks.tiny import LABELS, document, sentences

Made = Callable[..., Path]
NLI = ["contradiction", "neutral", "entailment"]
LONG = document(40, seed=5)
# Short and long ones.
TEXTS = ["[MASK] " + text for text in [*sentences(6, seed=2), LONG, "a", LONG[300:900], "London"]]


def every(made: Made, **options: Any) -> dict[str, Callable[[Any], Any]]:
    """Each task as a function from texts to results."""
    classifier = Classifier.load(made("wordpiece", "ForSequenceClassification", labels=NLI), **options)
    reranker = Reranker.load(made("wordpiece", "ForSequenceClassification", labels=["relevant"]), **options)
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering"), **options)
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS), **options)
    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"), **options)
    embedder = Embedder.load(made("wordpiece", ""), **options)
    zero_shot = ZeroShot(classifier.checkpoint, **options)
    return {
        "classify": classifier.classify,
        "pairs": lambda texts: classifier.classify((text, "a river") for text in texts),
        "zero_shot": lambda texts: zero_shot.classify(texts, ["London", "history"]),
        "rerank": lambda texts: reranker.predict([("the river", text) for text in texts]).tolist(),
        "answer": lambda texts: reader.answer((("who", text) for text in texts), top_k=3),
        "tag": lambda texts: tagger.tag(texts, aggregation_strategy="simple"),
        "fill": filler.fill,
        "embed": lambda texts: list(embedder.embed_each(texts)),
    }


def numbers(result: Any) -> list[float]:
    """All scores of a result, in order, for a comparison up to rounding."""
    if isinstance(result, float):
        return [result]
    if hasattr(result, "vector"):
        return list(result.vector)
    if hasattr(result, "scores"):
        return [result.scores[key] for key in sorted(result.scores)]
    if hasattr(result, "masks"):
        return [candidate.score for mask in result.masks for candidate in mask.candidates]
    parts = result.spans if hasattr(result, "spans") else result.answers
    return [number for part in parts for number in (part.start, part.end, part.score)]


def test_results_do_not_depend_on_the_batch_and_keep_their_order(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    for task in every(made).values():
        together = [numbers(one) for one in task(TEXTS)]
        alone = [numbers(task([text])[0]) for text in TEXTS]
        with monkeypatch.context() as patch:
            patch.setattr(pipeline, "CHUNK_ITEMS", 3)
            patch.setattr(pipeline, "CPU_BATCH_TOKENS", 100)
            chunks = [numbers(one) for one in task(text for text in TEXTS)]
        for a, b, c in zip(together, alone, chunks, strict=True):
            assert len(a) > 0
            np.testing.assert_allclose(b, a, atol=3e-6)
            np.testing.assert_allclose(c, a, atol=3e-6)


def test_deterministic_runs_one_window_per_forward_pass(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text and window has a pass of its own, so that nothing of its neighbours can affect it."""
    sizes: list[int] = []
    true = Model.hidden

    def hidden(self: Model, batch: Any, head: str | None = None) -> Any:
        sizes.append(len(batch))
        return true(self, batch, head)

    monkeypatch.setattr(Model, "hidden", hidden)
    list(every(made)["embed"](TEXTS))
    assert max(sizes) > 1
    for name, task in every(made, deterministic=True).items():
        sizes.clear()
        together = [numbers(one) for one in task(TEXTS)]
        assert set(sizes) == {1}, name
        assert together == [numbers(task([text])[0]) for text in TEXTS]


def test_texts_that_fit_are_one_window(made: Made) -> None:
    """Whatever becomes of long texts, the others give bit for bit the same."""
    texts = [text for text in TEXTS if len(text) < 80]
    by_window, by_error = every(made), every(made, overflow="error")
    for name, task in by_window.items():
        for one, other in zip(task(texts), by_error[name](texts), strict=True):
            assert numbers(one) == numbers(other)
            if hasattr(one, "windows"):
                assert (one.windows, one.tokens_read) == (1, one.tokens_total)


def test_overflow_window_error_truncate(made: Made) -> None:
    items = ["[MASK] a", "[MASK] " + LONG]
    for name, task in every(made).items():
        for one in task(items) if name != "rerank" else []:
            assert one.tokens_read == one.tokens_total
    for name, task in every(made, overflow="truncate").items():
        if name != "rerank":
            short, cut = task(items)
            assert short.tokens_read == short.tokens_total
            assert (cut.windows, cut.tokens_read < 48 < cut.tokens_total) == (1, True)
    for name, task in every(made, overflow="error").items():
        what = {"answer": "question", "rerank": "pair"}.get(name, "text")
        with pytest.raises(InputError, match=rf"{what} 1 has \d\d\d+ tokens, but the maximum length is 48;"):
            task(items)


def test_errors_name_the_item(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_ITEMS", 2)
    for name, task in every(made).items():
        what = {"answer": "question", "rerank": "pair"}.get(name, "text")
        for wrong in (None, float("nan"), 7, b"bytes", "a\ud800"):
            with pytest.raises(InputError, match=rf"{what} 5.*(must be a str|lone surrogate)"):
                task(["[MASK] a"] * 5 + [wrong])
        assert task([]) == []
        assert len(task(np.array(["[MASK] a", "[MASK] b"]))) == 2


class Table:
    """As pandas' DataFrame: its columns' names are what it iterates over."""

    columns = ("text",)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


def test_invalid_arguments(made: Made) -> None:
    direct = {name: task for name, task in every(made).items() if name not in ("pairs", "rerank", "answer")}
    for task in direct.values():
        for wrong in (b"bytes", {"a": 1}, None, Table()):
            with pytest.raises(InputError, match="takes a list of texts"):
                task(wrong)
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering"))
    for wrong, message in (
        ((("who", "text"), "text"), "question 1 must be a pair"),
        ("who", "takes a question and its document"),
        ([("who", [])], "question 0 has no document"),
        ([("who", ["a", None])], "question 0, document 1 must be a str"),
        ([("who",)], "question 0 must be a pair .*, not 1 items"),
        ([{"question": "who", "context": "a"}], "question 0 must be a pair .*, not dict"),
    ):
        with pytest.raises(InputError, match=message):
            reader.answer(wrong)  # type: ignore[arg-type]
    for options in ({"top_k": 0}, {"max_answer_length": 0}):
        with pytest.raises(InputError, match="=0 must be at least 1"):
            reader.answer_each([], **options)
    reranker = Reranker.load(made("wordpiece", "ForSequenceClassification", labels=["relevant"]))
    with pytest.raises(InputError, match="document 1 must be a str, not NoneType"):
        reranker.rerank("who", ["a", None])  # type: ignore[list-item]
    with pytest.raises(InputError, match="takes a list of documents"):
        reranker.rerank("who", {"a": 1})
    with pytest.raises(InputError, match=r"zip\(questions, documents\)"):
        reader.answer(["who"], ["a"])  # type: ignore[call-overload]
    with pytest.raises(InputError, match=r"answer\(\[\(question, document\) for question in questions\]\)"):
        reader.answer(["who", "when"], "a")  # type: ignore[call-overload]
    with pytest.raises(InputError, match="pair 0 must be a query and a document, not str"):
        reranker.predict(["a"])  # type: ignore[list-item]
    classifier = Classifier.load(made("wordpiece", "ForSequenceClassification", labels=NLI))
    with pytest.raises(InputError, match="text 1 must be a pair of texts, not 3 items"):
        classifier.classify(["a", ("a", "b", "c")])  # type: ignore[list-item]
    with pytest.raises(InputError, match="one score"):
        Reranker(classifier.checkpoint).rerank("who", ["a"])
    zero_shot = ZeroShot(classifier.checkpoint)
    for labels, template, message in (
        ("ab", "{}", "list"),
        ([], "{}", "one or more"),
        (["a", "a"], "{}", "distinct"),
        (["a", None], "{}", "label 1 must be a str"),
        (["a"], "about", "must contain {}"),
        (["a"], "about {label}", "must contain {}"),
    ):
        with pytest.raises(InputError, match=message):
            zero_shot.classify_each(["x"], labels, template=template)  # type: ignore[arg-type]
    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    for options, message in (
        ({"candidates": [" "]}, "has no tokens"),
        ({"candidates": ["the", "☃"]}, "not in the vocabulary"),
        ({"candidates": []}, r"candidates=\[\] must not be empty"),
        ({"candidates": "the"}, "list of words"),
        ({"top_k": 0}, "top_k=0"),
    ):
        with pytest.raises(InputError, match=message):
            filler.fill_each(["[MASK]"], **options)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"text 1: no \[MASK\]"):
        filler.fill(["[MASK]", "a"])
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS))
    with pytest.raises(InputError, match="aggregation_strategy='last' must be one of"):
        tagger.tag_each([], aggregation_strategy="last")  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="entailment"):
        ZeroShot.load(made("wordpiece", "ForSequenceClassification", labels=["bad", "good"]))


def test_a_single_text_has_a_single_result(made: Made) -> None:
    classifier = Classifier.load(made("wordpiece", "ForSequenceClassification", labels=NLI))
    reranker = Reranker.load(made("wordpiece", "ForSequenceClassification", labels=["relevant"]))
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering"))
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS))
    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    embedder = Embedder.load(made("wordpiece", ""))
    zero_shot = ZeroShot(classifier.checkpoint)
    one, other = TEXTS[6], TEXTS[0]
    np.testing.assert_array_equal(embedder.embed(one), embedder.embed([one])[0])
    np.testing.assert_array_equal(embedder.encode(one), embedder.embed(one))
    assert embedder.similarity(one, other) == embedder.similarity([one], [other])[0, 0]
    np.testing.assert_array_equal(embedder.similarity(one, [other, one]), embedder.similarity([one], [other, one])[0])
    np.testing.assert_array_equal(
        embedder.similarity([other, one], one), embedder.similarity([other, one], [one])[:, 0]
    )
    with pytest.raises(InputError, match="two texts"):
        embedder.similarity(one)
    assert classifier.classify(one) == classifier.classify([one])[0]
    assert classifier.predict(one) == classifier.predict([one])[0]
    np.testing.assert_array_equal(classifier.predict_proba(one), classifier.predict_proba([one])[0])
    assert zero_shot.classify(one, ["London", "history"]) == zero_shot.classify([one], ["London", "history"])[0]
    assert tagger.tag(one) == tagger.tag([one])[0]
    assert filler.fill(one, top_k=2) == filler.fill([one], top_k=2)[0]
    assert filler.pseudo_log_likelihood(other) == filler.pseudo_log_likelihood([other])[0]
    assert reader.answer("who", one) == reader.answer(("who", one)) == reader.answer([("who", one)])[0]
    assert reader.answer("who", [other, one], top_k=3) == reader.answer([("who", [other, one])], top_k=3)[0]
    assert reranker.rerank("who", one) == reranker.rerank("who", [one])[0]
    assert reranker.predict(("who", one)) == reranker.predict([("who", one)])[0]
    assert len(classifier.classify((one, other))) == 2  # a tuple is a list of texts, here as elsewhere


def test_arguments_of_other_libraries(made: Made) -> None:
    embedder = Embedder.load(made("wordpiece", ""))
    for name, message in (
        ("batch_size", "leave it out"),
        ("show_progress_bar", "progress=True"),
        ("convert_to_tensor", "torch.from_numpy"),
        ("backend", "compiled encoder"),
        ("normalize_embeddings", "normalize=True to Embedder"),
        ("promt", "did you mean prompt="),
        ("colour", "it takes texts, prompt, prompt_name, progress"),
    ):
        with pytest.raises(TypeError, match=rf"embed\(\) has no argument '{name}': .*{message}"):
            embedder.encode(["a"], **{name: 1})  # type: ignore[arg-type]
    for task in (Classifier, Embedder, MaskedLM):
        with pytest.raises(TypeError, match=rf"{task.__name__}\(\) has no argument 'colour': it takes model, overflow"):
            task(colour="red")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Classifier.*'learning_rate': use lr="):
        Classifier(learning_rate=1e-3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'labels': .*fit\(texts, labels\)"):
        Classifier(made("wordpiece", "")).fit(["a"], labels=["b"])  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"classify\(\) has no argument 'labels': .*ZeroShot\(\)\.classify\(texts, labels\)"
    ):
        Classifier(made("wordpiece", "ForSequenceClassification")).classify("a", labels=["b"])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"'torch_dtype': pass precision= to load\(\)"):
        Embedder.load(made("wordpiece", ""), torch_dtype="float16")
    for load, name, message in (
        (Embedder.load, "normalise", r"did you mean normalize=\?"),
        (Embedder.load, "colour", "it takes name, overflow, pooling, normalize, .* precision"),
        (Classifier.load, "overflw", r"did you mean overflow=\?"),
        (MaskedLM.load, "precison", r"did you mean precision=\?"),
        (bertie.load, "hed", r"did you mean head=\?"),
    ):
        with pytest.raises(TypeError, match=rf"load\(\) has no argument '{name}': {message}"):
            load(**{name: "a"})  # type: ignore[arg-type, call-overload]
    with pytest.raises(TypeError, match=r"classify\(\) has no argument 'top_k': result\.scores has"):
        Classifier(made("wordpiece", "ForSequenceClassification")).classify("a", top_k=None)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"fill\(\) has no argument 'k': use top_k="):
        MaskedLM(made("wordpiece", "ForMaskedLM")).fill("a", k=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"cluster_texts\(\) has no argument 'n_clusters': did you mean clusters=\?"):
        bertie.cluster_texts(["a", "b"], n_clusters=2)  # type: ignore[call-arg]


def test_names_of_other_libraries(made: Made) -> None:
    embedder = Embedder(made("wordpiece", ""))
    for owner, name, message in (
        (bertie, "SentenceTransformer", "use bertie.Embedder"),
        (bertie, "EmbeddingTransformer", "use bertie.integrations.sklearn.EmbeddingTransformer"),
        (bertie, "util", "use Embedder.similarity, bertie.Index"),
        (bertie, "Embeder", "did you mean Embedder"),
        (Embedder, "from_pretrained", r"use load\(\)"),
        (embedder, "save_pretrained", r"use save\(folder\)"),
        (embedder, "get_sentence_embedding_dimension", "use .dimension"),
        (embedder, "get_embedding_dimension", "use .dimension"),
        (embedder, "config", "use .checkpoint.config"),
        (embedder, "max_seq_length", "use .checkpoint.max_length; longer texts are read in windows"),
        (embedder, "encode_query", 'use embed.texts, prompt_name="query"'),
        (embedder, "similarity_pairwise", r"use similarity.a, b..diagonal"),
        (embedder, "embd", "did you mean embed?"),
        (MaskedLM(made("wordpiece", "ForMaskedLM")), "cuda", 'use .to."cuda"'),
    ):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'; {message}"):
            getattr(owner, name)
    assert "model" not in embedder.__dict__
    with pytest.raises(AttributeError, match=r"no attribute 'colour'$"):
        _ = embedder.colour
    with pytest.raises(AttributeError, match=r"no attribute 'max_seq_length'; use \.checkpoint\.max_length"):
        embedder.max_seq_length = 128
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'epochs': hyperparameters are arguments of the"):
        Classifier().fit(["a"], ["b"], epochs=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'eval_dataset': use dev="):
        Classifier().fit(["a"], ["b"], eval_dataset=1)  # type: ignore[call-arg]


def test_what_is_no_list_of_texts(made: Made) -> None:
    embedder = Embedder.load(made("wordpiece", ""))
    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    pandas, polars, pyarrow = map(pytest.importorskip, ("pandas", "polars", "pyarrow"))
    expected = embedder.embed(["a", "b"])
    for texts in (
        ("a", "b"),
        np.array(["a", "b"]),
        np.array(["a", "b"], dtype=object),
        pandas.Series(["a", "b"], index=[7, 9]),
        polars.Series(["a", "b"]),
        pyarrow.array(["a", "b"]),
        pyarrow.chunked_array([["a"], ["b"]]),
        (text for text in "ab"),
        ["a", np.str_("b")],
    ):
        np.testing.assert_array_equal(embedder.embed(texts), expected)
    table = {"text": ["a"], "label": [1]}
    for wrong, message in (
        (pandas.DataFrame(table), r"not DataFrame; pass the text column, as in table\['text'\]"),
        (polars.DataFrame(table), r"table\['text'\]"),
        (pyarrow.table(table), r"not Table; .* table\['text'\]"),
        (table, r"not dict; .* table\['text'\]"),
        ({"a", "b"}, "not set; its order is undefined"),
        (b"a", "not bytes; decode it"),
        (np.array("a"), "not ndarray; wrap"),
        ([None], "text 0 must be a str, not NoneType; leave out missing texts"),
        (["a", float("nan")], "text 1 must be a str, not float; leave out missing texts"),
        (pandas.Series(["a", None]), "text 1 must be a str, not .*; leave out missing texts"),
        ([b"a"], "text 0 must be a str, not bytes; decode it"),
        ([["a", "b"]], "text 0 must be a str, not list; join words .* Tagger.predict"),
        (np.array([["a"]]), r"text 0 must be a str, not ndarray; .* array\[:, 0\]"),
    ):
        with pytest.raises(InputError, match=message):
            embedder.embed(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"not DataFrame; pass its columns, as in list\(zip\(table\['text'\], table"):
        Reader(made("wordpiece", "ForQuestionAnswering")).answer(pandas.DataFrame(table))
    with pytest.raises(InputError, match=r"use compare\(a, b\) for embeddings"):
        embedder.similarity(expected, expected)
    for top_k in ("3", 2.5, True):
        with pytest.raises(InputError, match=f"top_k={top_k!r} must be a whole number"):
            filler.fill("[MASK]", top_k=top_k)  # type: ignore[arg-type]


def test_devices(made: Made) -> None:
    embedder = Embedder(made("wordpiece", ""), device="cpu")
    assert embedder.device.type == "cpu"
    assert "model" not in embedder.__dict__  # asking does not load it
    assert embedder.to("cpu") is embedder
    assert MaskedLM(made("wordpiece", "ForMaskedLM"), device="cpu").to("cpu").device.type == "cpu"
    for device in ("gpu", "meta:7x", "cuda:99"):
        with pytest.raises(ConfigError, match=f"device='{device}' cannot be used on this machine"):
            embedder.to(device)
    with pytest.raises(ConfigError, match="device='gpu' cannot be used on this machine"):
        Embedder(made("wordpiece", ""), device="gpu").embed("a")
    int8 = Embedder.load(made("wordpiece", ""), precision="int8")
    with pytest.raises(ConfigError, match="int8, which runs on a CPU only"):
        int8.to("meta")


def test_a_gpu_is_the_default_device(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made("wordpiece", "")

    def show(device: str) -> None:
        raise Seen(device)

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("bertie.checkpoints.checkpoint.usable_device", show)
    for load in (Embedder.load, MaskedLM, bertie.Checkpoint.load):
        with pytest.raises(Seen, match="cuda"):
            load(folder)
    with pytest.raises(Seen, match="cpu"):
        Embedder.load(folder, precision="int8")


class Seen(Exception):
    """The device that a model would be loaded on."""


def test_displays(made: Made) -> None:
    embedder = Embedder(made("wordpiece", ""), batch_size=8)
    assert repr(embedder).endswith("batch_size=8, loaded=False)")
    embedder.embed("a")
    assert "device='cpu', precision='fp32', max_length=48, dimension=32" in repr(embedder)
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS))
    assert "labels=['O', 'B-PER'" in repr(tagger)
    long = tagger.tag("<b>London</b> " * 200, ignore_labels=())
    assert len(repr(long)) < 2000
    assert "tokens_total=" in repr(long)
    assert "tokens_total" not in repr(tagger.tag("London"))
    for shown in (embedder, tagger, long, tagger.tag("London"), next(embedder.embed_each(["a"]))):
        html = shown._repr_html_()
        assert html.startswith("<table>")
        assert len(html) < 20_000
        assert "<b>London" not in html


def test_concurrent_iterators_are_independent(made: Made) -> None:
    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    texts = TEXTS[:4]
    five, one = filler.fill_each(texts), filler.fill_each(texts, top_k=1, candidates=["o", "a"])
    mixed = [pair for both in zip(five, one, strict=True) for pair in both]
    assert mixed[::2] == filler.fill(texts)
    assert mixed[1::2] == filler.fill(texts, top_k=1, candidates=["o", "a"])
    tagger = Tagger.load(made("wordpiece", "ForTokenClassification", labels=LABELS))
    none, average = tagger.tag_each(texts, aggregation_strategy="none"), tagger.tag_each(texts, ignore_labels=())
    assert next(average) == tagger.tag(texts, ignore_labels=())[0]
    assert list(none) == tagger.tag(texts, aggregation_strategy="none")
    reader = Reader.load(made("wordpiece", "ForQuestionAnswering"))
    asked = [("who", text) for text in texts]
    two, three = reader.answer_each(asked, top_k=2), reader.answer_each(asked, top_k=3, max_answer_length=2)
    assert next(three) == reader.answer(asked, top_k=3, max_answer_length=2)[0]
    assert list(two) == reader.answer(asked, top_k=2)


def test_iterators_read_one_chunk_ahead(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_ITEMS", 4)
    taken = []

    def endless() -> Iterator[str]:
        while True:
            taken.append(1)
            yield "[MASK] a"

    filler = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    results = filler.fill_each(endless())
    for _ in range(5):
        next(results)
    assert len(taken) <= 8


def test_empty_texts(made: Made) -> None:
    for name, task in every(made).items():
        if name != "fill":
            assert len(task(["", " ", "a"])) == 3


@pytest.mark.parametrize(
    ("head", "labels", "task"),
    [
        ("ForMaskedLM", None, MaskedLM),
        ("ForPreTraining", None, MaskedLM),
        ("ForSequenceClassification", ["bad", "good"], Classifier),
        ("ForSequenceClassification", ["value"], Classifier),
        ("ForTokenClassification", LABELS, Tagger),
        ("ForQuestionAnswering", None, Reader),
        ("", None, Embedder),
    ],
)
def test_load(made: Made, head: str, labels: list[str] | None, task: type) -> None:
    found = bertie.load(made("wordpiece", head, labels=labels), overflow="error")
    assert type(found) is task
    assert found.overflow == "error"


def test_load_sentence_transformers_folders(made: Made, tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder, SentenceTransformer

    SentenceTransformer(str(made("wordpiece", "")), device="cpu").save(str(tmp_path / "sentence"))
    assert type(bertie.load(tmp_path / "sentence")) is Embedder
    for labels, task in ((["relevant"], Reranker), (NLI, Classifier)):
        base_folder = made("wordpiece", "ForSequenceClassification", labels=labels)
        CrossEncoder(str(base_folder), device="cpu").save(str(tmp_path / labels[0]))
        assert type(bertie.load(tmp_path / labels[0])) is task


def test_missing_heads_and_tokenizers(made: Made, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no head 'tag'; it has: .*; train one with bertie\.Tagger\(…\)\.fit"):
        Tagger.load(made("wordpiece", "ForMaskedLM"))
    for file in made("wordpiece", "").iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(NotFoundError, match="has no tokenizer"):
        bertie.load(tmp_path)


def test_pseudo_log_likelihood_masks_one_token_at_a_time(made: Made) -> None:
    model = MaskedLM.load(made("wordpiece", "ForMaskedLM"))
    tokenizer, text = model.tokenizer, "the river was beautiful"
    (got,) = model.pseudo_log_likelihood([text])
    assert got.log_likelihood == pytest.approx(sum(got.token_log_likelihoods), abs=1e-4)
    encoding = tokenizer.encode(text)
    assert len(got.token_log_likelihoods) == len(encoding) - 2 == got.tokens_read
    import torch

    for at, score in enumerate(got.token_log_likelihoods, 1):
        ids = encoding.ids.tolist()
        ids[at] = tokenizer.mask_id
        with torch.no_grad():
            logits = model.model(bertie.Batch.from_ids([ids]), "mlm")[at]
        assert score == pytest.approx(float(logits.log_softmax(-1)[encoding.ids[at]]), abs=1e-5)
    tokens = model.predict_tokens(text, top_k=3)
    assert [one.log_likelihood for one in tokens.tokens] == pytest.approx(got.token_log_likelihoods, abs=1e-5)
    assert tokens.log_likelihood == pytest.approx(got.log_likelihood, abs=1e-4)
    for at, one in enumerate(tokens.tokens, 1):
        start, end = encoding.offsets[at].tolist()
        assert (one.text, one.start, one.end) == (text[start:end], start, end)
        ids = [*encoding.ids[:at], tokenizer.mask_id, *encoding.ids[at + 1 :]]
        with torch.no_grad():
            probabilities = model.model(bertie.Batch.from_ids([ids]), "mlm")[at].softmax(-1)
        assert one.rank == 1 + int((probabilities > probabilities[encoding.ids[at]]).sum())
        best = probabilities[: tokenizer.vocab_size].topk(3)
        assert [candidate.score for candidate in one.candidates] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert model.predict_tokens("").tokens == ()
    assert model.pseudo_log_likelihood("").log_likelihood == 0
    (long,) = model.pseudo_log_likelihood([LONG[:600]])
    assert long.windows > 1
    assert len(long.token_log_likelihoods) == long.tokens_read == long.tokens_total
