"""The commands that write, with tiny models and inputs, and how their results are read."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.checkpoints.tiny_sentence import save_bert
from tests.cli.conftest import HEADS, save_models, save_small
from tests.cli.toys import write, write_toys
from tests.training.pretrain.corpus_texts import texts as random_documents

Tree = dict[str, Any]
WORDS = "a the cat dog sat ran on mat find".split()
ROWS = 150
QUICK = ("--epochs", "2", "--batch-size", "8", "--lr", "5e-5", "--resamples", "20", "--save-steps", "2")
RECIPE = """
[data]
corpus = "corpus"
tokenizer = "tokenizer"
[model]
model_type = "bert"
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
intermediate_size = 24
max_position_embeddings = 64
[training]
steps = 12
batch_tokens = 256
max_length = 64
lr = 3e-3
evals = 2
save_steps = 3
seed = 1
[[objective]]
kind = "mlm"
rate = 0.3
"""
# What differs between two uninterrupted runs: times, and versions of the environment.
TIMES = ("seconds", "tokens_per_second", "date", "created", "started", "finished", "duration", "time", "timings")


@dataclass(frozen=True)
class Job:
    """A command. `{in}` in its arguments is the folder of inputs; it runs in an empty folder."""

    name: str
    argv: tuple[str, ...]
    output: str
    weight: float = 1.0  # how often it is drawn
    again: tuple[str, ...] = ()  # arguments of a run after an interrupted one
    replace: tuple[str, ...] | None = None  # arguments that replace an earlier output; None: not possible
    read: Callable[[Path], Tree] = field(default_factory=lambda: read_tree)
    prepare: Callable[[Path, Path], None] | None = None  # (inputs, folder): what is there before the first run
    before: Callable[[], None] | None = None  # in the process of the command
    # (inputs, folder, complete tree): what is wrong with an output that may be incomplete, but must be consistent
    check_partial: Callable[[Path, Path, Tree], str | None] | None = None

    def command(self, inputs: Path, extra: tuple[str, ...] = ()) -> list[str]:
        return [argument.replace("{in}", str(inputs)) for argument in (*self.argv, *extra)]


def read_tree(folder: Path) -> Tree:
    """All files below a folder, without times."""
    return {
        path.relative_to(folder).as_posix(): _content(path) if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def _content(path: Path) -> Any:
    data = path.read_bytes()
    if path.suffix == ".parquet":
        from pyarrow import ArrowInvalid, parquet

        try:
            return parquet.read_table(path).to_pylist()
        except ArrowInvalid:  # a draft, which only a success removes
            return data
    if path.name in ("report.json", "run.json", "checksums.json", "manifest.json"):
        return _without_times(json.loads(data))
    if path.name in ("report.md", "report.html", "README.md", "curve.html", "curve.csv"):
        return len(data) > 0
    return data


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        unstable = (*TIMES, "README.md", "report.html", "report.md", "report.json")
        return {key: _without_times(item) for key, item in value.items() if key not in unstable}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


def read_index(folder: Path) -> Tree:
    """The documents, passages and vectors of an index, wherever they are stored, and files beside it."""
    from bertie.search.index import Index

    tree: Tree = {path.name: None for path in folder.iterdir()}
    if not (folder / "ix").exists():
        return tree
    with Index.open(folder / "ix") as index:
        tree["documents"] = _documents(index)
        tree["count"] = len(index)
        for mode in ("dense", "lexical", "hybrid"):
            for query in ("find the cat", "dog ran"):
                hits = index.search(query, 50, mode=mode)
                tree[f"{mode} {query}"] = sorted((hit.document, hit.text, round(hit.score, 5)) for hit in hits)
    return tree


def _documents(index: Any) -> list[tuple[str, str]]:
    """Ids and versions, without the times of files."""
    return sorted((id, version.partition("@")[0]) for id, _, version in index.store.documents())


def check_index(inputs: Path, folder: Path, complete: Tree) -> str | None:
    """An interrupted index opens, and has only documents as they are or were."""
    from bertie.search.index import Index

    if not (folder / "ix" / "index.sqlite").exists():  # not an index yet
        return None
    with Index.open(inputs / "index-before") as before:
        known = {*_documents(before), *complete["documents"]}
    with Index.open(folder / "ix") as index:
        if others := set(_documents(index)) - known:
            return f"the index has unknown documents {sorted(others)[:3]}"
        listed = {id for id, _ in _documents(index)}
        found = {hit.document for hit in index.search("cat", 500, mode="dense")} if listed else set()
    if found != listed:
        return f"the index finds {sorted(found - listed)[:3]} more than it lists, and {sorted(listed - found)[:3]} less"
    return None


def check_corpus(inputs: Path, folder: Path, complete: Tree) -> str | None:
    """A corpus has its manifest when it is complete; without it, nothing reads it."""
    if not (folder / "out" / "corpus.json").exists():
        return None
    tree = read_tree(folder)
    wrong = [name for name in complete if tree.get(name) != complete[name]]
    return f"the corpus has a manifest, but {wrong} is wrong" if wrong else None


def check_shards(inputs: Path, folder: Path, complete: Tree) -> str | None:
    """Each shard is complete; the manifest says whether all of them are."""
    manifest = folder / "out" / "manifest.json"
    shards = {name: value for name, value in read_tree(folder).items() if name.endswith(".parquet")}
    wrong = [name for name, value in shards.items() if value != complete[name]]
    if wrong:
        return f"{wrong} differ"
    done = manifest.exists() and json.loads(manifest.read_text())["shards"] is not None
    if done and len(shards) < sum(name.endswith(".parquet") for name in complete):
        return "the manifest says that all shards are there"
    return None


def without_ray() -> None:
    """Run the job of a cluster in this process."""
    import ray

    from bertie.cluster import connection, ray_job
    from tests.cluster.jobs import Nodes, run_here

    connection.connect = lambda address: nullcontext(Nodes({"CPU": 1.0}))  # type: ignore[return-value]
    ray_job.run_job = run_here
    ray.get = lambda value: value


def check_report(inputs: Path, folder: Path, complete: Tree) -> str | None:
    """The files of a report are replaced one by one, each atomically."""
    for name in ("report.md", "report.html", "report.json"):
        path = folder / "out" / name
        if path.exists() and name.endswith(".json"):
            json.loads(path.read_text())
        elif path.exists() and not path.read_text().rstrip().endswith(("</html>", "|", ".", ")", "```")):
            return f"{name} is incomplete: it ends in {path.read_text()[-40:]!r}"
    return None


# --- inputs ---


def make_inputs(folder: Path) -> None:
    """Write the inputs of all jobs, their models, and the expected responses of the server."""
    from tests.faults.server import save_cases

    save_models(folder / "models")
    labels = {0: "cat", 1: "dog"}
    save_bert(folder / "models" / "animals", labels=2, id2label=labels, label2id={"cat": 0, "dog": 1})
    save_small(folder / "models" / "built-in" / "small", folder / "models" / "embed", HEADS)
    save_cases(folder / "models" / "built-in" / "small", folder / "cases")
    draw = random.Random(0)

    def text() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 12)))

    for version in ("", "old-"):
        rows = [{"id": f"r{i}", "text": text()} for i in range(ROWS)]
        write(folder / f"{version}texts.jsonl", rows)
        (folder / f"{version}texts.txt").write_text("".join(f"{row['text']}\n" for row in rows))
        write(folder / f"{version}masked.jsonl", [{"text": f"{text()} [MASK] {text()}"} for _ in range(ROWS)])
        write(folder / f"{version}pairs.jsonl", [{"text_a": text(), "text_b": text()} for _ in range(ROWS)])
        write(folder / f"{version}queries.jsonl", [{"query": text(), "passage": text()} for _ in range(ROWS)])
        write(folder / f"{version}questions.jsonl", [{"question": text(), "context": text()} for _ in range(ROWS)])
    for task in ("classify", "tag"):
        (folder / task).mkdir()
        write_toys(folder / task, task)
    _write_documents(folder, draw)
    _write_corpus(folder)
    positives = [{"anchor": f"{word} {i % 7}", "positive": f"the {word} {text()}"} for i in range(6) for word in WORDS]
    write(folder / "positives.jsonl", positives)


def _write_documents(folder: Path, draw: random.Random) -> None:
    """Documents, and the index of an earlier state of them."""
    from bertie.cli import main

    (folder / "docs").mkdir()
    documents = ["\n\n".join(" ".join(draw.choices(WORDS, k=12)) for _ in range(draw.randint(1, 4))) for _ in range(40)]
    for i, text in enumerate(documents):
        if i % 4 == 1:  # changed later
            (folder / "docs" / f"{i:02}.txt").write_text(text + "\n\nthe old cat")
        elif i % 4 == 2:  # deleted later
            (folder / "docs" / f"{i:02}-deleted.txt").write_text(text)
        elif i % 4 == 3:
            (folder / "docs" / f"{i:02}.txt").write_text(text)
    index = str(folder / "index-before")
    argv = ["index", str(folder / "docs"), "-o", index, "-m", str(folder / "models/embed"), "--chunk-size", "20"]
    assert main(argv) == 0
    for path in folder.glob("docs/*-deleted.txt"):
        path.unlink()
    for i, text in enumerate(documents):
        if i % 4 != 3:
            (folder / "docs" / f"{i:02}.txt").write_text(text)


def _write_corpus(folder: Path) -> None:
    from bertie.text.tokenizer_training import train
    from bertie.training.pretrain.corpus import CorpusSettings, build_corpus

    (folder / "corpus.txt").write_text("\n\n".join(random_documents(60, seed=2)) + "\n")
    tokenizer = train((folder / "corpus.txt").read_text().split("\n"), vocab_size=200, max_length=64)
    tokenizer.save(folder / "tokenizer")
    build_corpus([str(folder / "corpus.txt")], tokenizer, folder / "corpus", CorpusSettings(held_out=0.2))
    (folder / "recipe.toml").write_text(RECIPE)


# --- jobs ---


def _stream(verb: str, source: str, suffix: str, *flags: str) -> Job:
    output = f"out{suffix}"
    model = "embed" if verb in ("similarity", "tokenize", "outliers", "pairs") else verb
    argv = (verb, f"{{in}}/{source}", "-m", f"{{in}}/models/{model}", *flags, "-o", output)
    return Job(f"{verb}{suffix}", argv, output, again=("--resume",), replace=("--overwrite",))


def _copy_index(inputs: Path, folder: Path) -> None:
    """The index of the documents as they were."""
    shutil.copytree(inputs / "index-before", folder / "ix")


def _train(task: str) -> Job:
    files = ("train.jsonl", "--dev", "dev.jsonl", "--test", "test.jsonl")
    paths = tuple(name if name.startswith("--") else f"{{in}}/{task}/{name}" for name in files)
    argv = ("train", task, *paths, "-m", "{in}/models/embed", *QUICK, "-o", "out")
    return Job(f"train {task}", argv, "out", weight=0.7, again=("--resume",), replace=("--overwrite",))


def all_jobs() -> list[Job]:
    """Every verb that writes."""
    embed = [_stream("embed", "texts.jsonl", suffix) for suffix in (".npy", ".jsonl", ".parquet", ".csv", ".jsonl.gz")]
    streams = [
        _stream("embed", "texts.txt", ".tsv.zst"),
        _stream("classify", "texts.jsonl", ".csv"),
        _stream("classify", "texts.jsonl", ".parquet"),
        _stream("tag", "texts.jsonl", ".jsonl"),
        _stream("fill", "masked.jsonl", ".jsonl", "--top-k", "2"),
        _stream("answer", "questions.jsonl", ".jsonl"),
        _stream("rerank", "queries.jsonl", ".tsv"),
        _stream("similarity", "pairs.jsonl", ".jsonl"),
        _stream("tokenize", "texts.jsonl", ".jsonl"),
        _stream("detect-replaced", "texts.jsonl", ".jsonl"),
        _stream("outliers", "texts.jsonl", ".csv", "--neighbours", "3"),
        _stream("pairs", "texts.jsonl", ".jsonl", "--threshold", "0.5"),
    ]
    index = ("index", "{in}/docs", "-o", "ix", "-m", "{in}/models/embed")
    corpus = ("--tokenizer", "{in}/tokenizer", "--shard-tokens", "400", "--held-out", "0.2")
    tokenizer = ("--vocab-size", "150", "--max-length", "64")
    mining = ("--corpus", "{in}/texts.jsonl", "--negatives", "2")
    overwrite = ("--overwrite",)
    cluster = Job(
        "embed --ray",
        ("embed", "{in}/texts.jsonl", "{in}/old-texts.jsonl", "-m", "{in}/models/embed", "--ray", "local", "-o", "out"),
        "out",
        weight=0.7,
        again=("--resume",),
        check_partial=check_shards,
        before=without_ray,
    )
    return [
        *embed,
        *streams,
        *([cluster] if find_spec("ray") is not None else []),
        Job(
            "index create",
            (*index, "--chunk-size", "20"),
            "ix",
            weight=2.5,
            again=("--refresh",),
            read=read_index,
            check_partial=check_index,
        ),
        Job(
            "index refresh",
            (*index, "--refresh"),
            "ix",
            weight=2.5,
            read=read_index,
            prepare=_copy_index,
            check_partial=check_index,
        ),
        _train("classify"),
        _train("tag"),
        Job(
            "pretrain",
            ("pretrain", "{in}/recipe.toml", "--data", "{in}", "-o", "out"),
            "out",
            weight=0.7,
            again=("--resume",),
            replace=overwrite,
        ),
        Job(
            "corpus",
            ("corpus", "{in}/corpus.txt", *corpus, "-o", "out"),
            "out",
            again=("--resume",),
            check_partial=check_corpus,
        ),
        Job(
            "tokenizer train",
            ("tokenizer", "train", "{in}/corpus.txt", *tokenizer, "-o", "out"),
            "out",
            again=overwrite,
            replace=overwrite,
        ),
        Job(
            "tokenizer extend",
            ("tokenizer", "extend", "{in}/models/embed", "{in}/corpus.txt", "--new-tokens", "20", "-o", "out"),
            "out",
            again=overwrite,
            replace=overwrite,
        ),
        Job(
            "quantize",
            ("quantize", "{in}/models/classify", "--texts", "{in}/texts.jsonl", "-o", "out"),
            "out",
            again=overwrite,
            replace=overwrite,
        ),
        Job(
            "mine",
            ("mine", "{in}/positives.jsonl", *mining, "-m", "{in}/models/embed", "-o", "out.jsonl"),
            "out.jsonl",
            again=overwrite,
            replace=overwrite,
        ),
        Job(
            "weight-tokens",
            ("weight-tokens", "{in}/texts.jsonl", "-m", "{in}/models/embed", "-o", "out"),
            "out",
            again=overwrite,
            replace=overwrite,
        ),
        Job(
            "eval",
            ("eval", "{in}/classify/test.jsonl", "-m", "{in}/models/animals", "--resamples", "20", "-o", "out"),
            "out",
            again=overwrite,
            replace=overwrite,
            check_partial=check_report,
        ),
    ]
