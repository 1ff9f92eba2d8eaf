import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from bertie.checkpoints.sentence_modules import SentenceModules
from bertie.errors import CheckpointError, ConfigError
from bertie.nn.pooling import MODES
from bertie.nn.sentence_layers import Dense
from bertie.text.batch import Batch
from tests.checkpoints.tiny_sentence import WIDTH, WORDS, load, old_folder

pytest.importorskip("sentence_transformers")
pytest.importorskip("transformers")

TEXTS = ["the cat sat on the mat", "a dog", "the dog ran on a mat and a cat sat", "cat"]


def build(
    base: Path, folder: Path, *modules: nn.Module, transformer: dict[str, Any] | None = None, **kwargs: Any
) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    SentenceTransformer(modules=[Transformer(str(base), **(transformer or {})), *modules], device="cpu", **kwargs).save(
        str(folder), create_model_card=False
    )
    return folder


@torch.no_grad()
def ours(folder: Path, modules: SentenceModules, texts: list[str], prompt: str = "") -> torch.Tensor:
    """Hidden states from transformers, text by text without padding; all that follows from Bertie."""
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(folder / modules.transformer_path).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / modules.transformer_path)
    texts = [prompt + text for text in texts]
    if modules.lower_case:
        texts = [text.lower() for text in texts]
    ids = [tokenizer(text, truncation=True, max_length=modules.max_seq_length)["input_ids"] for text in texts]
    hidden = torch.cat([model(torch.tensor([one])).last_hidden_state[0] for one in ids])
    prompt_length = len(tokenizer(prompt)["input_ids"]) - 1 if prompt else 0
    return modules(hidden, Batch.from_ids(ids), [prompt_length] * len(texts))


def theirs(folder: Path, texts: list[str], **kwargs: Any) -> torch.Tensor:
    from sentence_transformers import SentenceTransformer

    return torch.from_numpy(SentenceTransformer(str(folder), device="cpu").encode(texts, **kwargs))


def write_back(source: Path, target: Path, modules: SentenceModules) -> Path:
    """The transformer's own files from `source`, everything else from Bertie."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        place = target / modules.transformer_path / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((source / modules.transformer_path / name).read_bytes())
    for path, content in modules.files().items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    return target


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert_close(a, b, atol=1e-6, rtol=1e-5)


def chains() -> dict[str, Callable[[], list[nn.Module]]]:
    from sentence_transformers.sentence_transformer import modules as st

    tables: dict[str, Callable[[], list[nn.Module]]] = {mode: lambda m=mode: [st.Pooling(WIDTH, m)] for mode in MODES}
    return tables | {
        "mean+cls": lambda: [st.Pooling(WIDTH, ("mean", "cls")), st.Normalize()],
        "dense": lambda: [st.Pooling(WIDTH, "mean"), st.Dense(WIDTH, 6), st.Normalize()],
        "gelu": lambda: [st.Pooling(WIDTH, "cls"), st.Dense(WIDTH, 6, bias=False, activation_function=nn.GELU())],
        "residual": lambda: [
            st.Pooling(WIDTH, "max"),
            st.Dense(WIDTH, 6, activation_function=None, use_residual=True),
            st.Dense(6, 6, use_residual=True),
        ],
        "words": lambda: [st.WordWeights(WORDS, {"the": 0.25, "cat": 2.0}, 0.5), st.Pooling(WIDTH, MODES)],
        "norms": lambda: [
            st.Pooling(WIDTH, "mean"),
            st.Normalize(),
            st.Dense(WIDTH, 8),
            st.LayerNorm(8),
            st.Dropout(0.3),
            st.Normalize(),
        ],
    }


@pytest.mark.parametrize("name", [*MODES, "mean+cls", "dense", "gelu", "residual", "words", "norms"])
def test_equals_sentence_transformers_both_ways(name: str, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    chain = chains()[name]()
    for one in chain:
        for weight in one.parameters():  # LayerNorm starts at ones and zeros, which would hide a swap
            nn.init.normal_(weight)
    folder = build(base, tmp_path / "theirs", *chain)
    modules = load(folder)
    expected = theirs(folder, TEXTS)
    same(ours(folder, modules, TEXTS), expected)
    assert modules.dimension == expected.shape[1]
    assert modules.max_seq_length == 40
    copy = write_back(folder, tmp_path / "ours", modules)
    same(theirs(copy, TEXTS), expected)
    for path in folder.rglob("*.json"):
        assert json.loads((copy / path.relative_to(folder)).read_bytes()) == json.loads(path.read_bytes())


@pytest.mark.parametrize("mode", ["cls", "mean", "weightedmean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_prompt_left_out_of_the_pooling(mode: str, weighted: bool, base: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling, WordWeights

    prompts = {"query": "find : ", "document": ""}
    chain = [*([WordWeights(WORDS, {"find": 3.0, "a": 0.1})] if weighted else [])]
    chain.append(Pooling(WIDTH, mode, include_prompt=False))
    folder = build(base, tmp_path, *chain, prompts=prompts, default_prompt_name="query", similarity_fn_name="dot")
    modules = load(folder)
    assert (modules.prompts, modules.default_prompt, modules.similarity) == (prompts, "query", "dot")
    same(ours(folder, modules, TEXTS, "find : "), theirs(folder, TEXTS))
    same(ours(folder, modules, TEXTS), theirs(folder, TEXTS, prompt_name="document"))


def test_length_and_truncate_dim(base: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = build(base, tmp_path, Pooling(WIDTH), transformer={"max_seq_length": 5}, truncate_dim=7)
    modules = load(folder)
    assert (modules.max_seq_length, modules.dimension, modules.truncate_dim) == (5, 7, 7)
    same(ours(folder, modules, TEXTS), theirs(folder, TEXTS))


def test_old_layout_both_ways(base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "theirs", lower_case=True)
    modules = load(folder)
    assert (modules.transformer_path, modules.max_seq_length, modules.lower_case) == ("0_Transformer", 6, True)
    assert modules.pooling.modes == ("cls", "mean")
    texts = [text.upper() for text in TEXTS]
    expected = theirs(folder, texts)
    same(ours(folder, modules, texts), expected)
    copy = write_back(folder, tmp_path / "ours", modules)
    same(theirs(copy, texts), expected)
    assert not list(copy.rglob("*.bin"))


@pytest.mark.parametrize(
    ("pooling", "dense"), [("mean", True), ("weightedmean", False), (("cls", "mean"), True), (("mean", "cls"), False)]
)
def test_fresh_modules_load_there_and_here(
    pooling: str | tuple[str, ...], dense: bool, base: Path, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    wide = WIDTH if isinstance(pooling, str) else WIDTH * len(pooling)
    layer = Dense(wide, 5, bias=False, activation="GELU", residual=True) if dense else None
    prompts = {"query": "find : ", "ö": "ü"}
    fresh = SentenceModules.create(
        WIDTH, pooling, dense=layer, max_seq_length=6, prompts=prompts, default_prompt="query", similarity="euclidean"
    )
    folder = write_back(base, tmp_path, fresh)
    expected = theirs(folder, TEXTS)
    same(ours(folder, fresh, TEXTS, "find : "), expected)
    again = load(folder)
    same(ours(folder, again, TEXTS, "find : "), expected)
    assert again.files() == fresh.files()
    assert again._settings() == fresh._settings()
    assert again.dimension == fresh.dimension == expected.shape[1]


def test_token_weights_are_added_and_replaced(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain = SentenceModules.create(WIDTH, ["mean", "cls"], dense=Dense(2 * WIDTH, 6), prompts={"query": "find : "})
    plain.max_seq_length = 20
    first = plain.with_token_weights(torch.rand(len(WORDS)), WORDS)
    assert (first.max_seq_length, first.prompts, first.dimension) == (20, {"query": "find : "}, 6)
    changed = first.with_token_weights(torch.rand(len(WORDS)), WORDS)
    trained = first.with_token_weights(torch.rand(len(WORDS)), WORDS)
    assert trained.pooling.token_weights is not None
    with torch.no_grad():
        trained.pooling.token_weights += 0.123456
    below = first.with_token_weights(torch.rand(len(WORDS)) - 0.5, WORDS)
    assert below.pooling.token_weights is not None
    assert below.pooling.token_weights.min() < 0
    folder = write_back(base, tmp_path / "below", below.eval())
    same(ours(folder, below, TEXTS), theirs(folder, TEXTS))
    same(ours(folder, load(folder), TEXTS), theirs(folder, TEXTS))
    longer = (
        SentenceModules.create(WIDTH, normalize=False)
        .with_token_weights(torch.rand(len(WORDS)), WORDS)
        .with_layers(Dense(WIDTH, 4))
    )
    for name, modules in {"first": first, "changed": changed, "trained": trained, "longer": longer}.items():
        folder = write_back(base, tmp_path / name, modules.eval())
        read = load(folder)
        assert read.pooling.token_weights is not None
        assert modules.pooling.token_weights is not None
        assert torch.equal(read.pooling.token_weights, modules.pooling.token_weights)
        same(ours(folder, read, TEXTS), theirs(folder, TEXTS))
        same(ours(folder, modules, TEXTS), theirs(folder, TEXTS))
        assert load(write_back(folder, tmp_path / f"{name} again", read)).files() == read.files()
    assert not torch.equal(ours(base, first, TEXTS), ours(base, changed, TEXTS))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab": WORDS[:3]}, "vocab has 3 words; it must list words, at least the 16 of the model"),
        ({"vocab": [*WORDS[:-1], 4]}, "vocab has 4 in it; it must list words"),
        ({"vocab": "a b"}, "vocab='a b' is not supported; allowed: a list"),
        ({"word_weights": [1.0]}, "word_weights"),
        ({"word_weights": {"cat": "much"}}, "word_weights has 'much' for 'cat'; it must be at least 0"),
        ({"word_weights": {"cat": -1}}, "word_weights has -1 for 'cat'"),
        ({"word_weights": {"cat": True}}, "word_weights has True for 'cat'"),
        ({"word_weights": {"cat": float("nan")}}, "word_weights has nan for 'cat'"),
        ({"word_weights": {"cat": 1e39}}, "word_weights has 1e+39 for 'cat'"),  # infinite in float32
        ({"unknown_word_weight": -1.0}, "unknown_word_weight"),
        ({"idf": 1}, "idf=1"),
    ],
)
def test_invalid_token_weights(config: dict[str, Any], message: str, base: Path, tmp_path: Path) -> None:
    modules = SentenceModules.create(WIDTH).with_token_weights(torch.ones(len(WORDS)), WORDS)
    folder = write_back(base, tmp_path, modules)
    file = folder / "1_WordWeights/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    with pytest.raises(ConfigError, match=re.escape(message)):
        SentenceModules.from_folder(folder, WIDTH, len(WORDS))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_of_modules_must_be_finite(value: float, base: Path, tmp_path: Path) -> None:
    modules = SentenceModules.create(WIDTH, dense=Dense(WIDTH, 4))
    with torch.no_grad():
        modules.layers[0].linear.weight[3, 2] = value
    with pytest.raises(CheckpointError, match=r"2_Dense: linear\.weight has values that are not finite"):
        load(write_back(base, tmp_path, modules))
    with pytest.raises(ConfigError, match="token weights must be finite"):
        SentenceModules.create(WIDTH).with_token_weights(torch.full((len(WORDS),), value), WORDS)


def test_misplaced_token_weights(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"token weights have shape \(3,\); the vocabulary needs \(16,\)"):
        SentenceModules.create(WIDTH).with_token_weights(torch.ones(3), WORDS)
    folder = write_back(base, tmp_path, SentenceModules.create(WIDTH).with_token_weights(torch.ones(len(WORDS)), WORDS))
    listed = json.loads((folder / "modules.json").read_text())
    for order in ([0, 1], [0, 2, 1], [0, 2, 3, 1]):
        some = [listed[i] | {"idx": n} for n, i in enumerate(order)]
        (folder / "modules.json").write_text(json.dumps(some))
        with pytest.raises(ConfigError, match=r"it must list one Pooling first \(or WordWeights before it\)"):
            load(folder)


def test_changed_fields_are_written_and_the_rest_kept(base: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense as TheirDense
    from sentence_transformers.sentence_transformer.modules import Pooling

    folder = build(base, tmp_path / "theirs", Pooling(WIDTH), TheirDense(WIDTH, 4))
    modules = load(folder)
    modules.max_seq_length, modules.similarity, modules.default_prompt = 4, "dot", "q"
    modules.prompts["q"] = "find : "
    with torch.no_grad():
        modules.layers[0].linear.weight.mul_(2)
    files = modules.files()
    pooling = (folder / "1_Pooling/config.json").read_bytes()
    assert json.loads(files["1_Pooling/config.json"]) == json.loads(pooling)
    before = json.loads((folder / "config_sentence_transformers.json").read_bytes())
    after = json.loads(files["config_sentence_transformers.json"])
    prompts = before["prompts"] | {"q": "find : "}
    assert after == before | {"prompts": prompts, "default_prompt_name": "q", "similarity_fn_name": "dot"}
    copy = write_back(folder, tmp_path / "ours", modules)
    assert SentenceTransformer(str(copy), device="cpu").max_seq_length == 4
    same(theirs(copy, TEXTS), ours(copy, modules, TEXTS, "find : "))


def test_gradients_reach_the_dense_layer_and_the_encoder() -> None:
    modules = SentenceModules.create(4, dense=Dense(4, 3))
    hidden = torch.randn(5, 4, requires_grad=True)
    modules(hidden, Batch.from_ids([[1, 2], [3, 4, 5]]))[:, 0].sum().backward()
    assert hidden.grad is not None
    assert bool((hidden.grad != 0).any(dim=1).all())
    assert all(weight.grad is not None for weight in modules.parameters())


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pooling": "median"}, "must be one or more of cls"),
        ({"dense": Dense(8, 4)}, "dense takes vectors of 8 but pooling gives 16"),
        ({"default_prompt": "q"}, "default_prompt_name='q' is not supported; allowed: null"),
        ({"similarity": "maxsim"}, "similarity_fn_name='maxsim' is not supported; allowed: 'cosine'"),
        ({"max_seq_length": 0}, "max_seq_length=0 is not supported; allowed: a whole number from 1"),
    ],
)
def test_fresh_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SentenceModules.create(WIDTH, **kwargs)


def test_dense_refuses_other_activations() -> None:
    with pytest.raises(ConfigError, match="activation='Softmax' must be one of"):
        Dense(4, 4, activation="Softmax")
