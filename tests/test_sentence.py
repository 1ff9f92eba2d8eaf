import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.testing import assert_close

from bertie.errors import CheckpointError, ConfigError
from bertie.nn.pooling import MODES
from bertie.sentence import Dense, SentenceModules
from bertie.text.batch import Batch

pytest.importorskip("sentence_transformers")
pytest.importorskip("transformers")

WIDTH = 16
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "the",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    "query",
    ":",
    "find",
]
TEXTS = ["the cat sat on the mat", "a dog", "the dog ran on a mat and a cat sat", "cat"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random BERT with a tokenizer, as transformers saves it."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("bert")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=40,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)}, model_max_length=40).save_pretrained(folder)
    return folder


def build(
    base: Path, folder: Path, *modules: nn.Module, transformer: dict[str, Any] | None = None, **kwargs: Any
) -> Path:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    SentenceTransformer(modules=[Transformer(str(base), **(transformer or {})), *modules], device="cpu", **kwargs).save(
        str(folder), create_model_card=False
    )
    return folder


def load(folder: Path) -> SentenceModules:
    modules = SentenceModules.from_folder(folder, WIDTH)
    assert modules is not None
    return modules.eval()


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
        "norms": lambda: [
            st.Pooling(WIDTH, "mean"),
            st.Normalize(),
            st.Dense(WIDTH, 8),
            st.LayerNorm(8),
            st.Dropout(0.3),
            st.Normalize(),
        ],
    }


@pytest.mark.parametrize("name", [*MODES, "mean+cls", "dense", "gelu", "residual", "norms"])
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
        assert (copy / path.relative_to(folder)).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("mode", ["cls", "mean", "weightedmean"])
def test_prompt_left_out_of_the_pooling(mode: str, base: Path, tmp_path: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    prompts = {"query": "find : ", "document": ""}
    pooling = Pooling(WIDTH, mode, include_prompt=False)
    folder = build(base, tmp_path, pooling, prompts=prompts, default_prompt_name="query", similarity_fn_name="dot")
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


def old_folder(base: Path, folder: Path, lower_case: bool = False) -> Path:
    """The layout of version 2: flags, short type names, weights in pytorch_model.bin, the transformer in a folder."""
    torch.manual_seed(2)
    dense = nn.Linear(WIDTH * 2, 4)
    for name in ("0_Transformer", "1_Pooling", "2_Dense", "3_Normalize"):
        (folder / name).mkdir(parents=True)
    for file in base.iterdir():
        (folder / "0_Transformer" / file.name).write_bytes(file.read_bytes())
    names = ("0_Transformer", "1_Pooling", "2_Dense", "3_Normalize")
    entries = [
        {"idx": i, "name": str(i), "path": name, "type": f"sentence_transformers.models.{name[2:]}"}
        for i, name in enumerate(names)
    ]
    write(folder / "modules.json", entries)
    write(folder / "0_Transformer/sentence_bert_config.json", {"max_seq_length": 6, "do_lower_case": lower_case})
    flags = {"cls_token": True, "mean_tokens": True, "max_tokens": False, "mean_sqrt_len_tokens": False}
    pooling = {"word_embedding_dimension": WIDTH} | {f"pooling_mode_{key}": value for key, value in flags.items()}
    write(folder / "1_Pooling/config.json", pooling)
    tanh = "torch.nn.modules.activation.Tanh"
    config = {"in_features": WIDTH * 2, "out_features": 4, "bias": True, "activation_function": tanh}
    write(folder / "2_Dense/config.json", config)
    torch.save({f"linear.{k}": v for k, v in dense.state_dict().items()}, folder / "2_Dense/pytorch_model.bin")
    versions = {"sentence_transformers": "2.0.0", "transformers": "4.6.1", "pytorch": "1.8.1"}
    write(folder / "config_sentence_transformers.json", {"__version__": versions})
    return folder


def write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


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
    fresh = SentenceModules.fresh(
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
    assert files["1_Pooling/config.json"] == (folder / "1_Pooling/config.json").read_bytes()
    before = json.loads((folder / "config_sentence_transformers.json").read_bytes())
    after = json.loads(files["config_sentence_transformers.json"])
    prompts = before["prompts"] | {"q": "find : "}
    assert after == before | {"prompts": prompts, "default_prompt_name": "q", "similarity_fn_name": "dot"}
    copy = write_back(folder, tmp_path / "ours", modules)
    assert SentenceTransformer(str(copy), device="cpu").max_seq_length == 4
    same(theirs(copy, TEXTS), ours(copy, modules, TEXTS, "find : "))


def test_gradients_reach_the_dense_layer_and_the_encoder() -> None:
    modules = SentenceModules.fresh(4, dense=Dense(4, 3))
    hidden = torch.randn(5, 4, requires_grad=True)
    modules(hidden, Batch.from_ids([[1, 2], [3, 4, 5]]))[:, 0].sum().backward()
    assert hidden.grad is not None
    assert bool((hidden.grad != 0).any(dim=1).all())
    assert all(weight.grad is not None for weight in modules.parameters())


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
    with pytest.raises(CheckpointError, match=r'modules.json\[1\]: path="1_Pooling" is a link that leaves'):
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
    return lambda folder: (folder / file).write_bytes(content) and None


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
BAD = {
    "truncated": (put("modules.json", b'[{"idx": 0'), "modules.json is not JSON"),
    "not utf-8": (put(MODEL, b'{"prompts": "\xff"}'), f"{MODEL} is not JSON in UTF-8"),
    "deep": (put(MODEL, b"[" * 100_000), f"{MODEL} is not JSON"),
    "not a list": (put("modules.json", b"{}"), "must hold a list"),
    "empty list": (put("modules.json", b"[]"), "at least one module"),
    "entry no object": (put("modules.json", b"[1]"), r"modules.json\[0\] must be an object, not int"),
    "not an object": (put(POOL, b"[]"), f"{POOL} must hold a JSON object, not list"),
    "entry key": (entry(1, colour="red"), r'modules.json\[1\]: unknown key colour="red"; known keys are idx'),
    "entry kwargs": (entry(1, kwargs=["task"]), r'kwargs=\["task"\] is not supported; it must be \[\]'),
    "idx": (entry(2, idx=1), r"modules.json\[2\]: idx=1 must be 2"),
    "idx bool": (entry(1, idx=True), r"idx=true must be int"),
    "same name": (entry(2, name="1"), r'modules.json\[2\]: name="1" is the name of another'),
    "path type": (entry(1, path=None), r"modules.json\[1\]: path=null must be str"),
    "up": (entry(1, path="../../x"), r'path="../../x" must be relative'),
    "up inside": (entry(1, path="a/../1_Pooling"), "without '..'"),
    "absolute": (entry(0, path="/etc"), 'path="/etc" must be relative'),
    "windows": (entry(1, path="C:\\x"), "must be relative"),
    "backslash": (entry(1, path="..\\x"), "must be relative"),
    "nul": (entry(1, path="a\0b"), "must be relative"),
    "same folder": (entry(3, path="./2_Dense"), r'modules.json\[3\]: path="./2_Dense" is the folder of another'),
    "custom type": (entry(1, type="custom.Pooling"), r'modules.json\[1\]: type="custom.Pooling" is not supported'),
    "no transformer": (entry(0, type="sentence_transformers.models.StaticEmbedding"), "the first module must be"),
    "two": (entry(1, type="sentence_transformers.models.Transformer"), "each other one of Pooling, Dense"),
    "order": (entry(1, type="sentence_transformers.models.Normalize", path="x"), "one Pooling first"),
    "model key": (edit(MODEL, temperature=2), f"{MODEL}: unknown key temperature=2; known keys are __version__"),
    "sparse": (edit(MODEL, model_type="SparseEncoder"), 'model_type="SparseEncoder" is not supported'),
    "similarity": (
        edit(MODEL, similarity_fn_name="maxsim"),
        'similarity_fn_name="maxsim" must be null or one of cosine',
    ),
    "prompts": (edit(MODEL, prompts=["a"]), r'prompts=\["a"\] must be dict'),
    "prompt": (edit(MODEL, prompts={"query": None}), r'prompts\["query"\]=null must be a string'),
    "default": (
        edit(MODEL, prompts={"a": ""}, default_prompt_name="b"),
        'default_prompt_name="b" must be null or one of a',
    ),
    "truncate": (edit(MODEL, truncate_dim=0), "truncate_dim=0 must be at least 1"),
    "text key": (edit(TEXT, stride=3), f"{TEXT}: unknown key stride=3"),
    "length": (edit(TEXT, max_seq_length="6"), 'max_seq_length="6" must be int or null'),
    "length 0": (edit(TEXT, max_seq_length=0), "max_seq_length=0 must be at least 1"),
    "lower": (edit(TEXT, do_lower_case=1), "do_lower_case=1 must be bool"),
    "task": (
        edit(TEXT, transformer_task="fill-mask"),
        'transformer_task="fill-mask" is not supported; it must be "feature',
    ),
    "output": (edit(TEXT, module_output_name="sentence_embedding"), 'it must be "token_embeddings"'),
    "modality": (edit(TEXT, modality_config={"image": {}}), "modality_config=.* is not supported"),
    "args": (edit(TEXT, model_args={"rope": 1}), f"{TEXT}: model_args: unknown key rope=1"),
    "tokenizer args": (edit(TEXT, tokenizer_args={"dtype": 1}), f"{TEXT}: tokenizer_args: unknown key dtype=1"),
    "limit": (unlimited, "0_Transformer/tokenizer_config.json is not JSON"),
    "pool missing": (remove(POOL), f"{POOL} is missing; modules.json lists a Pooling there"),
    "pool key": (edit(POOL, pooling_mode_median=True), f"{POOL}: unknown key pooling_mode_median=true"),
    "pool width": (edit(POOL, word_embedding_dimension=8), f"{POOL}: word_embedding_dimension=8 must be 16"),
    "pool widths": (edit(POOL, embedding_dimension=8), f"{POOL}: embedding_dimension=8 must be 16"),
    "pool no width": (put(POOL, b"{}"), r"embedding_dimension=null \(the key is missing\) must be int"),
    "pool flag": (edit(POOL, pooling_mode_cls_token="true"), 'pooling_mode_cls_token="true" must be bool'),
    "pool none": (
        edit(POOL, pooling_mode_cls_token=False, pooling_mode_mean_tokens=False),
        r"pooling_mode=\[\] must be one or more of cls",
    ),
    "pool two minds": (edit(POOL, pooling_mode="max"), r'pooling_mode=\["max"\] must agree with the flags'),
    "pool unsaid": (
        put(POOL, b'{"embedding_dimension": 16, "pooling_mode_cls_token": true}'),
        "pooling_mode_mean_tokens is missing",
    ),
    "pool mode": (put(POOL, b'{"embedding_dimension": 16, "pooling_mode": ["mean", 1]}'), "must be one or more of cls"),
    "dense key": (edit(DENSE, dropout=0.1), f"{DENSE}: unknown key dropout=0.1"),
    "dense in": (edit(DENSE, in_features=16), f"{DENSE}: in_features=16 must be 32"),
    "dense out": (edit(DENSE, out_features=0), f"{DENSE}: out_features=0 must be at least 1"),
    "dense huge": (
        edit(DENSE, out_features=10**12),
        r"linear.weight has shape \(4, 32\); 2_Dense/config.json asks for",
    ),
    "dense input": (edit(DENSE, module_input_name="token_embeddings"), 'it must be "sentence_embedding"'),
    "activation": (edit(DENSE, activation_function="os.system"), 'activation_function="os.system" is not supported'),
    "false tanh": (edit(DENSE, activation_function="evil.Tanh"), 'activation_function="evil.Tanh" is not supported'),
    "activation type": (edit(DENSE, activation_function=None), "activation_function=null is not supported"),
    "bias": (edit(DENSE, bias=False), "linear.bias left over; a Dense has linear.weight"),
    "no weights": (
        remove("2_Dense/pytorch_model.bin"),
        "neither 2_Dense/model.safetensors nor 2_Dense/pytorch_model.bin",
    ),
    "missing": (
        weights(linear__weight=(4, 32)),
        "2_Dense/model.safetensors: linear.bias missing; it holds linear.weight",
    ),
    "left over": (weights(linear__weight=(4, 32), linear__bias=(4,), x=(1,)), "model.safetensors: x left over"),
    "shape": (weights(linear__weight=(32, 4), linear__bias=(4,)), r"linear.weight has shape \(32, 4\).* \(4, 32\)"),
    "cut weights": (put("2_Dense/model.safetensors", b"\x10\0\0\0"), "model.safetensors cannot be read as weights"),
    "cut pickle": (put("2_Dense/pytorch_model.bin", b"PK"), "pytorch_model.bin cannot be read as weights"),
    "unsafe pickle": (pickled(nn.Linear(2, 2)), "pytorch_model.bin cannot be read as weights"),
    "pickled list": (pickled([torch.zeros(1)]), "must hold a dictionary of tensors"),
    "whole numbers": (
        pickled({"linear.weight": torch.zeros(4, 32, dtype=torch.int64), "linear.bias": torch.zeros(4)}),
        "linear.weight holds torch.int64",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_folders_say_what_is_wrong(name: str, base: Path, tmp_path: Path) -> None:
    change, message = BAD[name]
    folder = old_folder(base, tmp_path / "model")
    load(folder)
    change(folder)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "kind", ["Router", "WordEmbeddings", "CLIPModel", "CNN", "LSTM", "BoW", "WeightedLayerPooling", "WordWeights"]
)
def test_unknown_modules_are_refused(kind: str, base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    entry(2, type=f"sentence_transformers.models.{kind}")(folder)
    with pytest.raises(CheckpointError, match=f"sentence_transformers.models.{kind}.* is not supported here"):
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


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"pooling": "median"}, "must be one or more of cls"),
        ({"dense": Dense(8, 4)}, "dense takes vectors of 8 but pooling gives 16"),
        ({"default_prompt": "q"}, "default_prompt='q' must be None or one of"),
        ({"similarity": "maxsim"}, "similarity='maxsim' must be None or one of cosine"),
        ({"max_seq_length": 0}, "max_seq_length=0 must be None or at least 1"),
    ],
)
def test_fresh_refuses(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SentenceModules.fresh(WIDTH, **kwargs)


def test_dense_refuses_other_activations() -> None:
    with pytest.raises(ConfigError, match="activation='Softmax' must be one of"):
        Dense(4, 4, activation="Softmax")


def test_half_precision_weights_are_read_as_float32(base: Path, tmp_path: Path) -> None:
    folder = old_folder(base, tmp_path / "model")
    half = {"linear.weight": torch.ones(4, 32).bfloat16(), "linear.bias": torch.zeros(4).bfloat16()}
    safetensors.torch.save_file(half, folder / "2_Dense/model.safetensors")
    with torch.no_grad():
        vectors = load(folder)(torch.ones(2, WIDTH), Batch.from_ids([[1, 2]]))
    assert vectors.dtype == torch.float32
    assert np.isclose(float(vectors.norm()), 1, atol=1e-6)
