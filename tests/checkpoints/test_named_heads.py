"""Heads on an encoder that is there already: fresh, kept, named; saved as transformers would have saved them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers.models.auto import modeling_auto

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.checkpoints.cross_encoder import CrossEncoderConfig
from bertie.checkpoints.model_spec import FAMILIES
from bertie.config import PAIR_LABELS, Calibration, HeadInfo, HeadName
from bertie.errors import BertieError, CheckpointError, ConfigError, NotFoundError
from bertie.nn.model import Model
from bertie.text.batch import Batch
from tests.checkpoints.test_roundtrip import assert_same, parameters, sentence_folder, with_tokenizer
from tests.parity.test_transformers import their_outputs
from tests.parity.tiny import TINY, build, texts

LABELS = ["no", "maybe", "yes", "don't know"]
SINGLE, MULTI, VALUE = "single_label_classification", "multi_label_classification", "regression"
AUTO: dict[HeadName, tuple[str, Any]] = {
    "classify": ("ForSequenceClassification", transformers.AutoModelForSequenceClassification),
    "tag": ("ForTokenClassification", transformers.AutoModelForTokenClassification),
    "answer": ("ForQuestionAnswering", transformers.AutoModelForQuestionAnswering),
    "mlm": ("ForMaskedLM", transformers.AutoModelForMaskedLM),
}
WITH_HEADS = {family.model_type for family in FAMILIES.values() if not family.decoder}
ENCODERS = {
    tiny.model_type: name
    for name, tiny in reversed(TINY.items())
    if "Model" in tiny.heads and tiny.model_type in WITH_HEADS
}
assert set(ENCODERS) == WITH_HEADS
# Wherever transformers has a class.
CLASSES: dict[HeadName, Any] = {
    "classify": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "tag": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "answer": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}
HEADS: list[tuple[str, HeadName]] = [
    (name, head)
    for name in [*ENCODERS.values(), "modernbert-mean", "deberta-v3", "eurobert-tied"]
    for head, classes in CLASSES.items()
    if TINY[name].model_type in classes
]
HEADS += [(name, "mlm") for name in ("bert", "modernbert", "deberta-v3", "eurobert")]


def labels_of(head: HeadName) -> list[str] | None:
    return LABELS if head in ("classify", "tag") else None


def problem_of(head: HeadName) -> str | None:
    return MULTI if head == "classify" else None


def read(folder: Path, file: str = "config.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / file).read_text())
    return found


def write(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "checksums.json").unlink(missing_ok=True)


def shaken(checkpoint: Checkpoint, *heads: str) -> Checkpoint:
    """With weights in these heads that are large enough to show a mistake."""
    torch.manual_seed(3)
    with torch.no_grad():
        for head in heads:
            for parameter in checkpoint.model.head(head).parameters():
                parameter.add_(torch.randn_like(parameter) * 0.25)
    return checkpoint


def saved(folder: Path, name: str = "bert", suffix: str = "Model") -> Path:
    build(name, suffix).save_pretrained(folder)
    return folder


def theirs_from(auto: Any, folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    model, told = auto.from_pretrained(folder, output_loading_info=True, **options)
    return model.eval(), told


def assert_clean(told: dict[str, Any], unused: str = " ") -> None:
    found = {key: [name for name in value if not name.startswith(unused)] for key, value in told.items()}
    assert found == {key: [] for key in told}


# --- one fresh head ---


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_every_family_in_transformers(name: str, head: HeadName, tmp_path: Path) -> None:
    suffix, auto = AUTO[head]
    saved(tmp_path / "a", name, "Model" if "Model" in TINY[name].heads else "ForMaskedLM")
    first = Checkpoint.load(tmp_path / "a")
    made = shaken(first.with_head(head, labels_of(head), problem=problem_of(head)), head)
    assert list(made.model.heads) == list(made.heads) == [head]
    assert all(p is q for p, q in zip(first.model.encoder.parameters(), made.model.encoder.parameters(), strict=True))
    made.save(tmp_path / "b")

    theirs, told = theirs_from(auto, tmp_path / "b")
    assert type(theirs).__name__ == TINY[name].stem + suffix
    # BigBird's classes carry a pooler that they never use.
    assert_clean(told, unused="bert.pooler." if name == "big_bird" else " ")
    ids, segments = texts(name, suffix, 4, seed=2)
    wanted = torch.cat([their_outputs(theirs, i, s)[head] for i, s in zip(ids, segments, strict=True)])
    assert wanted.std() > 0.01
    with torch.no_grad():
        assert_close(made.model(Batch.from_ids(ids, segments), head), wanted, atol=1e-5, rtol=0)

    back = Checkpoint.load(tmp_path / "b")
    assert_same(parameters(back), parameters(made))
    assert back.heads == made.heads

    # What transformers itself writes, when it puts this head on that encoder.
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {one: i for i, one in enumerate(LABELS)}}
    options = (names if labels_of(head) else {}) | ({"problem_type": MULTI} if problem_of(head) else {})
    if options or head != "mlm":
        theirs_from(auto, tmp_path / "a", **options)[0].save_pretrained(tmp_path / "c")
        assert read(tmp_path / "b") == read(tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "source", "head", "expected"),
    [
        ("bert", "Model", "classify", {"dense.weight", "dense.bias"}),
        ("bert", "ForPreTraining", "classify", {"dense.weight", "dense.bias"}),
        ("bert", "ForMultipleChoice", "classify", {"dense.weight", "dense.bias"}),
        ("bert", "ForMaskedLM", "classify", set()),
        ("bert", "Model", "tag", set()),
        ("albert", "Model", "classify", {"dense.weight", "dense.bias"}),
        ("roberta", "Model", "classify", set()),  # its classifier has a dense layer of its own
        ("modernbert", "ForMaskedLM", "classify", {"dense.weight", "norm.weight"}),
        ("modernbert-mean", "ForMaskedLM", "answer", {"dense.weight", "dense.bias", "norm.weight", "norm.bias"}),
        ("modernbert", "Model", "tag", set()),
        ("big_bird", "Model", "classify", set()),
    ],
)
def test_what_is_taken_over(name: str, source: str, head: HeadName, expected: set[str], tmp_path: Path) -> None:
    """All that transformers finds under the same names, but for the outputs."""
    saved(tmp_path / "a", name, source)
    first = Checkpoint.load(tmp_path / "a")
    before = {key: value.clone() for key, value in parameters(first).items()}
    made = first.with_head(head, labels_of(head), problem=problem_of(head))
    fresh = Checkpoint.load(tmp_path / "a").with_head(head, labels_of(head), problem=problem_of(head), seed=1)
    parts = dict(made.model.head(head).named_parameters())
    matrices = {part for part, p in parts.items() if p.ndim > 1}
    held = {part for part in matrices if torch.equal(parts[part], fresh.model.head(head).get_parameter(part))}
    assert held == expected & matrices
    made.save(tmp_path / "b")
    options = {"id2label": dict(enumerate(LABELS)), "label2id": {}} if labels_of(head) else {"num_labels": 2}
    theirs, told = theirs_from(AUTO[head][1], tmp_path / "a", ignore_mismatched_sizes=True, **options)
    named = load_file(tmp_path / "b" / "model.safetensors")
    unlike = {key for key, *_ in told["mismatched_keys"]} | set(told["missing_keys"])
    common = [key for key in theirs.state_dict() if key not in unlike and not key.startswith("bert.pooler.")]
    common += [key for key in named if key.startswith("bert.pooler.") and key not in unlike]
    assert all(torch.equal(theirs.state_dict()[key], named[key]) for key in common)
    rules = {rule.ours.removeprefix(f"heads.{head}."): rule.theirs[0] for rule in made.spec.weight_map.rules}
    assert {part for part in parts if rules[part] in common} == expected
    assert_same(parameters(first), before)


def test_fresh_weights(tmp_path: Path) -> None:
    first = Checkpoint.load(saved(tmp_path, "bert", "ForMaskedLM"))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    one, same, other = (first.with_head("classify", [str(i) for i in range(500)], seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(parameters(one), parameters(same))
    assert not torch.equal(one.model.head("classify").out.weight, other.model.head("classify").out.weight)
    head = one.model.head("classify")
    assert abs(head.out.weight.std() / first.model.config.init_std - 1) < 0.05
    assert not head.out.bias.any()
    assert all(p.requires_grad for p in head.parameters())
    assert not one.model.training
    big_bird = Checkpoint.load(saved(tmp_path / "b", "big_bird")).with_head("answer").model.head("answer")
    assert torch.equal(big_bird.residual.norm.weight, torch.ones(16))  # type: ignore[arg-type]
    assert not big_bird.residual.norm.bias.any()
    half = Checkpoint.load(tmp_path, precision="bf16").with_head("tag", ["O", "X"])
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    inspected = Checkpoint.inspect(tmp_path).with_head("tag", ["O", "X"])
    assert {p.device.type for p in inspected.model.parameters()} == {"meta"}


def test_kept(tmp_path: Path) -> None:
    first = Checkpoint.load(saved(tmp_path / "a")).with_head("classify", LABELS)
    head = first.model.head("classify")

    def kept(*arguments: Any, **options: Any) -> bool:
        made = first.with_head(*arguments, **options)
        assert made.spec.heads[arguments[0]].outputs == made.model.head(arguments[0]).cfg.outputs
        return made.model.head(arguments[0]) is head

    assert kept("classify")
    assert kept("classify", LABELS)
    assert kept("classify", tuple(LABELS), problem=SINGLE)  # what several classes mean where nobody says
    assert not kept("classify", LABELS, problem=MULTI)
    assert not kept("classify", LABELS, problem=VALUE)
    assert not kept("classify", LABELS[::-1])
    assert not kept("classify", LABELS[:3])
    assert not kept("tag", LABELS)
    first = first.with_head("classify", LABELS, problem=MULTI)
    head = first.model.head("classify")
    assert kept("classify")
    assert first.with_head("classify").config["problem_type"] == MULTI
    assert not kept("classify", LABELS)
    first = first.with_head("classify", problem=VALUE, labels=["x"])
    head = first.model.head("classify")
    assert kept("classify", ["x"])
    assert first.with_head("classify", ["x"]).heads["classify"].problem == VALUE
    first = first.with_head("answer")
    head = first.model.head("answer")
    assert kept("answer")

    # The pretraining head, in the layout that it came in.
    for name in ("bert", "deberta-v3", "deberta-v3-new-head"):
        saved(tmp_path / name, name, "ForMaskedLM")
        config = read(tmp_path / name)
        write(tmp_path / name, {k: v for k, v in config.items() if k not in ("legacy", "architectures")})
        Checkpoint.load(tmp_path / name).with_head("mlm").save(tmp_path / name, overwrite=True)
        theirs, told = theirs_from(transformers.AutoModelForMaskedLM, tmp_path / name)
        assert_clean(told)
        assert_same(theirs.state_dict(), build(name, "ForMaskedLM").state_dict())


def test_fresh_in_the_layout_that_the_config_names(tmp_path: Path) -> None:
    saved(tmp_path / "a", "deberta-v3")
    write(tmp_path / "a", read(tmp_path / "a") | {"legacy": False})
    Checkpoint.load(tmp_path / "a").with_head("mlm").save(tmp_path / "b")
    assert "lm_predictions.lm_head.dense.weight" in load_file(tmp_path / "b" / "model.safetensors")
    assert_clean(theirs_from(transformers.AutoModelForMaskedLM, tmp_path / "b")[1])


def test_what_cannot_be_made(tmp_path: Path) -> None:
    first = Checkpoint.load(saved(tmp_path / "a"))
    with pytest.raises(ConfigError, match=r"head='answer' is not available for eurobert; it has: mlm, classify, tag"):
        Checkpoint.load(saved(tmp_path / "b", "eurobert")).with_head("answer")
    for wrong, named in (
        (("pooler",), "head='pooler'"),
        (("translate",), "head='translate'"),
        (("classify",), "labels=None"),
        (("tag", None), "labels=None"),
        (("classify", []), r"labels=\[\]"),
        (("classify", "yes"), "labels='yes'"),
        (("classify", ["a", "a"]), "all different"),
        (("classify", ["a", 2]), "names"),
        (("answer", ["a", "b"]), "labels=.*'answer'"),
    ):
        with pytest.raises(ConfigError, match=named):
            first.with_head(*wrong)
    for head, labels, problem in (("tag", ["a"], SINGLE), ("classify", ["a"], SINGLE), ("classify", ["a"], "x")):
        with pytest.raises(ConfigError, match=r"problem=|2 or more"):
            first.with_head(head, labels, problem=problem)  # type: ignore[arg-type]
    assert first.with_head("classify", problem=VALUE).config["id2label"] == {"0": "LABEL_0"}


def test_old_config_keys_about_labels_are_gone(tmp_path: Path) -> None:
    saved(tmp_path / "a", "bert", "ForSequenceClassification")
    write(tmp_path / "a", read(tmp_path / "a") | {"num_labels": 3, "_num_labels": 3, "problem_type": MULTI})
    Checkpoint.load(tmp_path / "a").with_head("answer").save(tmp_path / "b")
    config = read(tmp_path / "b")
    assert config["architectures"] == ["BertForQuestionAnswering"]
    assert not {"num_labels", "_num_labels", "problem_type", "id2label", "label2id"} & set(config)
    assert Checkpoint.load(tmp_path / "b").model.head("answer").cfg.outputs == 2


def test_ignored_keys_stay_ignored(tmp_path: Path) -> None:
    saved(tmp_path)
    write(tmp_path, read(tmp_path) | {"my_note": 1})
    made = Checkpoint.load(tmp_path, ignore=["my_note"]).with_head("answer")
    assert made.config["my_note"] == 1


def test_sentence_vectors_and_pairs_are_left_behind(tmp_path: Path) -> None:
    sentence = Checkpoint.load(sentence_folder(tmp_path / "s", "0_Transformer"))
    assert sentence.max_length == 24
    made = sentence.with_head("classify", ["a", "b"])
    assert made.sentence is None
    assert made.max_length == 32  # as tokenizer_config.json says
    made.save(tmp_path / "b")
    assert {p.name for p in (tmp_path / "b").iterdir()} >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not (tmp_path / "b" / "modules.json").exists()
    assert Checkpoint.load(tmp_path / "b").max_length == 32

    folder = with_tokenizer(tmp_path / "c", "ForSequenceClassification")
    write(folder, read(folder) | {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"})
    pairs = Checkpoint.load(folder)
    assert pairs.cross_encoder is not None
    made = pairs.with_head("classify", ["score"])
    assert made.cross_encoder is None
    made.save(tmp_path / "d")
    assert "sbert_ce_default_activation_function" not in read(tmp_path / "d")
    made.cross_encoder = CrossEncoderConfig.create(1)
    made.save(tmp_path / "e")
    again = Checkpoint.load(tmp_path / "e")
    assert again.cross_encoder is not None
    assert again.cross_encoder.activation == "Sigmoid"


# --- max_length ---


def test_a_lower_reach_is_saved(tmp_path: Path) -> None:
    import sentence_transformers

    first = Checkpoint.load(with_tokenizer(tmp_path / "a"))
    assert first.max_length == 32
    lower = first.with_max_length(12)
    assert (first.max_length, lower.max_length) == (32, 12)
    assert lower.with_head("answer").max_length == 12
    lower.save(tmp_path / "b")
    assert Checkpoint.load(tmp_path / "b").max_length == 12
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "b").model_max_length == 12
    for wrong in (0, -1, 33, 12.0, True, None):
        with pytest.raises(ConfigError, match=r"max_length=.*from 1 to 32"):
            first.with_max_length(wrong)  # type: ignore[arg-type]

    sentence = Checkpoint.load(sentence_folder(tmp_path / "s", ""))
    lower = sentence.with_max_length(9)
    assert (sentence.max_length, lower.max_length) == (24, 9)
    lower.save(tmp_path / "t")
    assert Checkpoint.load(tmp_path / "t").max_length == 9
    assert sentence_transformers.SentenceTransformer(str(tmp_path / "t"), device="cpu").max_seq_length == 9

    pairs = first.with_head("classify", ["score"])
    pairs.cross_encoder = CrossEncoderConfig.create(1, max_length=20)
    lower = pairs.with_max_length(10)
    assert (pairs.max_length, lower.max_length) == (20, 10)
    lower.save(tmp_path / "p")
    assert Checkpoint.load(tmp_path / "p").max_length == 10
    assert sentence_transformers.CrossEncoder(str(tmp_path / "p"), device="cpu").max_length == 10


# --- what the heads are for ---


def test_heads_of_an_ordinary_checkpoint(tmp_path: Path) -> None:
    found = Checkpoint.load(saved(tmp_path / "a", "bert", "ForPreTraining"))
    assert found.heads == {"mlm": HeadInfo("mlm", {}), "nsp": HeadInfo("nsp", PAIR_LABELS["nsp"])}
    found = Checkpoint.load(saved(tmp_path / "b", "bert", "ForSequenceClassification"))
    assert found.heads == {"classify": HeadInfo("classify", {i: f"LABEL_{i}" for i in range(3)})}
    assert found.labels == found.heads["classify"].labels
    write(tmp_path / "b", read(tmp_path / "b") | {"problem_type": MULTI})
    assert Checkpoint.load(tmp_path / "b").heads["classify"].problem == MULTI


def test_calibration_is_kept(tmp_path: Path) -> None:
    calibration = Calibration(temperature=1.75, threshold=0.3, abstain_below=0.8, precision=0.95)
    first = Checkpoint.load(saved(tmp_path / "a", "bert", "ForSequenceClassification"))
    first.save(tmp_path / "plain")
    assert "bertie" not in read(tmp_path / "plain")
    first.set_calibration("classify", calibration)
    with pytest.raises(NotFoundError, match="'tag'"):
        first.set_calibration("tag", calibration)
    first.save(tmp_path / "b")
    assert set(read(tmp_path / "b")["bertie"]) == {"calibration"}
    back = Checkpoint.load(tmp_path / "b")
    assert back.heads == first.heads
    assert back.heads["classify"].calibration == calibration
    assert "bertie" not in back.config
    back.set_calibration("classify", Calibration())
    back.save(tmp_path / "c")
    assert "bertie" not in read(tmp_path / "c")
    # transformers carries it along.
    theirs, told = theirs_from(transformers.AutoModelForSequenceClassification, tmp_path / "b")
    assert_clean(told)
    theirs.save_pretrained(tmp_path / "d")
    assert Checkpoint.load(tmp_path / "d").heads["classify"].calibration == calibration
    # A head that is trained on is another one.
    assert first.with_head("classify").heads["classify"].calibration == Calibration()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": 0}, "temperature=0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e-40}, "temperature=1e-40"),  # logits divided by it are not finite
        ({"threshold": float("nan")}, "threshold=nan"),
        ({"abstain_below": float("nan")}, "abstain_below=nan"),
        ({"threshold": 1.2}, "threshold=1.2"),
        ({"abstain_below": -0.1}, "abstain_below=-0.1"),
        ({"precision": 95}, "precision=95"),
    ],
)
def test_calibration_is_checked(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        Calibration(**fields)


def test_head_info_is_checked() -> None:
    for wrong in (("sing",), ("classify", {1: "a"}), ("classify", {0: "a"}, "guess")):
        with pytest.raises(ConfigError, match="HeadInfo"):
            HeadInfo(*wrong)


# --- named heads ---

TOPICS = HeadInfo("classify", dict(enumerate(LABELS)), SINGLE, Calibration(temperature=2.0))
PARTS = HeadInfo("tag", {0: "O", 1: "B-X", 2: "I-X"})
RANK = HeadInfo("classify", {0: "LABEL_0"}, None, Calibration(abstain_below=0.25), "rerank")
READER = HeadInfo("answer", {})
NAMED = {"topics": TOPICS, "parts-of_2": PARTS, "rank": RANK, "answer": READER}


def add_all(checkpoint: Checkpoint) -> Checkpoint:
    for name, info in NAMED.items():
        checkpoint.add_head(name, info)
    return shaken(checkpoint, *NAMED)


@pytest.mark.parametrize("name", ["bert", "modernbert", "distilbert", "big_bird", "longformer", "deberta-v3"])
def test_named_heads(name: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", name, "ForMaskedLM")
    first = Checkpoint.load(tmp_path / "a")
    own = dict(first.heads)
    add_all(first)
    first.save(tmp_path / "b")
    back = Checkpoint.load(tmp_path / "b")
    assert back.heads == own | NAMED
    assert_same(parameters(back), parameters(first))
    assert not back.model.training
    ids, segments = texts(name, "ForQuestionAnswering", 4, seed=1)
    batch = Batch.from_ids(ids, segments)
    with torch.no_grad():
        for head, info in NAMED.items():
            found = back.model(batch, head)
            assert torch.equal(found, first.model(batch, head))
            # The same numbers as the family's own class with such a head.
            alone = Checkpoint.load(tmp_path / "a").with_head(info.kind, list(info.labels.values()) or None)
            alone.model.head(info.kind).load_state_dict(first.model.head(head).state_dict())
            assert torch.equal(found, alone.model(batch, info.kind))
    # For transformers, nothing has changed.
    _, told = theirs_from(transformers.AutoModelForMaskedLM, tmp_path / "b")
    assert_clean(told)
    assert_same(*(load_file(tmp_path / folder / "model.safetensors") for folder in "ba"))
    config = read(tmp_path / "b")
    assert set(config.pop("bertie")) == {"heads"}
    assert config == read(tmp_path / "a")


def test_one_folder_for_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Masked words, sentence vectors and named heads, in a folder that others read as they always did."""
    import sentence_transformers

    folder = sentence_folder(tmp_path / "a", "0_Transformer")
    build("bert", "ForMaskedLM").save_pretrained(folder / "0_Transformer")
    first = add_all(Checkpoint.load(folder))
    first.save(tmp_path / "b")
    inner = tmp_path / "b" / "0_Transformer"
    assert (inner / "heads.safetensors").is_file()
    assert "0_Transformer/heads.safetensors" in read(tmp_path / "b", "checksums.json")
    back = Checkpoint.load(tmp_path / "b")
    assert list(back.model.heads) == ["mlm", *sorted(NAMED)]
    assert back.sentence is not None
    logging.getLogger("transformers").propagate = True
    with caplog.at_level(logging.WARNING):
        assert_clean(theirs_from(transformers.AutoModelForMaskedLM, inner)[1])
        model = sentence_transformers.SentenceTransformer(str(tmp_path / "b"), device="cpu")
    # A bare encoder has no use for what fills masks, and says so; of named heads nobody speaks.
    said = " ".join(record.message for record in caplog.records)
    assert "cls.predictions" in said
    assert not [name for name in NAMED if f"{name}." in said]
    assert first.tokenizer is not None
    batch = Batch.from_encodings(first.tokenizer.encode_batch(["the cat sat", "a mat"]))
    with torch.no_grad():
        ours = back.sentence(back.model.hidden(batch), batch)
    assert_close(ours, torch.from_numpy(model.encode(["the cat sat", "a mat"])), atol=1e-5, rtol=0)
    # Saved by Bertie again, nothing changes; with another head, the named ones stay behind.
    back.save(tmp_path / "c")
    for file in (p for p in (tmp_path / "b").rglob("*") if p.is_file()):
        assert file.read_bytes() == (tmp_path / "c" / file.relative_to(tmp_path / "b")).read_bytes(), file.name
    alone = back.with_head("tag", ["O", "X"])
    alone.save(tmp_path / "d")
    assert list(Checkpoint.load(tmp_path / "d").heads) == ["tag"]
    assert not (tmp_path / "d" / "heads.safetensors").exists()


@pytest.fixture(scope="module")
def named_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("named")
    add_all(Checkpoint.load(saved(base / "a", "bert", "ForSequenceClassification"))).save(base / "b")
    return base / "b"


@pytest.fixture
def named(named_folder: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(named_folder, tmp_path / "m"))


def test_names(named: Path) -> None:
    first = Checkpoint.load(named)
    for wrong in ("", " ", "a b", "a.b", "ü", "a/b", "topics", "classify", "type", "keys", "train", 3, None):
        with pytest.raises(ConfigError, match="head "):
            first.add_head(wrong, PARTS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'mlm' of kind 'tag'"):
        first.add_head("mlm", PARTS)
    with pytest.raises(ConfigError, match="all different"):
        first.add_head("x", replace(PARTS, labels={0: "a", 1: "a"}))
    with pytest.raises(ConfigError, match="head='sop' is not available for bert"):
        first.add_head("x", HeadInfo("sop", {}))
    assert list(first.heads) == list(first.model.heads) == ["classify", *sorted(NAMED)]
    with pytest.raises(NotFoundError, match=r"no head 'x'; it has: classify, answer, parts-of_2"):
        first.model.head("x")


def test_named_heads_take_over_and_are_seeded(tmp_path: Path) -> None:
    first = Checkpoint.load(saved(tmp_path))
    state = torch.get_rng_state()
    for name, seed in (("one", 0), ("same", 0), ("other", 1)):
        first.add_head(name, TOPICS, seed=seed)
    assert torch.equal(torch.get_rng_state(), state)
    one, same, other = (first.model.head(name) for name in ("one", "same", "other"))
    assert torch.equal(one.out.weight, same.out.weight)
    assert not torch.equal(one.out.weight, other.out.weight)
    pooler = first.model.head("pooler").dense.weight
    assert torch.equal(one.dense.weight, pooler)
    assert one.dense.weight is not pooler
    assert one.dense.weight is not same.dense.weight


def test_precision_and_inspection(named: Path) -> None:
    half = Checkpoint.load(named, precision="bf16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    inspected = Checkpoint.inspect(named)
    assert inspected.heads == Checkpoint.load(named).heads
    assert {p.device.type for p in inspected.model.parameters()} == {"meta"}


def spoil_tensors(change: Callable[[dict[str, torch.Tensor]], object], folder: Path) -> None:
    tensors = load_file(folder / "heads.safetensors")
    change(tensors)
    save_file(tensors, folder / "heads.safetensors")
    (folder / "checksums.json").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("topics.out.weight"), "missing: topics.out.weight"),
        (lambda t: t.update({"topics.out.more": torch.zeros(1)}), "unexpected: topics.out.more"),
        (lambda t: t.update({"rank.out.bias": torch.zeros(2)}), r"rank.out.bias has shape \(2,\)"),
        (
            lambda t: t.update({"rank.out.bias": torch.zeros(1, dtype=torch.int64)}),
            "rank.out.bias has dtype torch.int64",
        ),
        (lambda t: t.update({"rank.out.bias": torch.tensor([float("nan")])}), "rank.out.bias.*not finite"),
    ],
)
def test_spoilt_weights(change: Callable[[dict[str, torch.Tensor]], object], message: str, named: Path) -> None:
    spoil_tensors(change, named)
    with pytest.raises(CheckpointError, match=f"heads.safetensors: .*{message}"):
        Checkpoint.load(named)


def test_files_and_key_belong_together(named: Path, tmp_path: Path) -> None:
    raw = (named / "heads.safetensors").read_bytes()
    (named / "heads.safetensors").write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"heads.safetensors has changed"):
        Checkpoint.load(named)
    (named / "heads.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"heads.safetensors.*is missing"):
        Checkpoint.load(named)
    config = read(named)
    write(named, config)
    for attempt in (Checkpoint.load, Checkpoint.inspect):
        with pytest.raises(CheckpointError, match=r"topics, parts-of_2, rank|answer, parts-of_2.*is missing"):
            attempt(named)
    (named / "heads.safetensors").write_bytes(raw)
    Checkpoint.load(named)
    write(named, {key: value for key, value in config.items() if key != "bertie"})
    for attempt in (Checkpoint.load, Checkpoint.inspect):
        with pytest.raises(CheckpointError, match=r"heads.safetensors exists.*'bertie'"):
            attempt(named)
    assert list(Checkpoint.load(named, ignore=["bertie"]).heads) == ["classify"]
    (named / "heads.safetensors").write_bytes(raw[:-1])
    write(named, config)
    with pytest.raises(CheckpointError, match=r"heads.safetensors is not a valid safetensors file"):
        Checkpoint.load(named)
    # One that was put beside a checked folder is not read in silence.
    Checkpoint.load(saved(tmp_path / "x")).save(tmp_path / "y")
    (tmp_path / "y" / "heads.safetensors").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"heads.safetensors was added"):
        Checkpoint.load(tmp_path / "y")


BAD: list[Any] = [
    *(None, True, False, -7, 0, 3.7, 12, "no such word", "", [], [["x"]], {}, {"x": 1}, 10**400, 10**18),
    *(float("nan"), float("inf")),
]


def places(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every place in a tower of objects."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))


def put(tower: Any, path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    return {**tower, path[0]: put(tower[path[0]], path[1:], value)}


def at(tower: Any, path: tuple[str, ...]) -> Any:
    return at(tower[path[0]], path[1:]) if path else tower


# Values of BAD that are another sound head, or say nothing.
FINE: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda v: v in (3.7, 12, 10**18),
    "threshold": lambda v: v in (0, None),
    "abstain_below": lambda v: v in (0, None),
    "no_answer_threshold": lambda v: v in (0, None),
    "no_answer_length": lambda v: v in (0, 3.7, 12),
    "precision": lambda v: v in (0, None),
    "problem": lambda v: v is None,
    "classify": lambda v: v == {},
    "task": lambda v: isinstance(v, str),
    "eps": lambda v: False,
    "separator_id": lambda v: v in (0, 12),
    "calibration": lambda v: v == {},
    "dropout": lambda v: v == 0,
    "dense_dropout": lambda v: v == 0,
    "0": lambda v: isinstance(v, str),
    "1": lambda v: isinstance(v, str),
    "2": lambda v: isinstance(v, str),
    "3": lambda v: isinstance(v, str),
}


def test_every_key(named: Path) -> None:
    """Each value in our part of config.json, spoilt in turn: an error, never a silence or a crash."""
    spoil_tensors(lambda t: [t.pop(name) for name in list(t) if not name.startswith("topics.")], named)
    base = Checkpoint.load(named, ignore=["bertie"])
    topics = read(named)["bertie"]["heads"]["topics"]
    ours = {"heads": {"topics": topics}, "calibration": {"classify": {"temperature": 1.5, "threshold": 0.5}}}

    def attempt(raw: Any) -> None:
        model = Model.from_parts(base.model.encoder, {"classify": base.model.head("classify")})
        replace(base, model=model, heads={})._load_named_heads(raw, named)

    attempt(ours)
    wrong, tried = [], 0
    spots = list(places(ours))
    assert len(spots) > 30
    for path in spots:
        original = at(ours, path)
        spoilt = [put(ours, path, bad) for bad in BAD]
        if isinstance(original, dict):
            spoilt.append(put(ours, path, {**original, "odd": 1}))
        for i, value in enumerate(spoilt):
            bad = BAD[i] if i < len(BAD) else "one key more"
            if type(bad) is type(original) and bad == original:
                continue
            tried += 1
            try:
                attempt(value)
            except BertieError as error:
                if "bertie" not in str(error) and "heads.safetensors" not in str(error):
                    wrong.append(f"{path}={bad!r:.40}: {error}")
            except BaseException as error:
                wrong.append(f"{path}={bad!r:.40}: {type(error).__name__}: {error}")
            else:
                fine = path and path[-1] in FINE and FINE[path[-1]](bad)
                null = bad is None and isinstance(original, str | int | float | dict)
                if not fine and (null or not isinstance(bad, bool) or not isinstance(original, bool)):
                    wrong.append(f"{path}={bad!r:.40} loads in silence")
    assert tried > 500
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("calibration",), {"tag": {}}, r"bertie\.calibration is for a head 'tag'.*it has: classify"),
        (("calibration",), {"classify": {"temprature": 2}}, r"bertie\.calibration\.classify: temprature is not known"),
        (("heads", "topics", "kind"), "tag", r"bertie\.heads.*problem="),
        (("heads", "topics", "labels"), {"0": "a", "1": "b"}, r"topics\.head: .*outputs=4 do not fit"),
        (("heads", "topics", "labels"), {"0": "a", "2": "b"}, r"topics\.labels="),
        (("heads", "topics", "labels"), {"0": "a", "1": "a", "2": "b", "3": "c"}, "all different"),
        (("heads", "rank", "head", "kind"), "token", r"rank\.head: kind='token'"),
        (("heads", "answer", "kind"), "tag", "'answer' of kind 'tag'"),
        (("heads", "a b"), {}, "head is missing"),
        (("heads", "classify"), "copy", "'classify': a head of this name already exists"),
    ],
)
def test_contradictions(path: tuple[str, ...], value: Any, message: str, named: Path) -> None:
    config = read(named)
    ours = config["bertie"]
    if value == "copy":
        value = ours["heads"]["rank"]
    parent = {**at(ours, path[:-1]), path[-1]: value}
    write(named, config | {"bertie": put(ours, path[:-1], parent)})
    with pytest.raises(ConfigError, match=message):
        Checkpoint.load(named)
