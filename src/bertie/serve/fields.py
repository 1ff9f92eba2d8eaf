"""The names of request fields: one vocabulary for all endpoints.

A field may be sent under the name that another API has for it, so `inputs` is accepted wherever `texts` is. An unknown
field is answered with the name that was probably meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

_TEXTS = ("texts", "inputs", "input", "text", "sentences")
_COUNT = ("top_k", "k", "top_n")
_ANY_OF = (  # groups of names for the same thing; a field is accepted under each name of its group
    _TEXTS,
    ("documents", "texts", "passages", "document", "context", "contexts"),
    ("queries", "query"),
    ("questions", "inputs"),
    ("question", "query"),
    ("ids", "input_ids", "tokens"),
    _COUNT,
    ("labels", "candidate_labels"),
    ("template", "hypothesis_template"),
    ("candidates", "targets"),
    ("multi_label", "multi_class"),
    ("max_answer_length", "max_answer_len"),
    ("aggregation_strategy", "aggregation"),
    ("dimensions", "dimension", "output_dimension", "truncate_dim"),
    ("normalize", "normalized", "normalize_embeddings"),
    ("encoding_format", "embedding_type"),
    ("return_documents", "return_text"),
)
_SUGGESTED = 20  # unknown names that are compared with a missing field
ALIASES: dict[str, tuple[str, ...]] = {}
for _group in _ANY_OF:
    for _name in _group:
        ALIASES[_name] = tuple(dict.fromkeys((*ALIASES.get(_name, ()), *(other for other in _group if other != _name))))


def rename_fields(fields: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """A body with the endpoint's own names of fields; the body itself if it has no others.

    >>> rename_fields({"texts": ..., "labels": ...}, {"inputs": "a", "candidate_labels": ["b"], "colour": 1})
    {'colour': 1, 'texts': 'a', 'labels': ['b']}
    """
    if body.keys() <= fields.keys():
        return body
    renamed = dict(body)
    for name in fields:
        if name not in renamed:
            for alias in ALIASES.get(name, ()):
                if alias in renamed and alias not in fields:
                    renamed[name] = renamed.pop(alias)
                    break
    return renamed


def unknown_field(name: str, fields: Iterable[str], body: Mapping[str, Any]) -> str:
    """The message on an unknown field.

    >>> unknown_field("lables", ["texts", "labels"], {})
    'lables: unknown field; did you mean `labels`?'
    >>> unknown_field("inputs", ["texts", "labels"], {"inputs": "a", "texts": "b"})
    'inputs: another name of `texts`, which is there as well'
    """
    fields = list(fields)
    for field in fields:
        if field in body and name in ALIASES.get(field, ()):
            return f"{name}: another name of `{field}`, which is there as well"
    shown = name if is_plain(name) else "the body"
    likely = _closest(name, fields)
    hint = f"did you mean `{likely}`?" if likely else f"the fields are {', '.join(fields)}"
    return f"{shown}: unknown field; {hint}"


def misspelt(field: str, fields: Iterable[str], body: Mapping[str, Any]) -> str | None:
    """The name in a body that was probably meant as the missing field, if there is one.

    >>> misspelt("inputs", ["inputs", "truncate"], {"imputs": "a"})
    'imputs'
    """
    known = set(fields)
    for name in [name for name in body if name not in known and is_plain(name)][:_SUGGESTED]:
        if _closest(name, fields) == field:
            return name
    return None


def _closest(name: str, fields: Iterable[str]) -> str | None:
    """The field that is spelt most like a name, by its own names or those of other APIs."""
    owners = {alias: field for field in fields for alias in ALIASES.get(field, ())} | {field: field for field in fields}
    spelling = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", name[:100]).lower().replace("-", "_")  # topK, top-k
    found = get_close_matches(spelling, owners, n=1, cutoff=0.7)
    return owners[found[0]] if found else None


def is_plain(name: str) -> bool:
    """Whether a key may be shown in a message: it looks like the name of a field."""
    return re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,39}", name) is not None
