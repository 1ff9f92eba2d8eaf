import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.checkpoints.sentence_transformers import ACTIVATIONS  # type: ignore[attr-defined]
from bertie.errors import CheckpointError, ConfigError
from bertie.text.batch import Batch
from tests.checkpoints.tiny_sentence import WIDTH, load, old_folder, write

pytest.importorskip("transformers")


def test_no_modules_json_is_none(base: Path) -> None:
    assert SentenceModules.from_folder(base, WIDTH) is None
    assert SentenceModules.transformer_folder(base) == ""


def test_a_cross_encoder_is_none(base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    assert SentenceModules.transformer_folder(folder) == "0_Transformer"
    edit(MODEL, model_type="CrossEncoder")(folder)
    assert SentenceModules.from_folder(folder, WIDTH) is None


def test_files_of_the_hub_cache_may_be_links_but_folders_may_not(base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    blob = tmp_path / "blob"
    (folder / "1_Pooling/config.json").rename(blob)
    (folder / "1_Pooling/config.json").symlink_to(blob)
    assert load(folder).pooling.modes == ("cls", "mean")
    (folder / "1_Pooling").rename(tmp_path / "elsewhere")
    (folder / "1_Pooling").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"modules.json\[1\]: path='1_Pooling' is a symbolic link out of"):
        load(folder)


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        write(folder / file, json.loads((folder / file).read_text(encoding="utf-8")) | changes)

    return apply


def entry(index: int, **changes: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        entries = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        entries[index] |= changes
        write(folder / "modules.json", entries)

    return apply


def put(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / file).write_bytes(content) and None  # type: ignore[return-value]


def remove(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


def weights(**shapes: tuple[int, ...]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = {name.replace("__", "."): torch.zeros(shape) for name, shape in shapes.items()}
        safetensors.torch.save_file(tensors, folder / "2_Dense/model.safetensors")

    return apply


def unlimited(folder: Path) -> None:
    """No limit of its own, and a tokenizer whose config is broken."""
    (folder / TEXT).unlink()
    (folder / "0_Transformer/tokenizer_config.json").write_bytes(b"[")


def pickled(value: object) -> Callable[[Path], None]:
    return lambda folder: torch.save(value, folder / "2_Dense/pytorch_model.bin")


TEXT = "0_Transformer/sentence_bert_config.json"
MODEL = "config_sentence_transformers.json"
POOL = "1_Pooling/config.json"
DENSE = "2_Dense/config.json"
# What is wrong with a file is a CheckpointError, what is wrong with a key a ConfigError.
BAD_FILES = {
    "truncated": (put("modules.json", b'[{"idx": 0'), "modules.json cannot be read as JSON"),
    "not utf-8": (put(MODEL, b'{"prompts": "\xff"}'), f"{MODEL} cannot be read as JSON: 'utf-8'"),
    "deep": (put(MODEL, b"[" * 100_000), f"{MODEL} cannot be read as JSON"),
    "not a list": (put("modules.json", b"{}"), "modules.json contains dict; it must contain a list"),
    "empty list": (put("modules.json", b"[]"), "at least one module"),
    "entry no object": (put("modules.json", b"[1]"), r"modules.json\[0\] must be an object, not int"),
    "not an object": (put(POOL, b"[]"), f"{POOL} contains list; it must contain an object"),
    "limit": (unlimited, "0_Transformer/tokenizer_config.json cannot be read as JSON"),
    "pool missing": (remove(POOL), f"{POOL} is missing; modules.json lists a Pooling there"),
    "dense huge": (
        edit(DENSE, out_features=10**9),
        r"2_Dense: the weights are .*'linear.weight': \(4, 32\).*; a Dense .*'linear.weight': \(1000000000, 32\)",
    ),
    "bias": (
        edit(DENSE, bias=False),
        r"'linear.bias': \(4,\).*; a Dense of this config has {'linear.weight': \(4, 32\)}",
    ),
    "no weights": (
        remove("2_Dense/pytorch_model.bin"),
        "2_Dense has no weights: neither model.safetensors nor pytorch_model.bin",
    ),
    "missing": (
        weights(linear__weight=(4, 32)),
        r"2_Dense: the weights are {'linear.weight': \(4, 32\)}; a Dense of this config has .*'linear.bias': \(4,\)",
    ),
    "left over": (
        weights(linear__weight=(4, 32), linear__bias=(4,), x=(1,)),
        r"2_Dense: the weights are .*'x': \(1,\).*; a Dense of this config has",
    ),
    "shape": (
        weights(linear__weight=(32, 4), linear__bias=(4,)),
        r"the weights are .*'linear.weight': \(32, 4\).*; a Dense .*'linear.weight': \(4, 32\)",
    ),
    "cut weights": (
        put("2_Dense/model.safetensors", b"\x10\0\0\0"),
        "2_Dense: model.safetensors is not a valid safetensors file",
    ),
    "cut pickle": (
        put("2_Dense/pytorch_model.bin", b"PK"),
        "2_Dense: pytorch_model.bin cannot be read as plain tensors",
    ),
    "unsafe pickle": (pickled(nn.Linear(2, 2)), "2_Dense: pytorch_model.bin cannot be read as plain tensors"),
    "pickled list": (pickled([torch.zeros(1)]), "2_Dense: pytorch_model.bin must contain only named tensors"),
    "whole numbers": (
        pickled({"linear.weight": torch.zeros(4, 32, dtype=torch.int64), "linear.bias": torch.zeros(4)}),
        "2_Dense: linear.weight has dtype torch.int64",
    ),
}
BAD_KEYS = {
    "entry key": (entry(1, colour="red"), r"modules.json\[1\]: unknown key colour='red'$"),
    "entry kwargs": (entry(1, kwargs=["task"]), r"kwargs=\['task'\] is not supported; allowed: \[\]"),
    "idx": (entry(2, idx=1), r"modules.json\[2\]: idx=1 must be 2"),
    "idx bool": (entry(1, idx=True), "idx=True is not supported; allowed: a whole number"),
    "same name": (entry(2, name="1"), r"modules.json\[2\]: name='1' is the name of another"),
    "path type": (entry(1, path=None), r"modules.json\[1\]: path=None is not supported; allowed: a string"),
    "up": (entry(1, path="../../x"), "path='../../x' must be relative"),
    "up inside": (entry(1, path="a/../1_Pooling"), "without '..'"),
    "absolute": (entry(0, path="/etc"), "path='/etc' must be relative"),
    "windows": (entry(1, path="C:\\x"), "must be relative"),
    "backslash": (entry(1, path="..\\x"), "must be relative"),
    "nul": (entry(1, path="a\0b"), "must be relative"),
    "same folder": (entry(3, path="./2_Dense"), r"modules.json\[3\]: path='./2_Dense' is the folder of another"),
    "custom type": (entry(1, type="custom.Pooling"), r"modules.json\[1\]: type='custom.Pooling' is not supported"),
    "no transformer": (entry(0, type="sentence_transformers.models.StaticEmbedding"), "the first module must be"),
    "two": (entry(1, type="sentence_transformers.models.Transformer"), "each other one of WordWeights, Pooling, Dense"),
    "order": (entry(1, type="sentence_transformers.models.Normalize", path="x"), "one Pooling first"),
    "model key": (edit(MODEL, temperature=2), f"{MODEL}: unknown key temperature=2$"),
    "model type": (edit(MODEL, model_type="Router"), "model_type='Router' is not supported"),
    "similarity": (edit(MODEL, similarity_fn_name="maxsim"), "similarity_fn_name='maxsim' .* allowed: 'cosine', 'dot'"),
    "prompts": (edit(MODEL, prompts=["a"]), r"prompts=\['a'\] is not supported; allowed: an object"),
    "prompt": (edit(MODEL, prompts={"query": None}), "prompts: query=None is not supported; allowed: a string"),
    "default": (edit(MODEL, prompts={"a": ""}, default_prompt_name="b"), "default_prompt_name='b' .* allowed: 'a'$"),
    "truncate": (edit(MODEL, truncate_dim=0), "truncate_dim=0 is not supported; allowed: a whole number"),
    "text key": (edit(TEXT, stride=3), f"{TEXT}: unknown key stride=3$"),
    "length": (edit(TEXT, max_seq_length="6"), "max_seq_length='6' is not supported; allowed: a whole number"),
    "length 0": (edit(TEXT, max_seq_length=0), "max_seq_length=0 is not supported; allowed: a whole number"),
    "lower": (edit(TEXT, do_lower_case=1), "do_lower_case=1 is not supported; allowed: true, false"),
    "task": (edit(TEXT, transformer_task="fill-mask"), "transformer_task='fill-mask' .* allowed: 'feature-extraction'"),
    "output": (edit(TEXT, module_output_name="sentence_embedding"), "allowed: 'token_embeddings'"),
    "modality": (edit(TEXT, modality_config={"image": {}}), "modality_config=.* is not supported"),
    "query length": (edit(TEXT, query_length=3), "query_length=3 is not supported; allowed: null"),
    "args": (edit(TEXT, model_args={"rope": 1}), f"{TEXT}: model_args: unknown key rope=1"),
    "tokenizer args": (edit(TEXT, tokenizer_args={"dtype": 1}), f"{TEXT}: tokenizer_args: unknown key dtype=1"),
    "pool key": (edit(POOL, pooling_mode_median=True), f"{POOL}: unknown key pooling_mode_median=True"),
    "pool width": (edit(POOL, word_embedding_dimension=8), f"{POOL}: word_embedding_dimension=8 must be 16"),
    "pool widths": (edit(POOL, embedding_dimension=8), f"{POOL}: embedding_dimension=8 must be 16"),
    "pool no width": (put(POOL, b"{}"), f"{POOL}: embedding_dimension is missing"),
    "pool flag": (edit(POOL, pooling_mode_cls_token="true"), "pooling_mode_cls_token='true' .* allowed: true, false"),
    "pool null": (edit(POOL, include_prompt=None), "include_prompt=None is not supported; allowed: true, false"),
    "pool none": (
        edit(POOL, pooling_mode_cls_token=False, pooling_mode_mean_tokens=False),
        r"pooling_mode=\[\] must be one or more of cls",
    ),
    "pool two minds": (edit(POOL, pooling_mode="max"), r"pooling_mode=\['max'\] must agree with the flags"),
    "pool unsaid": (
        put(POOL, b'{"embedding_dimension": 16, "pooling_mode_cls_token": true}'),
        "pooling_mode_mean_tokens is missing",
    ),
    "pool mode": (put(POOL, b'{"embedding_dimension": 16, "pooling_mode": ["mean", 1]}'), "must be one or more of cls"),
    "dense key": (edit(DENSE, dropout=0.1), f"{DENSE}: unknown key dropout=0.1"),
    "dense in": (edit(DENSE, in_features=16), f"{DENSE}: in_features=16 must be 32"),
    "dense out": (edit(DENSE, out_features=0), f"{DENSE}: out_features=0 is not supported; allowed: a whole number"),
    "dense input": (edit(DENSE, module_input_name="token_embeddings"), "allowed: 'sentence_embedding'"),
    "activation": (edit(DENSE, activation_function="os.system"), "activation_function='os.system' is not supported"),
    "false tanh": (edit(DENSE, activation_function="evil.Tanh"), "activation_function='evil.Tanh' is not supported"),
    "activation type": (edit(DENSE, activation_function=None), "activation_function=None is not supported"),
}


@pytest.mark.parametrize("name", [*BAD_FILES, *BAD_KEYS])
def test_bad_folders_say_what_is_wrong(name: str, base: Path, tmp_path: Path) -> None:
    change, message = (BAD_FILES | BAD_KEYS)[name]
    folder = old_folder(base, tmp_path / "model")
    load(folder)
    change(folder)
    with pytest.raises(CheckpointError if name in BAD_FILES else ConfigError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "kind", ["Router", "WordEmbeddings", "CLIPModel", "CNN", "LSTM", "BoW", "WeightedLayerPooling"]
)
def test_unknown_modules_are_refused(kind: str, base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    entry(2, type=f"sentence_transformers.models.{kind}")(folder)
    with pytest.raises(ConfigError, match=f"sentence_transformers.models.{kind}.* is not supported here"):
        load(folder)


@pytest.mark.parametrize(
    "spelling",
    [
        "sentence_transformers.models.Normalize",
        "sentence_transformers.models.Normalize.Normalize",
        "sentence_transformers.sentence_transformer.modules.normalize.Normalize",
        "sentence_transformers.sentence_transformer.modules.Normalize",
        "sentence_transformers.base.modules.normalize.Normalize",
    ],
)
def test_every_spelling_of_a_type(spelling: str, base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    entry(3, type=spelling)(folder)
    assert len(load(folder).layers) == 2


def test_half_precision_weights_are_read_as_float32(base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    half = {"linear.weight": torch.ones(4, 32).bfloat16(), "linear.bias": torch.zeros(4).bfloat16()}
    safetensors.torch.save_file(half, folder / "2_Dense/model.safetensors")
    with torch.no_grad():
        vectors = load(folder)(torch.ones(2, WIDTH), Batch.from_ids([[1, 2]]))
    assert vectors.dtype == torch.float32
    assert np.isclose(float(vectors.norm()), 1, atol=1e-6)


def test_every_activation_can_be_built_and_has_no_weights() -> None:
    for name, build in ACTIVATIONS.items():
        module = build()
        assert type(module).__name__ == name
        assert not list(module.parameters())
