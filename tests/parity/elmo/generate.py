"""Write the reference outputs of AllenNLP's ELMo for tiny random weights, which tests/parity/test_elmo.py reads.

    pip download --no-deps allennlp==2.10.1 && unzip allennlp-2.10.1-py3-none-any.whl -d allennlp-source
    python -m tests.parity.elmo.generate allennlp-source

AllenNLP 2.10.1, the last one, does not install beside a current torch. Its ELMo is plain torch: what follows imports
the real `allennlp.modules.elmo`, `elmo_lstm`, `lstm_cell_with_projection`, `encoder_base`, `highway`, `scalar_mix`,
`allennlp.nn.util` and the real `elmo_indexer`, and puts empty modules in place of the rest of the package, which they
only name (registration, instances, vocabularies, file downloads).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy as np
import torch

FOLDER = Path(__file__).parent
OPTIONS = {
    # Clip values that tiny random weights reach.
    "relu": {
        "lstm": {
            "use_skip_connections": True,
            "projection_dim": 10,
            "cell_clip": 0.5,
            "proj_clip": 0.4,
            "dim": 24,
            "n_layers": 2,
        },
        "char_cnn": {
            "activation": "relu",
            "filters": [[1, 4], [2, 8], [3, 12], [7, 6]],
            "n_highway": 2,
            "embedding": {"dim": 4},
            "n_characters": 262,
            "max_characters_per_token": 50,
        },
    },
    "tanh": {
        "lstm": {
            "use_skip_connections": True,
            "projection_dim": 6,
            "cell_clip": 3,
            "proj_clip": 3,
            "dim": 8,
            "n_layers": 3,
        },
        "char_cnn": {
            "activation": "tanh",
            "filters": [[1, 3], [4, 5]],
            "n_highway": 1,
            "embedding": {"dim": 3},
            "n_characters": 262,
            "max_characters_per_token": 50,
        },
    },
}
SENTENCES = [
    "The cat sat on the mat .".split(),
    ["Yes"],
    "Zürich und 東京 : naïve café 😀 !".split(),
    ["x" * 48, "y" * 49, "z" * 200, "東" * 16 + "a", "東" * 17],  # around the 48 bytes that fit into 50 characters
    "a longer sentence so that the lengths of the batch differ , with <S> and </S> among its words".split(),
    ["", "an", "empty", "word", ""],
]


def write_weights(path: Path, options: dict[str, Any], seed: int) -> None:
    """Random weights in the layout that bilm-tf writes."""
    random = np.random.RandomState(seed)
    cnn, lstm = options["char_cnn"], options["lstm"]
    dim, filters = cnn["embedding"]["dim"], sum(n for _, n in cnn["filters"])
    width, cell = lstm["projection_dim"], lstm["dim"]

    def normal(*shape: int, scale: float = 0.5) -> np.ndarray:
        return (random.randn(*shape) * scale).astype(np.float32)

    with h5py.File(path, "w") as file:
        file["char_embed"] = normal(cnn["n_characters"] - 1, dim, scale=1.0)
        for i, (size, count) in enumerate(cnn["filters"]):
            file[f"CNN/W_cnn_{i}"] = normal(1, size, dim, count)
            file[f"CNN/b_cnn_{i}"] = normal(count)
        for k in range(cnn["n_highway"]):
            for name in ("carry", "transform"):
                file[f"CNN_high_{k}/W_{name}"] = normal(filters, filters, scale=0.3)
                file[f"CNN_high_{k}/b_{name}"] = normal(filters)
        file["CNN_proj/W_proj"] = normal(filters, width)
        file["CNN_proj/b_proj"] = normal(width)
        for direction in range(2):
            for layer in range(lstm["n_layers"]):
                group = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
                file[f"{group}/W_0"] = normal(2 * width, 4 * cell)
                file[f"{group}/B"] = normal(4 * cell)
                file[f"{group}/W_P_0"] = normal(cell, width)


def import_allennlp(source: Path) -> tuple[Any, Any, Any]:
    """AllenNLP's modules of ELMo, of the scalar mix and of the character ids, in front of empty modules."""

    def stub(name: str, **names: Any) -> None:
        module = ModuleType(name)
        module.__path__ = [str(source / name.replace(".", "/"))]  # real submodules are found, unless they are stubs
        for key, value in names.items():
            setattr(module, key, value)
        sys.modules[name] = module

    class Registered:
        @classmethod
        def register(cls, name: str) -> Any:
            return lambda kind: kind

    def nothing(*args: Any, **options: Any) -> None:
        return None

    def keep(path: str) -> str:
        return path

    for package in ("allennlp", "allennlp.modules", "allennlp.nn"):
        stub(package)
    stub("allennlp.common", FromParams=object)
    stub("allennlp.common.checks", ConfigurationError=ValueError)
    stub("allennlp.common.file_utils", cached_path=keep)
    names = ("lazy_groups_of", "int_to_device", "is_distributed", "is_global_primary", "pad_sequence_to_length")
    stub("allennlp.common.util", **dict.fromkeys(names, nothing))
    stub("allennlp.nn.initializers", block_orthogonal=nothing)
    stub("allennlp.data")
    for module, name in (
        ("instance", "Instance"),
        ("vocabulary", "Vocabulary"),
        ("batch", "Batch"),
        ("fields", "TextField"),
        ("tokenizers", "Token"),
        ("tokenizers.token_class", "Token"),
    ):
        stub(f"allennlp.data.{module}", **{name: object})
    stub("allennlp.data.token_indexers")
    stub("allennlp.data.token_indexers.token_indexer", TokenIndexer=Registered, IndexedTokenList=dict)
    from allennlp.data.token_indexers import elmo_indexer
    from allennlp.modules import elmo, scalar_mix

    return elmo, scalar_mix, elmo_indexer


def padded_ids(indexer: Any, sentences: list[list[str]]) -> torch.Tensor:
    """(B, longest, 50), with zeros for padding."""
    mapper = indexer.ELMoCharacterMapper()
    ids = torch.zeros(len(sentences), max(map(len, sentences)), 50, dtype=torch.long)
    for row, words in zip(ids, sentences, strict=True):
        for place, word in zip(row, words, strict=False):
            place.copy_(torch.tensor(mapper.convert_word_to_char_ids(word)))
    return ids


def reference(name: str, modules: tuple[Any, Any, Any]) -> dict[str, np.ndarray]:
    """All layers of all sentences, mixes of them, and the gradients of the mix."""
    elmo, mixes, indexer = modules
    options, weights = str(FOLDER / f"{name}_options.json"), str(FOLDER / f"{name}_weights.hdf5")
    ids = padded_ids(indexer, SENTENCES)
    out: dict[str, np.ndarray] = {"ids": torch.cat([ids[b, : len(s)] for b, s in enumerate(SENTENCES)]).numpy()}
    with torch.no_grad():
        activations = elmo._ElmoBiLm(options, weights)(ids)["activations"]
    layers = [torch.cat([layer[b, 1 : len(s) + 1] for b, s in enumerate(SENTENCES)]) for layer in activations]
    out["layers"] = torch.stack(layers).numpy()  # (layers + 1, all words, 2 * projection_dim)
    count = len(layers)
    scalars = [0.5 * k - 0.3 for k in range(count)]
    full = elmo.Elmo(options, weights, 1, dropout=0.0, scalar_mix_parameters=scalars)
    mixed = full(ids)["elmo_representations"][0]
    flat = torch.cat([mixed[b, : len(s)] for b, s in enumerate(SENTENCES)])
    target = torch.linspace(-1, 1, flat.numel()).view_as(flat)
    alone = mixes.ScalarMix(count, initial_scalar_parameters=scalars)
    alone.gamma.data.fill_(1.5)
    result = alone(layers)
    ((result - target) ** 2).mean().backward()
    out |= {"mix_of_elmo": flat.detach().numpy(), "mix": result.detach().numpy(), "target": target.numpy()}
    out["mix_gradient"] = torch.cat([p.grad for p in alone.scalar_parameters]).numpy()
    out["gamma_gradient"] = alone.gamma.grad.numpy()
    normed = mixes.ScalarMix(count, do_layer_norm=True, initial_scalar_parameters=scalars)
    # One token at a time: AllenNLP normalizes over all tokens of a batch, Bertie over the dimensions of each token.
    rows = [normed([layer[t : t + 1] for layer in layers], torch.ones(1, dtype=torch.bool)) for t in range(len(flat))]
    out["mix_with_norm"] = torch.cat(rows).detach().numpy()
    return out


def main(source: Path) -> None:
    """Write the files of all models."""
    sys.path.insert(0, str(source))
    modules = import_allennlp(source)
    for seed, (name, options) in enumerate(OPTIONS.items()):
        (FOLDER / f"{name}_options.json").write_text(json.dumps(options), "utf-8")
        write_weights(FOLDER / f"{name}_weights.hdf5", options, seed)
        np.savez_compressed(FOLDER / f"{name}_reference.npz", **reference(name, modules))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
