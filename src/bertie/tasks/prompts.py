"""Prompts, which are prepended to each text to embed, such as "query: ", as in sentence-transformers."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

from bertie.errors import BertieWarning, InputError
from bertie.text.windows import Window

# Names of query and document prompts, in sentence-transformers' order of lookup.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


def choose_prompt(
    prompt: str | None, prompt_name: str | None, *, prompts: Mapping[str, str], default: str | None = None
) -> str:
    """The text of a prompt: `prompt`, or the one in `prompts` named `prompt_name` or `default`; else empty.

    >>> choose_prompt("search: ", None, prompts={})
    'search: '
    >>> choose_prompt(None, "query", prompts={"query": "query: ", "passage": "passage: "})
    'query: '
    """
    if prompt is not None:
        if prompt_name is not None:
            raise InputError(f"prompt={prompt!r:.60} is a text and prompt_name={prompt_name!r:.60} a name; pass one")
        if not isinstance(prompt, str):
            raise InputError(f"prompt={prompt!r:.60} must be a text to prepend to each text, such as 'query: '")
        if prompt in prompts:
            warnings.warn(
                f"prompt={prompt!r} is prepended literally to each text; for the checkpoint's prompt of that name, use "
                f"prompt_name={prompt!r}",
                BertieWarning,
                stacklevel=2,
            )
        return prompt
    name = prompt_name if prompt_name is not None else default
    if name is None:
        return ""
    if name not in prompts:
        known = ", ".join(prompts) or "none"
        raise InputError(f"prompt_name={name!r} is not one of the checkpoint's prompts: {known}")
    return prompts[name]


def find_prompt(prompts: Mapping[str, str], names: Sequence[str]) -> str | None:
    """The first of these names that is one of `prompts`.

    >>> find_prompt({"passage": "passage: "}, DOCUMENT_PROMPTS)
    'passage'
    """
    return next((name for name in names if name in prompts), None)


def prompt_tokens_in(window: Window, prompt: int) -> int:
    """Number of a window's tokens that belong to the prompt: of several windows only the first begins with it."""
    return prompt if 0 < prompt < len(window) and window.indices[prompt - 1] == prompt - 1 else 0
