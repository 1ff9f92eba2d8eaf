"""How each family's old vocabulary files become a tokenizer: facts for `bertie.text.legacy`.

The facts were checked against the tokenizer.json files that the families publish, which is what their models were
fine-tuned with. Where a class of transformers 5 rebuilds the tokenizer by other rules, `faithful` is False.
"""

from __future__ import annotations

from dataclasses import replace

from bertie.text.legacy import LegacyTokenizer

_BERT = LegacyTokenizer(
    kind="wordpiece",
    files=("vocab.txt",),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    lowercase=True,
)

# fairseq closes the first text and opens the second: two separators. It has no segments.
_FAIRSEQ_PAIR = "{cls}:0 $A:0 {sep}:0 {sep}:0 $B:0 {sep}:0"

_ROBERTA = LegacyTokenizer(
    kind="byte_bpe",
    files=("vocab.json", "merges.txt"),
    cls="<s>",
    sep="</s>",
    unk="<unk>",
    pad="<pad>",
    mask="<mask>",
    bos="<s>",
    eos="</s>",
    mask_takes_space=True,
    pair=_FAIRSEQ_PAIR,
    segments=False,
    prefix_space=False,
    trim_offsets=True,
)

# fairseq put its own four tokens before SentencePiece's pieces, whose first three (<unk>, <s>, </s>) it threw away.
_XLM_ROBERTA = LegacyTokenizer(
    kind="sentencepiece",
    files=("sentencepiece.bpe.model",),
    cls="<s>",
    sep="</s>",
    unk="<unk>",
    pad="<pad>",
    mask="<mask>",
    bos="<s>",
    eos="</s>",
    mask_takes_space=True,
    pair=_FAIRSEQ_PAIR,
    segments=False,
    prefix_space=True,
    head=(("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)),
    skip=3,
    tail=("<mask>",),
    split_whitespace=True,
)

# Here fairseq's four were put before a model whose <s> and </s> stayed in use (ids 5 and 6).
_CAMEMBERT = replace(
    _XLM_ROBERTA,
    head=(("<s>NOTUSED", 0.0), ("<pad>", 0.0), ("</s>NOTUSED", 0.0), ("<unk>", 0.0), ("<unk>NOTUSED", -100.0)),
    skip=1,
    extra=("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED"),
)

_ALBERT = LegacyTokenizer(
    kind="sentencepiece",
    files=("spiece.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="<unk>",
    pad="<pad>",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    mask_takes_space=True,
    faithful=False,  # transformers 5 feeds it no segment ids
    lowercase=True,
    strip_accents=True,
    prefix_space=True,
    plain_quotes=True,
    split_digit_comma=True,
    split_whitespace=True,
)

# GPT-2's vocabulary with BERT's special tokens.
_DEBERTA = LegacyTokenizer(
    kind="byte_bpe",
    files=("vocab.json", "merges.txt"),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    mask_takes_space=True,
    faithful=False,  # transformers 5 puts two separators between a pair, and no segment ids
    prefix_space=False,
)

_DEBERTA_V2 = LegacyTokenizer(
    kind="sentencepiece",
    files=("spm.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="[UNK]",
    pad="[PAD]",
    mask="[MASK]",
    bos="[CLS]",
    eos="[SEP]",
    appended=("[MASK]",),  # SentencePiece's model has none: it follows the last piece
    faithful=False,  # transformers 5 leaves out SentencePiece's own normalization
    lowercase=False,
    prefix_space=True,
    strip="both",
    collapse=" ",
    # The published tokenizer.json knows no byte pieces, and all fine-tuned models have been fed its ids.
    ignore_byte_fallback=True,
)

_BIG_BIRD = LegacyTokenizer(
    kind="sentencepiece",
    files=("spiece.model",),
    cls="[CLS]",
    sep="[SEP]",
    unk="<unk>",
    pad="<pad>",
    mask="[MASK]",
    bos="<s>",
    eos="</s>",
    mask_takes_space=True,
    segments=False,
    faithful=False,  # transformers 5 leaves out SentencePiece's own normalization
    prefix_space=True,
    strip="right",
    collapse="▁",
)

RECIPES: dict[str, LegacyTokenizer] = {
    "bert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "nomic_bert": _BERT,
    "distilbert": replace(_BERT, segments=False),
    "mpnet": replace(
        _BERT,
        cls="<s>",
        sep="</s>",
        pad="<pad>",
        mask="<mask>",
        bos="<s>",
        eos="</s>",
        extra=("<unk>",),  # fairseq's, in the vocabulary and in the published tokenizer.json, beside [UNK]
        mask_takes_space=True,
        pair=_FAIRSEQ_PAIR,
        segments=False,
        trim_offsets=True,
    ),
    "roberta": _ROBERTA,
    "longformer": _ROBERTA,
    "xlm-roberta": _XLM_ROBERTA,
    "camembert": _CAMEMBERT,
    "albert": _ALBERT,
    "deberta": _DEBERTA,
    "deberta-v2": _DEBERTA_V2,
    "big_bird": _BIG_BIRD,
}

RECIPES_BY_CLASS: dict[str, str] = {
    name + fast: key
    for name, key in {
        "BertTokenizer": "bert",
        "ElectraTokenizer": "electra",
        "DistilBertTokenizer": "distilbert",
        "MPNetTokenizer": "mpnet",
        "RobertaTokenizer": "roberta",
        "LongformerTokenizer": "longformer",
        "XLMRobertaTokenizer": "xlm-roberta",
        "CamembertTokenizer": "camembert",
        "AlbertTokenizer": "albert",
        "DebertaTokenizer": "deberta",
        "DebertaV2Tokenizer": "deberta-v2",
        "BigBirdTokenizer": "big_bird",
    }.items()
    for fast in ("", "Fast")
}

# These say nothing about the kind of tokenizer, so the model's type is asked.
_GENERIC = {None, "PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend"}


def recipe_for(model_type: str, tokenizer_class: str | None = None) -> LegacyTokenizer | None:
    """The recipe of a folder: by the class in its tokenizer_config.json, else by the model's type; None for neither.

    >>> recipe_for("bert", "XLMRobertaTokenizer").files
    ('sentencepiece.bpe.model',)
    >>> recipe_for("bert", "HerbertTokenizer") is None
    True
    """
    if tokenizer_class in _GENERIC:
        return RECIPES.get(model_type)
    return RECIPES.get(RECIPES_BY_CLASS.get(tokenizer_class or "", ""))
