"""Prepare the data of bertie-small besides its corpora: python prepare.py DATA OUT [TEXT…]

DATA holds one folder per dataset (listed in README.md next to this file). TEXT are files or folders
of pretraining text, one paragraph per line and a blank line between documents (default:
DATA/pretrain). Only datasets whose licence allows distributing a trained model are used for
training, and only their training splits. Texts that also occur in a dev or test split of any dataset
in DATA are excluded from training, and the titles of exclude.tsv from the pretraining text. The same
files give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bertie.data.readers import open_table
from bertie.training.pretrain.cleaning import title_key
from bertie.training.pretrain.corpus.documents import Documents, list_sources, read_titles

Row = dict[str, Any]
SEED = 0

# The grouping of the GoEmotions paper (Demszky et al. 2020, figure 2); ambiguous emotions carry no label.
SENTIMENT = {
    "positive": "admiration amusement approval caring desire excitement gratitude joy love optimism pride relief",
    "negative": "anger annoyance disappointment disapproval disgust embarrassment fear grief nervousness remorse "
    "sadness",
    "neutral": "neutral",
    "ambiguous": "confusion curiosity realization surprise",
}
GROUP = {emotion: group for group, emotions in SENTIMENT.items() for emotion in emotions.split()}

WNUT = {"person": "PER", "corporation": "ORG", "group": "ORG", "location": "LOC"}

# Datasets never trained on, whatever the split: they are for evaluation, or their licence forbids it.
EVALUATION_ONLY = (
    "ag_news cacm conll2003 cosqa cr cranfield emotion imdb mlqa mr mrpc npl_vaswani pawsx qnli quora_pairs rte "
    "squad_v2_dev sst2 sst5 sts12_16 stsb trecqa wikiqa xnli xquad"
).split()

EXCLUDE = Path(__file__).with_name("exclude.tsv")  # articles of WikiText-103's held-out splits, and similar ones
LONG_QUESTIONS, LONG_CHARACTERS = 8_000, (2_000, 7_500)  # questions with several paragraphs; length of these
SQUAD_QUESTIONS, DEV_QUESTIONS = 12_000, 1_500  # for the reranker, with paragraphs
SENTENCE_QUESTIONS = 24_000  # for the reranker, with sentences
BARE = 0.5  # fraction of these without a question mark, as users type them
WIKI_SENTENCES, WIKI_PARAGRAPHS = 400_000, 100_000  # for distillation of embeddings
SENTENCES = 850_437  # texts for distillation of embeddings in total, as for the shipped model
EVERY = 5  # every fifth document trains the tokenizer

# Rows that stage 4 trains and evaluates on, sampled in this order; other files are used whole.
CUT = {"rerank.train": 110_000, "ner.dev": 1_200, "sentiment.dev": 1_200, "nli.dev": 1_200}


def main() -> None:
    """Write everything."""
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    data, out, text = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    out.mkdir(parents=True, exist_ok=True)
    seen, text = evaluation_keys(data), text or [str(data / "pretrain")]
    datasets = {
        name: list(rows)
        for name, rows in (
            *sentiment(data, seen),
            *entities(data),
            *answers(data),
            *ranking(data, seen),
            *inference(data),
        )
    }
    for name, rows in (datasets | cut(datasets)).items():
        write(out / f"{name}.jsonl.gz", (json.dumps(row, ensure_ascii=False) for row in rows))
    short = sentences(data, text, seen)[:SENTENCES]
    write(out / "sentences.jsonl.gz", (json.dumps({"text": text}, ensure_ascii=False) for text in short))
    write(out / "sample.txt.gz", (f"{document}\n" for document in sample_documents(text)))


# ── reading and writing ──


def read(file: Path) -> Iterator[Row]:
    """Read the rows of a file."""
    table = open_table(str(file))
    return table.rows(table.columns)


def write(file: Path, lines: Iterable[str]) -> None:
    """Write lines to a gzip file without a timestamp, so that the same lines give the same bytes."""
    count = 0
    with gzip.GzipFile(file, "wb", mtime=0) as packed, io.TextIOWrapper(packed, "utf-8", newline="\n") as text:
        for line in lines:
            text.write(line + "\n")
            count += 1
    print(f"{file.name}: {count:,}")


def key(text: str) -> str:
    """A key that ignores case, spacing and punctuation.

    >>> key("Don't  PANIC !") == key("don't panic!")
    True
    """
    return re.sub(r"\W+", "", text.casefold())


def texts_of(row: Row) -> Iterator[str]:
    """All texts of a row."""
    if "tokens" in row:
        yield " ".join(row["tokens"])
    for name in ("text", "text_a", "text_b", "question", "query", "passage", "context"):
        if isinstance(row.get(name), str):
            yield row[name]


def evaluation_keys(data: Path) -> set[str]:
    """Keys of all evaluation texts: dev and test splits, and the datasets of `EVALUATION_ONLY`."""
    return {
        key(text)
        for file in sorted([*data.glob("*/*.jsonl.gz"), *data.glob("*/*.jsonl.xz")])
        if not file.name.startswith("train") or file.parent.name in EVALUATION_ONLY
        for row in read(file)
        for text in texts_of(row)
    }


def cut(datasets: Mapping[str, Sequence[Row]]) -> dict[str, list[Row]]:
    """A sample of the rows of the files in `CUT`, in their original order."""
    draw = random.Random(SEED)
    samples = {}
    for name, size in CUT.items():
        rows = datasets[name]
        samples[name] = [rows[i] for i in sorted(draw.sample(range(len(rows)), min(size, len(rows))))]
    return samples


def unseen(rows: Iterable[Row], seen: set[str], *columns: str) -> Iterator[Row]:
    """Rows without duplicates, and without those seen before."""
    own: set[str] = set()
    for row in rows:
        text = key(" ".join(" ".join(row[column]) for column in columns))  # of words, or of a text's characters
        if text and text not in seen and text not in own:
            own.add(text)
            yield row


# ── data of the heads ──


def sentiment(data: Path, seen: set[str]) -> Iterator[tuple[str, Iterable[Row]]]:
    """GoEmotions as negative, neutral and positive; ambiguous rows are left out."""
    for split in ("train", "dev", "test"):
        rows: list[Row] = []
        for row in read(data / f"go_emotions/{split}.jsonl.gz"):
            groups = {GROUP[label] for label in row["labels"]} - {"ambiguous"}
            if len(groups) == 1:
                rows.append({"text": row["text"], "label": groups.pop()})
        yield f"sentiment.{split}", unseen(rows, seen, "text") if split == "train" else rows


def entities(data: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """WikiANN and WNUT-17 with the three entity types that they share."""

    def rows(split: str) -> Iterator[Row]:
        for row in read(data / f"wikiann/{split}.en.jsonl.gz"):
            yield {"tokens": row["tokens"], "tags": row["tags"], "source": "wikiann"}
        for row in read(data / f"wnut17/{split}.jsonl.gz"):
            yield {"tokens": row["tokens"], "tags": [_wnut(tag) for tag in row["tags"]], "source": "wnut17"}

    dev, test = list(rows("dev")), list(rows("test"))
    yield "ner.train", unseen(rows("train"), {key(" ".join(row["tokens"])) for row in dev + test}, "tokens")
    yield "ner.dev", dev
    yield "ner.test", test


def _wnut(tag: str) -> str:
    place, _, kind = tag.partition("-")
    return f"{place}-{WNUT[kind]}" if kind in WNUT else "O"


def answers(data: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """SQuAD 1.1 and the English part of TyDi QA; some of SQuAD again, with longer contexts."""
    squad, tydi, dev = _question_sets(data)
    yield "qa.train", [*squad, *tydi, *_with_long_contexts(squad, LONG_QUESTIONS)]
    yield "qa.dev", dev


def _with_long_contexts(rows: list[Row], count: int) -> Iterator[Row]:
    """Questions with several consecutive paragraphs of their article, up to a number of characters."""
    draw = random.Random(SEED)
    articles = _articles(rows)
    for row in _sample_questions(rows, count, draw):
        paragraphs, right = articles[row["title"]], articles[row["title"]].index(row["context"])
        first, last, room = right, right, draw.randint(*LONG_CHARACTERS) - len(row["context"])
        while room > 0 and (first > 0 or last < len(paragraphs) - 1):
            if last == len(paragraphs) - 1 or (first > 0 and draw.random() < 0.5):
                first -= 1
                room -= len(paragraphs[first])
            else:
                last += 1
                room -= len(paragraphs[last])
        before = "".join(f"{paragraph}\n\n" for paragraph in paragraphs[first:right])
        context = before + "\n\n".join(paragraphs[right : last + 1])
        moved = [answer | {"answer_start": answer["answer_start"] + len(before)} for answer in row["answers"]]
        yield row | {"id": f"{row['id']}-long", "context": context, "answers": moved}


def _question_sets(data: Path) -> tuple[list[Row], list[Row], list[Row]]:
    """SQuAD train, TyDi QA and SQuAD dev, whose paragraphs are left out of the first two."""
    dev = list(_questions(data / "squad_v1/dev.jsonl.gz"))
    contexts = {key(row["context"]) for row in dev}
    squad, tydi = (
        [row for row in _questions(data / file) if key(row["context"]) not in contexts]
        for file in ("squad_v1/train.jsonl.gz", "tydiqa_goldp/train.en.jsonl.gz")
    )
    return squad, tydi, dev


def _questions(file: Path) -> Iterator[Row]:
    for row in read(file):
        for answer in row["answers"]:
            start, text = answer["answer_start"], answer["text"]
            if row["context"][start : start + len(text)] != text:
                raise SystemExit(f"{file}: the answer to {row['question']!r} is not at its answer_start")
        yield {name: row[name] for name in ("id", "title", "context", "question", "answers")}


def ranking(data: Path, seen: set[str]) -> Iterator[tuple[str, Iterable[Row]]]:
    """Questions with paragraphs and with sentences: one relevant, several irrelevant."""
    squad, tydi, dev = _question_sets(data)
    yield (
        "rerank.train",
        [
            *_ranked(squad, SQUAD_QUESTIONS),
            *_ranked(tydi, len(tydi), same=0, other=3),
            *_ranked_sentences(squad, SENTENCE_QUESTIONS, seen),
            *_ranked_sentences(tydi, len(tydi), seen, same=0),
        ],
    )
    yield "rerank.dev", list(_ranked(dev, DEV_QUESTIONS))


def _ranked(rows: list[Row], count: int, same: int = 3, other: int = 1) -> Iterator[Row]:
    """Questions with their own paragraph, and negatives from the same article and from any."""
    draw = random.Random(SEED)
    articles = _articles(rows)
    everything = [context for contexts in articles.values() for context in contexts]
    for row in _sample_questions(rows, count, draw):
        yield {"query": row["question"], "passage": row["context"], "label": 1}
        wrong = _negatives(row, ((articles[row["title"]], same), (everything, other)), draw)
        yield from ({"query": row["question"], "passage": passage, "label": 0} for passage in wrong)


def _ranked_sentences(
    rows: list[Row], count: int, seen: set[str], beside: int = 3, same: int = 1, other: int = 1
) -> Iterator[Row]:
    """Questions with the sentence of the answer, and negatives next to it, from its article and from any.

    Evaluation texts are excluded, and so are sentences of under 4 or over 80 words.
    """
    draw = random.Random(SEED)
    parts = {
        context: [text for text in split(context) if 4 <= len(text.split()) <= 80 and key(text) not in seen]
        for contexts in _articles(rows).values()
        for context in contexts
    }
    articles = {
        title: [text for context in contexts for text in parts[context]] for title, contexts in _articles(rows).items()
    }
    everything = [text for sentences in articles.values() for text in sentences]
    for row in _sample_questions(rows, count, draw):
        right = _sentence_at(row["context"], row["answers"][0]["answer_start"])
        if right not in parts[row["context"]]:
            continue
        query = row["question"].rstrip("? ") if draw.random() < BARE else row["question"]
        yield {"query": query, "passage": right, "label": 1}
        pools = ((parts[row["context"]], beside), (articles[row["title"]], same), (everything, other))
        yield from ({"query": query, "passage": passage, "label": 0} for passage in _negatives(row, pools, draw))


def _articles(rows: Iterable[Row]) -> dict[str, list[str]]:
    """The distinct paragraphs of each article."""
    articles: dict[str, list[str]] = {}
    for row in rows:
        articles.setdefault(row["title"], []).append(row["context"])
    return {title: list(dict.fromkeys(contexts)) for title, contexts in articles.items()}


def _sample_questions(rows: Iterable[Row], count: int, draw: random.Random) -> list[Row]:
    """A sample of rows with distinct questions; of duplicates the last counts."""
    by_question = {key(row["question"]): row for row in rows}
    return draw.sample(list(by_question.values()), min(count, len(by_question)))


def _negatives(row: Row, pools: Iterable[tuple[Sequence[str], int]], draw: random.Random) -> list[str]:
    """Sample negatives from each pool. Passages that contain the answer may be relevant, and are left out."""
    texts = [answer["text"].casefold() for answer in row["answers"]]
    negatives: list[str] = []
    for pool, count in pools:
        candidates = dict.fromkeys(draw.sample(pool, min(len(pool), 4 * count)))
        usable = [
            passage
            for passage in candidates
            if passage not in negatives and not any(text in passage.casefold() for text in texts)
        ]
        negatives += usable[:count]
    return negatives


def _sentence_at(text: str, place: int) -> str:
    """The sentence that contains a character position."""
    start = 0
    for sentence in split(text):
        start = text.index(sentence, start) + len(sentence)
        if place < start:
            return sentence
    return ""


def inference(data: Path) -> Iterator[tuple[str, Iterable[Row]]]:
    """SNLI."""
    splits = {name: list(_pairs(data / f"snli/{file}.jsonl.gz")) for name, file in SNLI.items()}
    held = {key(f"{row['text_a']} {row['text_b']}") for name in ("dev", "test") for row in splits[name]}
    yield "nli.train", unseen(splits["train"], held, "text_a", "text_b")
    yield "nli.dev", splits["dev"]
    yield "nli.test", splits["test"]


SNLI = {"train": "train_subset", "dev": "dev", "test": "test"}


def _pairs(file: Path) -> Iterator[Row]:
    return ({name: row[name] for name in ("text_a", "text_b", "label")} for row in read(file))


# ── texts for distillation of embeddings ──


def sentences(data: Path, text: Sequence[str], seen: set[str]) -> list[str]:
    """Distinct short texts without labels, shuffled."""
    draw = random.Random(SEED)
    titles, sentences, paragraphs = sample_texts(text, draw)
    texts = [*titles, *sentences, *paragraphs]
    for row in read(data / "snli/train_subset.jsonl.gz"):
        texts += [row["text_a"], row["text_b"]]
    for name in ("squad_v1/train", "tydiqa_goldp/train.en"):
        texts += [row["question"] for row in read(data / f"{name}.jsonl.gz")]
    for name in ("banking77/train", "clinc150/train", "go_emotions/train"):
        texts += [row["text"] for row in read(data / f"{name}.jsonl.gz")]
    for name in ("wikiann/train.en", "wnut17/train"):
        texts += [detokenize(row["tokens"]) for row in read(data / f"{name}.jsonl.gz")]
    rows = [row["text"] for row in unseen(({"text": " ".join(text.split())} for text in texts), seen, "text")]
    draw.shuffle(rows)
    return rows


def included_documents(text: Sequence[str]) -> Iterator[str]:
    """The documents that are not listed in `EXCLUDE`."""
    left_out = {title_key(title) for title in read_titles(str(EXCLUDE))}
    return (
        document
        for _, document in Documents(list_sources(text))
        if title_key(document.partition("\n")[0]) not in left_out
    )


def sample_documents(text: Sequence[str]) -> Iterator[str]:
    """Every fifth document of each file, to train the tokenizer."""
    return (document for file in list_sources(text) for document in islice(included_documents([file]), 0, None, EVERY))


def sample_texts(text: Sequence[str], draw: random.Random) -> tuple[list[str], list[str], list[str]]:
    """Titles, sentences of 8 to 60 words, and paragraphs of 60 to 200 words of the text."""
    titles: list[str] = []
    sentences, paragraphs = Sample(WIKI_SENTENCES, draw), Sample(WIKI_PARAGRAPHS, draw)
    for document in included_documents(text):
        title, *lines = document.split("\n")
        if len(title.split()) <= 12 and re.search("[a-z]", title):
            titles.append(title)
        for line in lines:
            if "formula_" in line:
                continue
            if 60 <= len(line.split()) <= 200:
                paragraphs.take(line)
            for sentence in split(line):
                if 8 <= len(sentence.split()) <= 60 and sentence[-1] in ".!?\"'”’":
                    sentences.take(sentence)
    return titles, sentences.kept, paragraphs.kept


class Sample:
    """Uniform sample of a stream (reservoir sampling)."""

    def __init__(self, size: int, draw: random.Random) -> None:
        self.size, self.draw, self.count, self.kept = size, draw, 0, list[str]()

    def take(self, text: str) -> None:
        """Add the next element of the stream."""
        self.count += 1
        if len(self.kept) < self.size:
            self.kept.append(text)
        elif (place := int(self.draw.random() * self.count)) < self.size:
            self.kept[place] = text


# A full stop does not end a sentence after a title, an initial or a similar abbreviation.
SHORT = re.compile(
    r"\b(?:[A-Z]|Mr|Mrs|Ms|Dr|St|Jr|Sr|Prof|Gen|Col|Lt|Capt|Sgt|Rev|Gov|Sen|No|vs|ca|cf|Inc|Ltd|Co|Vol)\.$"
)
END = re.compile(r"(?<=[.!?])([\"'”’)]*)\s+(?=[\"'“‘(]?[A-Z0-9])")


def split(line: str) -> Iterator[str]:
    """Split a paragraph into sentences by simple rules.

    >>> list(split('Dr. Smith came. "Why?" he said. J. Doe left.'))
    ['Dr. Smith came.', '"Why?" he said.', 'J. Doe left.']
    """
    start = 0
    for end in END.finditer(line):
        if not end[1] and SHORT.search(line, start, end.start()):
            continue
        yield line[start : end.end(1)]
        start = end.end()
    if start < len(line):
        yield line[start:]


def detokenize(tokens: Sequence[str]) -> str:
    """Detokenize: join tokens approximately as they are written.

    >>> detokenize(["Hello", ",", "(", "he", "said", ")", "it", "'s", "me", "."])
    "Hello, (he said) it's me."
    """
    text = re.sub(r"\s*(?:''|``|''')\s*", " ", " ".join(tokens))
    text = re.sub(r" (?=[,.;:!?)\]%])|(?<=[(\[]) ", "", text)
    return re.sub(r" (n't|'(?:s|re|ve|m|ll|d)\b)", r"\1", text)


if __name__ == "__main__":
    main()
