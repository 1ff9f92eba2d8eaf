"""What the request and response models of all APIs share.

Requests are validated by these classes. Responses are only described by them, for OpenAPI: the
handlers build them, and the tests check them against the description.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

T = TypeVar("T")

Array = Annotated[list[T], Field(fail_fast=True)]  # its validation ends with the first invalid element
Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Array[Id]
Label = Annotated[str, StringConstraints(min_length=1, max_length=200)]
Name = Annotated[str, StringConstraints(max_length=1000)]  # of a model, a head, a prompt
Texts = str | Array[str]


class TextItem(BaseModel):
    """A text as an object, as Jina's API has it."""

    model_config = ConfigDict(strict=True)
    text: str


Pooling = Literal["cls", "mean", "max", "last", "weighted-mean"]

SENTENCES = ["A cat sat on the mat.", "The feline rested on a rug."]
QUERY, PASSAGES = "What do cats eat?", ["Bread is baked in an oven.", "Cats eat meat."]

MODEL = "The name of a served model; by default the first one with a head for the task."
HEAD = "The name of one of the model's heads, if several fit the task."


class CompatibleRequest(BaseModel):
    """A request of another server's API: unknown fields are ignored, as that server does."""

    model_config = ConfigDict(strict=True, extra="ignore")
    model: Name | None = Field(None, description=MODEL)


class BertieRequest(BaseModel):
    """A request of Bertie's own API: unknown fields are errors, since they may be misspelt."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: Name | None = Field(None, description=MODEL)


class TaskRequest(BertieRequest):
    """A request for a task."""

    head: Name | None = Field(None, description=HEAD)
    overflow: Literal["window", "error", "truncate"] = Field(
        "window",
        description="For texts longer than the model's maximum length: read them in overlapping windows, refuse them, "
        "or read only their beginning.",
    )


class Response(BaseModel):
    """A response. Its validator is built only if used, which keeps startup fast."""

    model_config = ConfigDict(extra="forbid", defer_build=True)


class ReadCounts(Response):
    """How much of a text was read: its tokens, those read, and windows; and its unknown and non-English tokens."""

    tokens_total: int
    tokens_read: int
    windows: int
    tokens_unknown: int = Field(
        description="Tokens that the vocabulary does not cover: unknown tokens, and letters of scripts without words."
    )
    tokens_non_english: int = Field(
        description="Tokens in parts of the text that do not seem to be English; 0 for models without an English "
        "vocabulary."
    )


_PROMPTS = {  # names of prompts for the purposes that other APIs have; sentence-transformers uses the same ones
    **dict.fromkeys(("query", "search_query", "retrieval.query"), ("query",)),
    **dict.fromkeys(("document", "search_document", "retrieval.passage"), ("document", "passage", "corpus")),
}


def prompt_for(prompts: Container[str], purpose: str | None) -> str | None:
    """The name of the prompt for what embeddings are for, such as search_query; None if there is no such prompt.

    >>> prompt_for({"query": "query: ", "passage": "passage: "}, "search_document")
    'passage'
    """
    names = () if purpose is None else _PROMPTS.get(purpose, (purpose,))
    return next((name for name in names if name in prompts), None)
