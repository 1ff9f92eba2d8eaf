"""Pretraining runs: recipes, rollback, resuming, several processes, and every published recipe at a tiny size."""

from __future__ import annotations

import itertools
import json
import math
import os
import socket
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bertie import recipes
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import ConfigError, InputError, NotFoundError, TrainingError
from bertie.recipe import Recipe
from bertie.text.batch import Batch
from bertie.text.tokenizer_training import train as learn
from bertie.training.loop import MAX_ROLLBACKS, Trainer
from bertie.training.pretrain import replaced_tokens
from bertie.training.pretrain.corpus import CorpusSettings, build_corpus
from bertie.training.pretrain.initialization import new_model
from bertie.training.pretrain.pretrain_recipe import FINE_TUNING_KEYS, PretrainRecipe
from bertie.training.pretrain.run import pretrain
from bertie.training.pretrain.samplers import MixtureSampler
from tests.training import tiny
from tests.training.pretrain import objective_runs
from tests.training.pretrain.corpus_texts import texts
from tests.training.pretrain.objective_runs import Poisoned

NAN = float("nan")
ROOT = Path(__file__).parents[3]
RECIPES = sorted((recipes.FOLDER / "pretrain").glob("*.toml"))


# --- recipes ---

FRESH = {"model": {"model_type": "bert"}}


def asked(train: Mapping[str, Any] | None = None, *objectives: Mapping[str, Any], **data: Any) -> dict[str, Any]:
    given: dict[str, Any] = {**FRESH, "training": {"steps": 5} | dict(train or {})} | ({"data": data} if data else {})
    return given | ({"objective": list(objectives)} if objectives else {})


KINDS = (
    "mlm, rtd, mlm_distillation, relation_distillation, sentence_distillation, embedding_distillation, "
    "classify, regress, tag, answer, rerank, choose"
)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "the recipe has no model: name a checkpoint to continue from, or give config.json's keys"),
    ({"model": {"model_type": "bert"}}, "[training] needs either tokens or steps"),
    (asked({"tokens": 10}), "[training] needs either tokens or steps"),
    (asked() | {"modle": {}}, "the recipe has no field 'modle'; did you mean 'model'?"),
    (asked({"stpes": 3}), "[training] has no field 'stpes'; did you mean 'steps'?"),
    (asked({"epochs": 3}), "[training] has no field 'epochs'"),
    (asked({"steps": -1}), "steps=-1 must be a whole number of at least 0"),
    (asked({"steps": 2.5}), "steps=2.5 must be a whole number of at least 0"),
    (asked({"steps": 0, "tokens": 0}), "tokens=0 must be a whole number of at least 1"),
    (asked({"steps": 0, "tokens": "many"}), "tokens='many' must be a whole number of at least 1"),
    (asked({"evals": -1}), "evals=-1 must be a whole number of at least 0"),
    (asked({"evals": True}), "evals=True must be a whole number of at least 0"),
    (asked({"batch_warmup": 1.0}), "batch_warmup=1.0 must be from 0 to below 1"),
    (asked({"batch_warmup": "x"}), "batch_warmup='x' must be from 0 to below 1"),
    (asked({"lr": 2}), "lr=2 must be a number above 0 and at most 1"),
    (asked({"decay": 0}), "decay=0 must be a number above 0 and at most 1"),
    (asked({"schedule": "steps"}), "schedule='steps' must be one of linear, cosine, wsd, constant"),
    (asked({"batch_tokens": 0}), "batch_tokens=0 must be a whole number of at least 1"),
    (asked() | {"training": 3}, "training=3 must be a table: write [training] above its keys"),
    (asked() | {"model": 3}, "model=3 must be a table: write [model] above its keys"),
    (asked() | {"objective": {"kind": "mlm"}}, "objective must be one or more tables: write [[objective]] above each"),
    (asked() | {"objective": []}, "objective must be one or more tables: write [[objective]] above each"),
    (asked(corpus=7), "corpus=7 must be the name of a folder, or a list of them"),
    (asked(corpus=["a", 7]), "corpus=['a', 7] must be the name of a folder, or a list of them"),
    (asked(tokenizer=7), "tokenizer=7 must be a string"),
    (asked(corpora="x"), "[data] has no field 'corpora'; did you mean 'corpus'?"),
    (asked({"pooling": 7}), "pooling=7 must be one of cls, mean, max, last, weighted-mean"),
    (asked(None, {}), f"objective 1: kind=None must be one of {KINDS}"),
    (asked(None, {"kind": "mlm"}, {"kind": "clm"}), f"objective 2: kind='clm' must be one of {KINDS}"),
    (asked(None, {"kind": "mlm", "rates": 1}), "objective 1 (mlm) has no field 'rates'; did you mean 'rate'?"),
    (asked(None, {"kind": "mlm", "teacher": "x"}), "objective 1 (mlm) has no field 'teacher'"),
    (asked(None, {"kind": "mlm", "share": 0}), "objective 1: share=0 must be a number above 0"),
    (asked(None, {"kind": "mlm", "share": "x"}), "objective 1: share='x' must be a number above 0"),
    (asked(None, {"kind": "mlm", "max_length": 0}), "objective 1: max_length=0 must be a whole number of at least 1"),
    (
        asked(None, {"kind": "mlm", "max_length": 12.0}),
        "objective 1: max_length=12.0 must be a whole number of at least 1",
    ),
    (asked(None, {"kind": "mlm", "batch_tokens": "x"}), "objective 1: batch_tokens='x' must be a whole number of at "),
    (asked(None, {"kind": "rtd", "weight": -1}), "objective 1: weight=-1 must be a number of at least 0"),
    (asked(None, {"kind": "rtd", "weight": NAN}), "objective 1: weight=nan must be a number of at least 0"),
    (asked(None, {"kind": "rtd", "generator": 2}), "objective 1: generator=2 must be a table of config.json's keys"),
    (asked(None, {"kind": "mlm_distillation"}), "objective 1 (mlm_distillation) needs teacher"),
    *(
        (
            asked(None, {"kind": "mlm_distillation", "teacher": teacher}),
            f"objective 1 (mlm_distillation): teacher={teacher!r} must be the name of a folder",
        )
        for teacher in (3, ["a", "b"])
    ),
    (
        asked(None, {"kind": "embedding_distillation", "teacher": ["a", 3]}),
        "objective 1: teacher=['a', 3] must be the name of a folder, or a list of them",
    ),
    (asked(None, {"kind": "relation_distillation"}), "objective 1 (relation_distillation) needs teacher"),
    (
        asked(None, {"kind": "sentence_distillation", "teacher": "x"}),
        "objective 1 (sentence_distillation) needs teacher_corpus",
    ),
    (
        asked(None, {"kind": "sentence_distillation", "teacher_corpus": "x"}),
        "objective 1 (sentence_distillation) needs teacher",
    ),
    (asked(None, {"kind": "tag", "train": "x"}), "objective 1 (tag) needs name"),
    (asked(None, {"kind": "tag", "name": "x"}), "objective 1 (tag) needs train"),
    (
        asked(None, {"kind": "answer", "name": "x", "train": "y", "batch_size": 0}),
        "objective 1: batch_size=0 must be a whole number of at least 1",
    ),
    (asked({"batch_warmup": 0.1}, {"kind": "mlm"}, {"kind": "mlm"}), "batch_warmup is for a single objective"),
]


@pytest.mark.parametrize(("given", "said"), WRONG, ids=lambda one: one[:40] if isinstance(one, str) else "")
def test_invalid_recipes_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        PretrainRecipe.from_mapping(given)
    assert str(error.value).startswith(said)
    if not said.endswith(" ") and "has no field" not in said:
        assert str(error.value) == said


def test_a_recipe_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        '[data]\ncorpus = "c"\n[model]\nmodel_type = "bert"\n[training]\ntokens = 1000\nbatch_tokens = 300\nlr = 1e-3\n'
    )
    read = PretrainRecipe.read(file)
    assert (read.steps, read.tokens, read.corpus, read.recipe.lr, read.evals) == (4, 1000, "c", 1e-3, 10)
    assert read.objectives == ({"kind": "mlm"},)
    over = PretrainRecipe.read(file, steps=7, corpus="d", seed=3, lr=None)
    assert (over.steps, over.tokens, over.corpus, over.recipe.seed, over.recipe.lr) == (7, None, "d", 3, 1e-3)
    assert PretrainRecipe.read(file, tokens=10**6).steps == math.ceil(10**6 / 300)
    with pytest.raises(ConfigError, match="needs either tokens or steps"):
        PretrainRecipe.read(file, tokens=5, steps=5)
    assert json.loads(json.dumps(over.as_dict()))["model"] == {"model_type": "bert"}
    assert PretrainRecipe.read(None, model="folder", steps=1).recipe.batch_tokens == 131_072
    file.write_text("[model\n")
    with pytest.raises(ConfigError, match=r"recipe\.toml: "):
        PretrainRecipe.read(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"recipe\.toml: "):
        PretrainRecipe.read(file)
    with pytest.raises(NotFoundError, match=r"none\.toml cannot be read: No such file"):
        PretrainRecipe.read(tmp_path / "none.toml")


# --- rollback ---


def poisoned(folder: Path | None, factors: dict[int, float], steps: int = 80, **options: Any) -> Trainer:
    plan = Poisoned(steps, factors)
    defaults = {"rollback": True, "progress": False, "keep": "last", "save_steps": 20, "evaluate_at": ()}
    settings: dict[str, Any] = defaults | options
    return Trainer(tiny.model(), plan, tiny.recipe(batch_size=4), folder=folder, **settings)


class Stop(Exception):
    """A run that ends here."""


def skipping(folder: Path, spans: list[tuple[int, int]], steps: int = 80, **options: Any) -> Trainer:
    """A run that continues after each span with the weights from before it: states are edited by hand."""
    for start, end in spans:
        trainer = poisoned(folder, {}, steps, resume=True, **options)
        read = trainer.sampler.read

        def until(step: int, read: Any = read, start: int = start) -> Any:
            if step == start:
                raise Stop
            return read(step)

        trainer.sampler.read = until
        with pytest.raises(Stop):
            trainer.run()
        state = torch.load(folder / "state.pt", weights_only=True)
        assert state["progress"]["step"] == start
        state["progress"]["step"] = end
        torch.save(state, folder / "state.pt")
    trainer = poisoned(folder, {}, steps, resume=True, **options)
    trainer.run()
    return trainer


@pytest.mark.parametrize(
    ("factors", "spans"),
    [
        ({62: 50.0}, [(60, 63)]),  # seen with the log's row at step 70
        ({62: NAN}, [(60, 63)]),
        ({3: NAN}, [(0, 4)]),  # before anything else was saved
        ({79: NAN}, [(60, 80)]),  # the last one
        ({22: NAN, 64: -NAN, 73: 50.0}, [(20, 23), (60, 65), (65, 74)]),
        ({25: NAN, 27: NAN}, [(20, 26), (26, 28)]),  # one behind the other
    ],
)
def test_a_spike_is_rolled_back_and_skipped(
    tmp_path: Path, factors: dict[int, float], spans: list[tuple[int, int]]
) -> None:
    trainer = poisoned(tmp_path / "a", factors)
    history = trainer.run()
    assert trainer.state.skipped == [list(span) for span in spans]
    assert history.steps == 80
    assert all(math.isfinite(row["loss"]) for row in history.curve)
    steps = [row["step"] for row in history.curve]
    assert steps == sorted(set(steps))
    other = skipping(tmp_path / "b", [s for s in spans if s[1] < 80])
    if spans[-1][1] < 80:
        tiny.assert_same(tiny.weights(trainer.model), tiny.weights(other.model))
        assert trainer.state.tokens == other.state.tokens
    else:
        state = poisoned(tmp_path / "c", {60: 1.0}, 80)
        read = state.sampler.read
        state.sampler.read = lambda step: read(step) if step < 60 else (_ for _ in ()).throw(Stop())
        with pytest.raises(Stop):
            state.run()
        saved = torch.load(tmp_path / "c" / "state.pt", weights_only=True)["model"]
        tiny.assert_same(tiny.weights(trainer.model), saved)


def test_losses_of_different_samplers_are_not_compared(tmp_path: Path) -> None:
    """One of two plans with the same objective and head has losses of its own size, now and then."""
    plans = [Poisoned(400, {}), Poisoned(400, dict.fromkeys(range(400), 30.0))]
    mixed = MixtureSampler(plans, [6, 1], 400, seed=0)
    trainer = Trainer(
        tiny.model(),
        mixed,
        tiny.recipe(batch_size=4, lr=1e-5),
        folder=tmp_path,
        rollback=True,
        progress=False,
        keep="last",
    )
    trainer.run()
    assert trainer.state.skipped == []
    assert len(trainer.state.recent_losses) == 2


def test_too_many_consecutive_rollbacks_end_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = dict.fromkeys(range(21, 80), NAN)
    trainer = poisoned(tmp_path, bad, progress=True)
    with pytest.raises(
        TrainingError, match=rf"the loss is nan at step 27, after {MAX_ROLLBACKS} rollbacks: the learning"
    ):
        trainer.run()
    assert capsys.readouterr().err.count("back to the weights of step") == MAX_ROLLBACKS
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert state["progress"]["skipped"] == [[20, 22], [22, 23], [23, 24], [24, 25], [25, 26]]
    assert all(bool(tensor.isfinite().all()) for tensor in state["model"].values())
    with pytest.raises(TrainingError, match="after 5 rollbacks"):
        poisoned(tmp_path, bad, resume=True).run()
    # With steps that are well in between, it goes on: the tries are counted from what was learnt last.
    good = {step: NAN for step in range(80) if step % 10 == 4}
    trainer = poisoned(tmp_path / "other", good, save_steps=2)
    trainer.run()
    assert len(trainer.state.skipped) == 8 > MAX_ROLLBACKS


@pytest.mark.parametrize("options", [{"folder": None}, {"rollback": False}])
def test_without_a_checkpoint_a_spike_is_an_error(tmp_path: Path, options: dict[str, Any]) -> None:
    trainer = poisoned(**({"folder": tmp_path, "factors": {7: NAN}, "save_steps": None} | options))  # type: ignore[arg-type]
    with pytest.raises(TrainingError, match=r"^the loss is nan at step 8: the learning rate \(0\.003\)"):
        trainer.run()


def test_a_large_loss_is_no_spike_without_rollback(tmp_path: Path) -> None:
    trainer = poisoned(tmp_path, {62: 50.0}, rollback=False)
    trainer.run()
    assert trainer.state.skipped == []


# --- killed and distributed runs ---


def started(argv: list[str], **env: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-m", "tests.training.pretrain.objective_runs", *argv],
        env=os.environ | {"PYTHONPATH": path} | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def killed(folder: Path, cases: tuple[str, ...], kills: int) -> None:
    said, _ = (process := started(["killed", str(folder), *(f"{case}:{kills}" for case in cases)])).communicate()
    assert process.returncode == 0, said
    assert said.split("\n")[:-1] == [f"{case}:{kills} same after {kills} kills" for case in cases], said


def test_killed_runs_resume_bit_identically(tmp_path: Path) -> None:
    """Weights, auxiliary modules and the log: with generators, teachers, pairs, and with rollback."""
    killed(tmp_path, ("tied", "gdes", "taught", "poison"), 3)


@pytest.mark.slow
def test_runs_killed_ten_times_resume_bit_identically(tmp_path: Path) -> None:
    killed(tmp_path, objective_runs.CASES, 10)


SPREAD = ("mlm:ddp", "mlm:fsdp", "tied:ddp", "gdes:ddp", "taught:ddp", "taught:fsdp", "mixed:ddp")


@pytest.fixture(scope="module")
def spread(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes made of each case."""
    folder = tmp_path_factory.mktemp("spread")
    objective_runs.corpora(folder / "data")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    both = [started(["ranks", str(folder), *SPREAD], RANK=str(r), LOCAL_RANK=str(r), **env) for r in range(2)]
    try:
        said = [process.communicate(timeout=300)[0] for process in both]
    finally:
        for process in both:
            process.kill()
    assert all(process.returncode == 0 for process in both), "\n".join(said)
    return folder


@pytest.mark.parametrize("asked", SPREAD)
def test_two_processes_train_as_one(spread: Path, asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replaced_tokens, "sample", objective_runs.likeliest)
    alone = objective_runs.kept(objective_runs.made(asked.split(":")[0], spread / "data"))
    found = [torch.load(spread / f"{asked}-{rank}", weights_only=True) for rank in range(2)]
    tiny.assert_same(found[0]["weights"], found[1]["weights"])
    for ours, theirs in zip(found[0]["curve"], alone["curve"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
    begun = tiny.weights(objective_runs.made(asked.split(":")[0], spread / "data").model)
    moved = {name for name in begun if (begun[name] - alone["weights"][name]).abs().max() > 1e-3}
    assert any(name.startswith("encoder.blocks.0.") for name in moved)
    auxiliary = {name for name in begun if name.startswith("auxiliary.") and name.endswith("weight")}
    assert bool(auxiliary) == (not asked.startswith("mlm"))
    assert len(auxiliary & moved) >= 0.8 * len(auxiliary)  # auxiliary modules are trained, too
    tiny.assert_same(tiny.without_key_biases(found[0]["weights"]), tiny.without_key_biases(alone["weights"]), atol=3e-4)


# --- complete runs ---


TOKENIZERS: dict[str, dict[str, Any]] = {
    "albert-base": {"kind": "unigram", "lowercase": True},
    "deberta-v3-small": {"kind": "unigram"},
    "roberta-base": {"kind": "bpe", "style": "angles", "vocab_size": 400},
    "modernbert-small": {"kind": "bpe", "vocab_size": 400},
}
SMALL = {
    "hidden_size": 16,
    "dim": 16,
    "embedding_size": 16,
    "num_hidden_layers": 3,
    "n_layers": 2,
    "num_attention_heads": 2,
    "n_heads": 2,
    "intermediate_size": 24,
    "hidden_dim": 24,
    "max_position_embeddings": 66,
}


def shrunk(given: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """A recipe with all shapes and lengths tiny."""
    model = {name: SMALL.get(name, value) for name, value in given["model"].items()}
    for name in ("position_buckets", "local_attention"):
        if name in model:
            model[name] = 8
    train = {name: value for name, value in given["training"].items() if name != "tokens"}
    train |= {
        "steps": steps,
        "batch_tokens": 256 if "batch_warmup" not in train else 1024,
        "max_length": 64,
        "evals": 1,
    }
    if "batch_warmup" in train:
        train["batch_warmup"] = 0.5
    objectives = []
    for one in given["objective"]:
        if "generator" in one:
            tiny_ones = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 16, "num_hidden_layers": 1}
            one = one | {"generator": {name: tiny_ones[name] for name in one["generator"]}}
        objectives.append(one)
    return given | {"model": model, "training": train, "objective": objectives}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "in.txt"
    file.write_text("\n\n".join(texts(80, seed=2)) + "\n")
    return file


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_runs(file: Path, text: Path, tmp_path: Path) -> None:
    given = shrunk(tomllib.loads(file.read_text("utf-8")))
    lines = text.read_text().split("\n")
    options: dict[str, Any] = {"kind": "wordpiece", "vocab_size": 200, "max_length": 64} | TOKENIZERS.get(file.stem, {})
    tokenizer = learn(lines, **options)
    tokenizer.save(tmp_path / "tokenizer")
    build_corpus([str(text)], tokenizer, tmp_path / "corpus", CorpusSettings(held_out=0.3))
    for one in given["objective"]:
        if "teacher" in one:
            shape = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
            config = {"model_type": "bert", **shape, "max_position_embeddings": 66}
            new_model(config, tokenizer, seed=4).save(tmp_path / "teacher")
            one["teacher"] = "teacher"
    run = pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False)
    assert run["tokens"] > 3 * (1 if "batch_warmup" in given["training"] else 150)
    assert math.isfinite(run["loss"])
    report = {one.name for one in (tmp_path / "out" / "training").iterdir()}
    assert report >= {"curve.csv", "curve.html", "run.json", "recipe.json"}
    assert not (tmp_path / "out.training").exists()
    loaded = Checkpoint.load(tmp_path / "out")
    replaced = given["objective"][0]["kind"] == "rtd"
    expected = {"rtd_precision", "rtd_recall", "rtd_auroc", "generator_accuracy"} if replaced else {"loss", "accuracy"}
    expected |= {f"{one['pairs']}_accuracy" for one in given["objective"] if "pairs" in one}
    assert expected <= set(run["evaluation"])
    assert expected <= set(run["held_out"])
    for name in expected:
        score = run["held_out"][name]
        assert score["value"] == pytest.approx(run["evaluation"][name], abs=1e-6)
        assert score["low"] is None or score["low"] <= score["value"] <= score["high"]
    assert ("samples.jsonl" in report) != replaced
    assert all(bool(p.isfinite().all()) for p in loaded.model.parameters())

    if "rate" in given["objective"][0]:
        same_in_transformers(tmp_path / "out", loaded)


def same_in_transformers(folder: Path, ours: Checkpoint) -> None:
    from transformers import AutoModel

    theirs = AutoModel.from_pretrained(folder).eval()
    ids = np.random.default_rng(0).integers(5, 100, 30)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.from_numpy(ids)[None]).last_hidden_state[0]
        found = ours.model.eval().hidden(Batch.from_ids([ids]))
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)


def test_a_discriminator_keeps_its_head(text: Path, tmp_path: Path) -> None:
    """ELECTRA has one of its own, which transformers reads as well; what the run trained is what is saved."""
    from transformers import AutoModelForPreTraining

    file = next(one for one in RECIPES if one.stem == "electra-small")
    given = shrunk(tomllib.loads(file.read_text("utf-8")), steps=5)
    tokenizer = learn(text.read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(tmp_path / "tokenizer")
    build_corpus([str(text)], tokenizer, tmp_path / "corpus")
    pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False)
    ours = Checkpoint.load(tmp_path / "out")
    theirs = AutoModelForPreTraining.from_pretrained(tmp_path / "out").eval()
    assert type(theirs).__name__ == "ElectraForPreTraining"
    ids = np.random.default_rng(0).integers(5, 100, 30)
    with torch.no_grad():
        wanted = theirs(input_ids=torch.from_numpy(ids)[None]).logits[0]
        found = ours.model.eval()(Batch.from_ids([ids]), "rtd")[:, 0]
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=0)
    begun = new_model(given["model"], tokenizer, head="rtd", seed=0).model
    words = begun.encoder.embeddings.words.weight, ours.model.encoder.embeddings.words.weight
    assert not torch.allclose(*words, atol=1e-4)


def test_invalid_runs_are_refused(text: Path, tmp_path: Path) -> None:
    tokenizer = learn(text.read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(tmp_path / "tokenizer")
    build_corpus([str(text)], tokenizer, tmp_path / "corpus")
    checkpoint = objective_runs.checkpoint(tokenizer)
    checkpoint.save(tmp_path / "model")

    def refused(kind: type[Exception], said: str, given: dict[str, Any], **options: Any) -> None:
        with pytest.raises(kind) as error:
            pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False, **options)
        assert said in str(error.value)
        assert not list(tmp_path.glob("*out*"))  # nothing is left behind

    model = {"model_type": "bert", **{k: SMALL[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads")}}
    model |= {"intermediate_size": 24, "max_position_embeddings": 66}
    there = {"model": model, "data": {"tokenizer": "tokenizer", "corpus": "corpus"}}
    small = {"batch_tokens": 256}
    refused(ConfigError, "a new model needs a tokenizer", asked(small) | {"model": model})
    refused(ConfigError, "the recipe names no corpus", asked(small, tokenizer="tokenizer") | {"model": model})
    refused(NotFoundError, "holds no corpus", asked(small, tokenizer="tokenizer", corpus="none") | {"model": model})
    refused(ConfigError, "max_length=67 must be at most 66, the model's", asked(small | {"max_length": 67}) | there)
    refused(InputError, "budget=32 must be at least max_length=66", asked({"batch_tokens": 32}) | there)
    two = [{"kind": "rtd"}, {"kind": "mlm"}]
    refused(ConfigError, "an objective of kind rtd must be the only one", asked(small, *two) | there)
    going_on = asked(small, {"kind": "rtd"}) | there | {"model": "model"}
    refused(ConfigError, "kind='rtd' is for new models", going_on)
    refused(
        ConfigError, "strategy='fsdp' cannot train kind='rtd'", asked(small, {"kind": "rtd"}) | there, strategy="fsdp"
    )
    wrong = {"kind": "mlm", "pairs": "order"}
    refused(ConfigError, "pairs='order' must be one of nsp, sop", asked(small, wrong) | there | {"model": "model"})
    refused(ConfigError, "Masking.rate=2 must be", asked(small, {"kind": "mlm", "rate": 2}) | there)
    other = learn(texts(30, seed=9), vocab_size=150, max_length=64)
    other.save(tmp_path / "other")
    refused(
        ConfigError,
        "was built with another tokenizer",
        asked(small, tokenizer="other", corpus="corpus") | {"model": model},
    )
    taught = {"kind": "sentence_distillation", "teacher": "model", "teacher_corpus": "corpus", "words": 1.0}
    refused(ConfigError, "is not a sentence encoder", asked(small, taught) | there | {"model": "model"})
    missing = taught | {"teacher": "nowhere"}
    refused(NotFoundError, "nowhere", asked(small, missing) | there | {"model": "model"})


def test_relation_distillation_needs_no_head(text: Path, tmp_path: Path) -> None:
    """It needs no head and masks no token."""
    from transformers import BertConfig, BertModel

    tokenizer = learn(text.read_text().split("\n"), vocab_size=200, max_length=64)
    build_corpus([str(text)], tokenizer, tmp_path / "corpus", CorpusSettings(held_out=0.2))
    objective_runs.checkpoint(tokenizer, 16, seed=1).save(tmp_path / "teacher")
    shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    bare = BertModel(
        BertConfig(**shape, vocab_size=tokenizer.vocab_size, max_position_embeddings=64), add_pooling_layer=False
    )
    bare.save_pretrained(tmp_path / "bare")
    tokenizer.save(tmp_path / "bare")
    assert not Checkpoint.load(tmp_path / "bare").model.heads
    objective = {"kind": "relation_distillation", "teacher": "teacher", "heads": 4}
    given = asked({"batch_tokens": 512, "steps": 30, "lr": 3e-3}, objective, corpus="corpus") | {"model": "bare"}
    run = pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False)
    rows = (tmp_path / "out" / "training" / "curve.csv").read_text().split("\n")[1:]
    losses = [float(row.split(",")[2]) for row in rows if row]
    assert losses[-1] < losses[0]
    assert run["evaluation"] is None
    assert not Checkpoint.load(tmp_path / "out").model.heads


def test_several_corpora_are_read_as_one(text: Path, tmp_path: Path) -> None:
    tokenizer = learn(text.read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(tmp_path / "tokenizer")
    for name, seed in (("a", 1), ("b", 7)):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(texts(20, seed=seed)) + "\n")
        build_corpus([str(tmp_path / f"{name}.txt")], tokenizer, tmp_path / name, CorpusSettings(held_out=0.2))
    model = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = asked({"batch_tokens": 128, "steps": 60, "evals": 1}, corpus=["a", "b"], tokenizer="tokenizer")
    given["model"] = model | {"intermediate_size": 16, "max_position_embeddings": 64}
    run = pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False)
    rows = (tmp_path / "out" / "training" / "curve.csv").read_text().split("\n")
    assert len(rows) > 6
    assert run["evaluation"]["tokens"] > 20  # of the held-out text of both
    assert run["steps"] == 60


def test_a_budget_drops_steps_and_keeps_the_schedule(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=partial(next, itertools.count(0, 0.001)))  # a step takes a few readings
    for module in ("pace", "pretrain.run"):
        monkeypatch.setattr(f"bertie.training.{module}.time", clock)
    tokenizer = learn(text.read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(tmp_path / "tokenizer")
    build_corpus([str(text)], tokenizer, tmp_path / "corpus", CorpusSettings(held_out=0.2))
    model = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    given = asked({"batch_tokens": 128, "steps": 300, "evals": 1, "lr": 1e-3}, corpus="corpus", tokenizer="tokenizer")
    given["training"] |= {"budget": "0.2s", "schedule": "linear"}
    given["model"] = model | {"intermediate_size": 16, "max_position_embeddings": 64}
    run = pretrain(PretrainRecipe.from_mapping(given), tmp_path / "out", data=tmp_path, progress=False)
    assert 50 < run["steps"] < 200
    assert run["evaluation"]["step"] == run["steps"]
    rows = [row.split(",") for row in (tmp_path / "out" / "training" / "curve.csv").read_text().split("\n")[1:] if row]
    rates = [float(row[3]) for row in rows if row[3]]
    assert rates[-1] < 0.2 * max(rates)


def test_every_recipe_field_is_accepted_or_refused() -> None:
    """Every field of a recipe is either taken or known to mean nothing here."""
    names = {field.name for field in fields(Recipe)}
    assert set(FINE_TUNING_KEYS) <= names
    for name in names - set(FINE_TUNING_KEYS):
        value = {"steps": 5, name: getattr(Recipe(lr=5e-4, batch_tokens=100), name)}
        PretrainRecipe.from_mapping({**FRESH, "training": {key: one for key, one in value.items() if one is not None}})
    for name in FINE_TUNING_KEYS:
        with pytest.raises(ConfigError, match=rf"\[training\] has no field '{name}'"):
            PretrainRecipe.from_mapping({**FRESH, "training": {"steps": 5, name: 1}})
