"""Broken files never load: over a thousand seeded corruptions, each an error, or a model with unchanged weights.

The whole batch runs in one separate process (`python -m tests.checkpoints.test_corruption`), so that a crash is seen.
"""

from __future__ import annotations

import atexit
import copy
import faulthandler
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bertie.checkpoints.checkpoint import Checkpoint
from bertie.errors import BertieError, NotFoundError

SECONDS = 10  # a case may take


# --- the folders ---


@cache
def folders() -> dict[str, Path]:
    """One of each kind: from elsewhere, and saved by Bertie."""
    from tests.checkpoints.test_roundtrip import _bin, _old_bin, _sharded, _sharded_bin, sentence_folder, with_tokenizer
    from tests.parity.tiny import build

    root = Path(tempfile.mkdtemp(prefix="bertie-corruption-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    theirs = build("bert", "ForMaskedLM")
    with_tokenizer(root / "plain")
    for name, write in (("sharded", _sharded), ("bin", _bin), ("old-bin", _old_bin), ("sharded-bin", _sharded_bin)):
        write(theirs, root / name)
    sentence_folder(root / "sentence", "0_Transformer")
    build("roberta", "Model").save_pretrained(root / "tokenizer-json")
    Checkpoint.load(root / "plain").save(root / "saved")
    Checkpoint.load(root / "sentence").save(root / "saved-sentence")
    shutil.copy(root / "saved" / "tokenizer.json", root / "tokenizer-json" / "tokenizer.json")
    return {p.name: p for p in sorted(root.iterdir())}


def state(checkpoint: Checkpoint) -> dict[str, Tensor]:
    parts = dict(checkpoint.model.state_dict())
    if checkpoint.sentence is not None:
        parts |= {f"sentence.{k}": v for k, v in checkpoint.sentence.state_dict().items()}
    return parts


@cache
def sound(folder: str) -> dict[str, Tensor]:
    return state(Checkpoint.load(folders()[folder]))


# --- how files break ---

Bytes = Callable[[bytes, random.Random], bytes]


def flip(raw: bytes, draw: random.Random, start: int = 0, stop: int | None = None) -> bytes:
    at = draw.randrange(start, min(len(raw), stop or len(raw)))
    change = 1 << draw.randrange(8) if draw.random() < 0.7 else draw.randrange(1, 256)  # mostly one bit
    return raw[:at] + bytes([raw[at] ^ change]) + raw[at + 1 :]


def truncate(raw: bytes, draw: random.Random) -> bytes:
    return raw[: draw.randrange(len(raw))]


def zeros(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw))
    broken = raw[:at] + bytes(min(16, len(raw) - at)) + raw[at + 16 :]
    return broken if broken != raw else flip(raw, draw)


def insert(raw: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(raw) + 1)
    return raw[:at] + draw.randbytes(draw.randint(1, 8)) + raw[at:]


def header(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def flip_header(raw: bytes, draw: random.Random) -> bytes:
    return flip(raw, draw, 8, header(raw))


def flip_size(raw: bytes, draw: random.Random) -> bytes:
    size = header(raw) - 8
    absurd = (0, 1, 2, size - 1, size + 1, size + 8, len(raw), 100_000_001, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
    return draw.choice(absurd).to_bytes(8, "little") + raw[8:]


ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3.5,
    2**40,
    10**30,
    float("nan"),
    "",
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    ["x"],
    "\0",
    "../x",
]


def retype(raw: bytes, draw: random.Random) -> bytes:
    """One value, anywhere in a JSON file, becomes another, or is lost, or gets company."""
    value = json.loads(raw)
    places = list(_places(value))
    parent, key = draw.choice(places)
    action = draw.choice(("replace", "replace", "replace", "remove", "add", "nest"))
    if action == "replace":
        parent[key] = copy.deepcopy(draw.choice(ODD))
    elif action == "remove":
        del parent[key]
    elif action == "nest":
        tower: Any = 1
        for _ in range(draw.choice((5, 100, 900))):
            tower = [tower] if draw.random() < 0.5 else {"a": tower}
        parent[key] = tower
    elif isinstance(parent, dict):
        parent["surplus"] = copy.deepcopy(draw.choice(ODD))
    else:
        parent.append(copy.deepcopy(draw.choice(ODD)))
    return json.dumps(value).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from _places(inner)


def bracket_tower(raw: bytes, draw: random.Random) -> bytes:
    return draw.choice((b"[", b'{"a":')) * draw.choice((1000, 200_000))


def reencode(raw: bytes, draw: random.Random) -> bytes:
    text = raw.decode()
    return draw.choice(
        (text.encode("utf-8-sig"), text.encode("utf-16"), text.encode("utf-32"), b"", b"\xff\xfe", b"\0")
    )


NAMES: list[Any] = [
    *("../plain/model.safetensors", "/etc/passwd", "..", ".", "", "\0", "a\0.safetensors", "x\\y.safetensors"),
    *("..\\x.safetensors", "folder.safetensors", "link.safetensors", "loop.safetensors", "no-such.safetensors"),
    *("a" * 300 + ".safetensors", "a/b.safetensors", "config.json", "\ud800.safetensors", "~.safetensors"),
    *("model.safetensors/", "./model.safetensors", "//x.safetensors", "C:x.safetensors", 3, None, [], {}, True),
]


def rename_shard(raw: bytes, draw: random.Random) -> bytes:
    index = json.loads(raw)
    where = index["weight_map"]
    for key in draw.sample(sorted(where), draw.choice((1, 1, len(where)))):
        where[key] = draw.choice(NAMES)
    return json.dumps(index).encode()


def shuffle_index(raw: bytes, draw: random.Random) -> bytes:
    index = json.loads(raw)
    where = index["weight_map"]
    keys = sorted(where)
    one = draw.choice(keys)
    action = draw.choice(("move", "lose", "invent", "typo", "empty"))
    if action == "move":
        where[one] = draw.choice([file for file in where.values() if file != where[one]])
    elif action == "lose":
        del where[one]
    elif action == "invent":
        where["one.too.many"] = where[one]
    elif action == "typo":
        where[one + "x"] = where.pop(one)
    else:
        index["weight_map"] = draw.choice([{}, [], None, "x", {one: where[one]}])
    return json.dumps(index).encode()


# --- the cases ---


@dataclass(frozen=True)
class Case:
    kind: str
    folder: str
    file: str
    change: Bytes
    seed: int
    refuse: bool = False  # it must not load; else it may, with the same weights
    weights_may_change: bool = False  # a format without any check of its own


def cases() -> Iterator[Case]:
    def some(count: int, kind: str, folder: str, file: str, change: Bytes, **options: Any) -> Iterator[Case]:
        for seed in range(count):
            yield Case(kind, folder, file, change, seed, **options)

    paths = folders()
    for folder in ("saved", "saved-sentence"):
        for path in sorted(p for p in paths[folder].rglob("*") if p.is_file()):
            file = str(path.relative_to(paths[folder]))
            for count, change in ((12, flip), (5, truncate), (3, zeros), (3, insert)):
                yield from some(count, "saved by Bertie", folder, file, change, refuse=True)

    shard = sorted(p.name for p in paths["sharded"].glob("*.safetensors"))[0]
    for folder, file in (("plain", "model.safetensors"), ("sharded", shard), ("sentence", "2_Dense/model.safetensors")):
        yield from some(80, "safetensors header", folder, file, flip_header)
        yield from some(13, "safetensors header size", folder, file, flip_size)
        yield from some(25, "safetensors truncated", folder, file, truncate, refuse=True)
        yield from some(10, "safetensors header", folder, file, lambda raw, draw: insert(raw[:8], draw) + raw[8:])

    jsons = {
        "plain": ("config.json", "tokenizer_config.json"),
        "sharded": ("config.json", "model.safetensors.index.json"),
        "sharded-bin": ("pytorch_model.bin.index.json",),
        "sentence": ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "0_Transformer/config.json"),
        "tokenizer-json": ("tokenizer.json",),
    }
    jsons["sentence"] += ("0_Transformer/sentence_bert_config.json",)
    for folder, files in jsons.items():
        for file in files:
            yield from some(25, "JSON byte", folder, file, flip)
            yield from some(8, "JSON truncated", folder, file, truncate)
            yield from some(30, "JSON value", folder, file, retype)
            yield from some(4, "JSON tower", folder, file, bracket_tower, refuse=True)
            yield from some(6, "JSON encoding", folder, file, reencode, refuse=True)
    yield from some(60, "shard name", "sharded", "model.safetensors.index.json", rename_shard, refuse=True)
    yield from some(40, "index", "sharded", "model.safetensors.index.json", shuffle_index, refuse=True)
    yield from some(40, "index", "sharded-bin", "pytorch_model.bin.index.json", shuffle_index, refuse=True)

    yield from some(40, "vocabulary", "plain", "vocab.txt", flip)
    yield from some(10, "vocabulary", "plain", "vocab.txt", truncate)

    yield from some(150, ".bin byte", "bin", "pytorch_model.bin", flip)
    yield from some(40, ".bin truncated", "bin", "pytorch_model.bin", truncate, refuse=True)
    yield from some(20, ".bin byte", "bin", "pytorch_model.bin", zeros)
    yield from some(60, "old .bin byte", "old-bin", "pytorch_model.bin", flip, weights_may_change=True)
    yield from some(20, "old .bin truncated", "old-bin", "pytorch_model.bin", truncate, refuse=True)


class TooLong(BaseException):
    pass


def outcome(case: Case, folder: Path) -> str:
    file = folder / case.file
    raw = file.read_bytes()
    draw = random.Random(f"{case.kind} {case.folder} {case.file} {case.seed}")
    broken = case.change(raw, draw)
    if broken == raw:
        return "unchanged"
    file.write_bytes(broken)

    def too_long(*_: object) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(SECONDS)
    try:
        found = state(Checkpoint.load(folder))
    except BertieError:
        return "refused"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        signal.alarm(0)
        file.write_bytes(raw)
    expected = sound(case.folder)
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return "same weights" if same else "other weights"


def verdict(case: Case, result: str) -> bool:
    if result in ("refused", "unchanged"):
        return True
    if case.refuse:
        return False
    return result == "same weights" or (result == "other weights" and case.weights_may_change)


def run() -> dict[str, Any]:
    """Every case, and what came of it."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        copies = {}
        for name, path in folders().items():
            copies[name] = Path(place) / name
            shutil.copytree(path, copies[name])
            sound(name)
        tricks = copies["sharded"]
        (tricks / "folder.safetensors").mkdir()
        (tricks / "link.safetensors").symlink_to("/etc/hostname")
        (tricks / "loop.safetensors").symlink_to("loop.safetensors")
        for case in cases():
            result = outcome(case, copies[case.folder])
            counts[f"{case.kind} | {result.split(':')[0]}"] += 1
            if not verdict(case, result):
                wrong.append(f"{case.kind}, {case.folder}/{case.file}, {case.change.__name__} {case.seed}: {result}")
    return {"counts": dict(sorted(counts.items())), "wrong": wrong}


def test_a_thousand_corruptions() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.checkpoints.test_corruption"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    print("\n".join(f"{count:5} {name}" for name, count in report["counts"].items()))
    assert not report["wrong"], "\n".join(report["wrong"])
    assert sum(n for name, n in report["counts"].items() if "unchanged" not in name) >= 1000
    # The batch must max_length both ends: were all refused, it would not show that sound files load.
    assert any(name.endswith("same weights") for name in report["counts"])


# --- hostile pickles ---


class Payload:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def stretched() -> Tensor:
    return torch.zeros(1).as_strided((2**40, 16), (0, 0))


def hostile(folder: Path, kind: str, mark: Path) -> None:
    tensors: dict[str, Any] = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    target = folder / "pytorch_model.bin"
    payload = Payload(f"touch {mark}")
    if kind == "plain pickle":
        target.write_bytes(pickle.dumps({**tensors, "x": payload}))
    elif kind == "zip":
        torch.save({**tensors, "x": payload}, target)
    elif kind == "old":
        torch.save({**tensors, "x": payload}, target, _use_new_zipfile_serialization=False)
    elif kind == "key":
        target.write_bytes(b"cos\nsystem\n(S'touch " + str(mark).encode() + b"'\ntR.")
    elif kind == "eval":
        target.write_bytes(b"c__builtin__\neval\n(S'1'\ntR.")
    elif kind == "stretched":
        torch.save({**tensors, "bert.embeddings.word_embeddings.weight": stretched()}, target)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 2**31 - 1}))
    elif kind == "sparse":
        name = "bert.embeddings.word_embeddings.weight"
        torch.save({**tensors, name: tensors[name].to_sparse()}, target)
    elif kind == "meta":
        name = "bert.embeddings.word_embeddings.weight"
        torch.save({**tensors, name: tensors[name].to("meta")}, target)
    elif kind == "list":
        torch.save(list(tensors.values()), target)
    elif kind == "numbers":
        torch.save({**tensors, "step": 3}, target)
    elif kind == "packed":
        torch.save(tensors, folder / "x")
        with zipfile.ZipFile(folder / "x") as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
            for part in old.infolist():
                new.writestr(part.filename, old.read(part))
    else:
        raise ValueError(kind)


@pytest.mark.parametrize(
    "kind",
    [
        *("plain pickle", "zip", "old", "key", "eval", "stretched"),
        *("sparse", "meta", "list", "numbers", "packed"),
    ],
)
def test_hostile_pickles(kind: str, tmp_path: Path) -> None:
    folder, mark = tmp_path / "m", tmp_path / "ran"
    shutil.copytree(folders()["plain"], folder)
    hostile(folder, kind, mark)
    with pytest.raises(BertieError, match=r"pytorch_model\.bin"):
        Checkpoint.load(folder)
    assert not mark.exists()


# --- folders ---


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"config\.json"):
        Checkpoint.load(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotFoundError, match="is a file"):
        Checkpoint.load(tmp_path / "file")
    for name in ("config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt"):
        folder = tmp_path / f"without-{name}"
        shutil.copytree(folders()["plain"], folder)
        (folder / name).unlink()
        (folder / name).mkdir()
        if name in ("config.json", "model.safetensors"):
            with pytest.raises(BertieError, match=r"config\.json|weights"):
                Checkpoint.load(folder)
        else:
            Checkpoint.load(folder)


def test_unreadable_files() -> None:
    with tempfile.TemporaryDirectory() as place:  # pytest's own is closed to others, who are to read all but one file
        os.chmod(place, 0o755)
        shutil.copytree(folders()["saved"], Path(place) / "m")
        unreadable(Path(place) / "m")


def unreadable(folder: Path) -> None:
    root = os.geteuid() == 0
    for target in (*sorted(folder.iterdir()), folder):
        target.chmod(0)
        if root:
            os.seteuid(65534)  # root may read everything
        try:
            with pytest.raises(BertieError):
                Checkpoint.load(folder)
        finally:
            if root:
                os.seteuid(0)
            target.chmod(0o755)


@pytest.mark.parametrize(
    ("old", "new"), [(b"{\n", b"{\n\n"), (b'": "', b'":  "'), (b"}\n", b"}"), (b'  "config.json"', b'\t"config.json"')]
)
def test_checksums_guard_themselves(old: bytes, new: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(folders()["saved"], folder)
    raw = (folder / "checksums.json").read_bytes()
    assert old in raw
    (folder / "checksums.json").write_bytes(raw.replace(old, new, 1))
    with pytest.raises(BertieError, match=r"checksums\.json has been changed"):
        Checkpoint.load(folder)
    (folder / "checksums.json").write_bytes(b"{}\n")
    with pytest.raises(BertieError, match="was added since"):
        Checkpoint.load(folder)


def test_files_that_were_added_to_a_saved_folder(tmp_path: Path) -> None:
    for name in ("added_tokens.json", "modules.json", "pytorch_model.bin", "sentence_bert_config.json", "merges.txt"):
        folder = tmp_path / name
        shutil.copytree(folders()["saved"], folder)
        (folder / name).write_text("{}")
        with pytest.raises(BertieError, match="was added since"):
            Checkpoint.load(folder)
    for name in ("README.md", "training_log.json", "training_args.bin", ".gitattributes"):
        (folder / "merges.txt").unlink(missing_ok=True)
        (folder / name).write_text("x")
        Checkpoint.load(folder)


if __name__ == "__main__":
    faulthandler.enable()
    torch.set_num_threads(1)
    print(json.dumps(run()))
