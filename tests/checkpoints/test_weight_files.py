"""Weights kept small: int8 to within half a scale, the same bytes again, and refused by name when anything is amiss."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from safetensors.torch import load_file, save_file
from torch import Tensor

from bertie.checkpoints import weight_files
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.config import HeadInfo
from bertie.errors import CheckpointError, ConfigError
from bertie.ops import quantization
from tests.checkpoints.test_roundtrip import assert_same, parameters, sentence_folder, their_model, with_tokenizer
from tests.parity.tiny import TINY, build

FAMILIES = list({tiny.model_type: name for name, tiny in reversed(TINY.items())}.values())
LARGEST = 2.0**127
WORDS = "bert.embeddings.word_embeddings.weight"
INT8 = "model.int8.safetensors"


# --- numbers ---


def matrices() -> st.SearchStrategy[Tensor]:
    number = st.floats(-LARGEST, LARGEST, width=32) | st.floats(-1, 1, width=32) | st.just(0.0)
    rows = st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(number, min_size=n, max_size=n), min_size=1))
    return rows.map(torch.tensor)


@settings(max_examples=200, deadline=None)
@given(matrices())
def test_within_half_a_scale(x: Tensor) -> None:
    codes, scales = quantization.quantize(x)
    assert (codes.dtype, codes.shape, scales.dtype, scales.shape) == (torch.int8, x.shape, torch.float32, x.shape[:1])
    found = quantization.dequantize(codes, scales)
    # In numbers that hold every product exactly.
    wide, step = codes.numpy().astype(np.float64), scales.numpy().astype(np.float64)[:, None]
    assert np.array_equal(found.numpy(), wide * step)
    assert (np.abs(x.numpy() - wide * step) <= step / 2).all()
    assert codes.min() >= -127
    assert scales.min() > 0  # of rows of zeros, too: others are refused when they are read
    # No scale is wider than it must be, but for what is rounded up and for rows that are as good as zero.
    top = x.abs().amax(1).double().numpy()[:, None]
    assert (step <= np.maximum(top / 127 * (1 + 2.0**-15), 2.0**-100)).all()
    again = quantization.quantize(found)
    assert torch.equal(again[0], codes)
    assert torch.equal(again[1], scales)


def test_more_rows_than_are_worked_on_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, 3, 7)
    x[17] = 0
    whole = quantization.quantize(x)
    monkeypatch.setattr(quantization, "_BLOCK", 64)
    codes, scales = quantization.quantize(x)
    assert torch.equal(codes, whole[0])
    assert torch.equal(scales, whole[1])
    found = quantization.dequantize(codes, scales)
    assert found.shape == x.shape
    assert not found[17].any()
    torch.testing.assert_close(found, codes * scales[:, None, None], atol=0, rtol=0)


@pytest.mark.parametrize("x", [torch.randn(4, 6).bfloat16(), torch.randn(6, 4).T, torch.randn(4, 6).double()])
def test_other_memory(x: Tensor) -> None:
    expected = quantization.quantize(x.float().contiguous())
    found = quantization.quantize(x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=2.0**-15)


@pytest.mark.parametrize(
    ("to", "value"),
    [("int8", float("nan")), ("int8", float("inf")), ("int8", -3e38), ("fp16", float("nan")), ("fp16", 1e5)],
)
@pytest.mark.parametrize("name", ["embeddings.word_embeddings.weight", "encoder.layer.1.output.dense.bias"])
def test_numbers_that_cannot_be_kept(to: weight_files.StoredPrecision, value: float, name: str, tmp_path: Path) -> None:
    build("bert", "Model").save_pretrained(tmp_path / "a")
    checkpoint = Checkpoint.load(tmp_path / "a")
    checkpoint.spec.weight_map.store(checkpoint.model)[name].view(-1)[3] = value
    with pytest.raises(CheckpointError, match=f"{name} has values that are not finite in {to}"):
        checkpoint.save(tmp_path / "b", precision=to)
    assert not (tmp_path / "b").exists()


# --- folders ---


def bare(packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """Unpacked by hand, from the layout as it is written down."""
    out = {}
    for name, x in packed.items():
        if x.dtype == torch.int8:
            rows = [row.double() * scale.double() for row, scale in zip(x, packed[f"{name}.scale"], strict=True)]
            out[name] = torch.stack(rows).float()
        elif not name.endswith(".scale"):
            out[name] = x
    return out


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("name", [*FAMILIES, "bert-untied", "roberta-untied"])
def test_every_family(name: str, tmp_path: Path) -> None:
    suffix = TINY[name].heads[-1]
    build(name, suffix).save_pretrained(tmp_path / "a")
    first = Checkpoint.load(tmp_path / "a")
    first.save(tmp_path / "b", precision="int8")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config.pop("bertie") == {"weights": "int8"}
    assert config == json.loads((tmp_path / "a" / "config.json").read_text())
    packed, plain = load_file(tmp_path / "b" / INT8), first.spec.weight_map.store(first.model)
    assert {n: x.dtype for n, x in packed.items() if not n.endswith(".scale")} == {
        n: torch.int8 if x.ndim > 1 else torch.float32 for n, x in plain.items()
    }
    expected = bare(packed)
    for key, x in plain.items():
        room = packed[f"{key}.scale"].view(-1, *[1] * (x.ndim - 1)) / 2 if x.ndim > 1 else torch.zeros(1)
        assert ((x.double() - expected[key].double()).abs() <= room).all(), key

    second = Checkpoint.load(tmp_path / "b")
    assert_same(second.spec.weight_map.store(second.model), expected)
    # The same bytes again; and as plain weights the same model, for others too.
    second.save(tmp_path / "c", precision="int8")
    assert bytes_of(tmp_path / "c") == bytes_of(tmp_path / "b")
    second.save(tmp_path / "d")
    assert_same(parameters(Checkpoint.load(tmp_path / "d")), parameters(second))
    assert_same(load_file(tmp_path / "d" / "model.safetensors"), expected)
    theirs = {key: x for key, x in their_model(name, suffix, tmp_path / "d").state_dict().items() if key in expected}
    assert_same(theirs, {key: expected[key] for key in theirs})
    assert theirs


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_in_another_precision(precision: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    first = Checkpoint.load(with_tokenizer(tmp_path / "a"))
    first.model.encoder.embeddings.words.weight.data[3] = 0
    first.save(tmp_path / "b", precision="int8")
    wide = parameters(Checkpoint.load(tmp_path / "b"))
    assert not wide["encoder.embeddings.words.weight"][3].any()
    half = Checkpoint.load(tmp_path / "b", precision=precision)
    assert_same(parameters(half), {name: x.to(dtype) for name, x in wide.items()})
    half.save(tmp_path / "c", precision="int8")
    assert {p.dtype for p in Checkpoint.load(tmp_path / "c").model.parameters()} == {torch.float32}


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_fp16(name: str, tmp_path: Path) -> None:
    build(name, "ForMaskedLM").save_pretrained(tmp_path / "a")
    first = Checkpoint.load(tmp_path / "a")
    first.save(tmp_path / "b", precision="fp16")
    expected = {key: x.half() for key, x in first.spec.weight_map.store(first.model).items()}
    assert_same(load_file(tmp_path / "b" / "model.safetensors"), expected)
    theirs = their_model(name, "ForMaskedLM", tmp_path / "b").state_dict()
    assert_same({key: theirs[key] for key in expected}, expected)
    assert "bertie" not in json.loads((tmp_path / "b" / "config.json").read_text())
    assert {p.dtype for p in first.model.parameters()} == {torch.float32}
    Checkpoint.load(tmp_path / "b").save(tmp_path / "c", precision="fp16")
    assert bytes_of(tmp_path / "c") == bytes_of(tmp_path / "b")


def test_what_is_not_known_is_not_saved(tmp_path: Path) -> None:
    checkpoint = Checkpoint.load(with_tokenizer(tmp_path / "a"))
    for wrong in ("int4", "", "fp32", 8):
        with pytest.raises(ConfigError, match=r"precision=.* must be one of fp16, int8, or None"):
            checkpoint.save(tmp_path / "b", precision=wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("transformer", ["", "0_Transformer"])
def test_all_in_one(transformer: str, tmp_path: Path) -> None:
    """Sentence vectors, named heads and checksums; others refuse the folder, in words, rather than misread it."""
    import sentence_transformers

    first = Checkpoint.load(sentence_folder(tmp_path / "a", transformer))
    first.add_head("topics", HeadInfo("classify", {0: "x", 1: "y", 2: "z"}))
    first.save(tmp_path / "b", precision="int8")
    inner = tmp_path / "b" / transformer
    assert load_file(inner / "heads.safetensors")["topics.out.weight"].dtype == torch.int8
    second = Checkpoint.load(tmp_path / "b")
    packed = bare(load_file(inner / INT8)) | bare(load_file(inner / "heads.safetensors"))
    assert torch.equal(second.model.head("topics").get_parameter("out.weight"), packed["topics.out.weight"])
    assert second.sentence is not None
    assert first.sentence is not None
    assert_same(second.sentence.state_dict(), first.sentence.state_dict())
    second.save(tmp_path / "c", precision="int8")
    assert bytes_of(tmp_path / "c") == bytes_of(tmp_path / "b")
    assert list(Checkpoint.load(tmp_path / "b", ignore=["bertie"]).heads) == ["pooler"]

    with pytest.raises(OSError, match=r"model\.safetensors"):
        transformers.AutoModel.from_pretrained(inner)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        sentence_transformers.SentenceTransformer(str(tmp_path / "b"), device="cpu")

    for file, raw in bytes_of(tmp_path / "b").items():
        (tmp_path / "b" / file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=r"checksums|changed"):
            Checkpoint.load(tmp_path / "b")
        (tmp_path / "b" / file).write_bytes(raw)
    (tmp_path / "b" / "quantization.json").write_text("{}")
    Checkpoint.load(tmp_path / "b")


# --- what is amiss ---


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed")
    checkpoint = Checkpoint.load(with_tokenizer(folder / "a"))
    checkpoint.add_head("topics", HeadInfo("classify", {0: "x", 1: "y"}))
    checkpoint.save(folder / "b", precision="int8")
    (folder / "b" / "checksums.json").unlink()
    return folder / "b"


@pytest.fixture
def packed(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def refused(folder: Path, message: str, *, inspected: bool = True) -> None:
    for attempt in (Checkpoint.load, Checkpoint.inspect) if inspected else (Checkpoint.load,):
        with pytest.raises(CheckpointError, match=message):
            attempt(folder)


def scaled(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], str], object]:
    return lambda t, name: t.update({f"{name}.scale": change(t[f"{name}.scale"]).contiguous()})


SPOILT: list[tuple[Callable[[dict[str, Tensor], str], object], str]] = [
    (lambda t, n: t.pop(f"{n}.scale"), r"{n} is int8, but {n}\.scale is missing"),
    (lambda t, n: t.pop(n), r"missing: {n}; unexpected: {n}\.scale"),
    (scaled(lambda s: s[:-1]), r"{n}\.scale has dtype F32 and shape \(.*\); {n} needs F32 of shape"),
    (scaled(lambda s: s[:, None]), r"{n}\.scale has dtype F32 and shape \(\d+, 1\); {n} needs"),
    (scaled(lambda s: s[0]), r"{n}\.scale has dtype F32 and shape \(\); {n} needs"),
    (scaled(Tensor.half), r"{n}\.scale has dtype F16"),
    (scaled(Tensor.char), r"{n}\.scale is int8, but {n}\.scale\.scale is missing|{n}\.scale has dtype I8"),
    (lambda t, n: t.update({n: t[n].float()}), r"{n} has dtype F32 and shape .* every matrix is"),
    (lambda t, n: t.update({n: t[n].short()}), r"{n} has dtype I16 and shape .* every matrix is"),
    (lambda t, n: t.update({n: t[n].view(torch.uint8)}), r"{n} has dtype U8 and shape .* every matrix is"),
    (lambda t, n: t.update({n: t[n][:, :-1].contiguous()}), r"{n} has shape .* but the config implies"),
    (lambda t, n: t.update({n: t[n].flatten(), f"{n}.scale": torch.ones(t[n].numel())}), r"{n} has dtype I8 and shape"),
]
READ: list[tuple[Callable[[dict[str, Tensor], str], object], str]] = [
    (scaled(lambda s: s * 0), r"{n}\.scale has values that are not positive"),
    (scaled(lambda s: -s), r"{n}\.scale has values that are not positive"),
    (scaled(lambda s: s / 0), r"{n}\.scale has values that are not positive"),
    (scaled(lambda s: s * float("nan")), r"{n}\.scale has values that are not positive"),
    (scaled(lambda s: s / s * 3e38), r"{n} has values that are not finite"),
]


@pytest.mark.parametrize(("file", "name"), [(INT8, WORDS), ("heads.safetensors", "topics.out.weight")])
@pytest.mark.parametrize(("change", "message"), SPOILT + READ)
def test_spoilt(
    file: str, name: str, change: Callable[[dict[str, Tensor], str], object], message: str, packed: Path
) -> None:
    tensors = load_file(packed / file)
    change(tensors, name)
    save_file(tensors, packed / file)
    refused(packed, message.replace("{n}", name.replace(".", r"\.")), inspected=(change, message) in SPOILT)


def test_the_key_and_the_files_belong_together(packed: Path) -> None:
    config = json.loads((packed / "config.json").read_text())

    def say(ours: Any) -> None:
        (packed / "config.json").write_text(json.dumps({**config, "bertie": ours}))

    for wrong in ("int4", "INT8", "", None, 8, True, ["int8"], {"int8": 1}, "x" * 5000):
        say({**config["bertie"], "weights": wrong})
        refused(packed, r"config\.json: bertie\.weights=.{,90} is not supported; allowed: int8")
    say({"heads": config["bertie"]["heads"]})
    refused(packed, rf"has {INT8}, but config\.json does not say")
    shutil.copy(packed / INT8, packed / "model.safetensors")
    refused(packed, rf"unexpected: .*{WORDS}\.scale".replace(WORDS, "bert.embeddings.position_embeddings.weight"))
    tensors = load_file(packed / INT8)
    save_file({name: x for name, x in tensors.items() if not name.endswith(".scale")}, packed / "model.safetensors")
    refused(packed, r"\.weight has dtype torch\.int8", inspected=False)
    # Plain weights, and named heads that are still packed.
    save_file(bare(tensors), packed / "model.safetensors")
    refused(packed, r"heads\.safetensors: .*unexpected: topics\.\S+\.scale")
    say(config["bertie"])
    (packed / INT8).unlink()
    refused(packed, rf"config\.json says that the weights are int8, but {INT8} is missing")
