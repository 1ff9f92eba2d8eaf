"""An extension of Griffe, which reads docstrings for the site: examples after `>>>` become blocks of code."""

from __future__ import annotations

import re
from typing import Any

import griffe

_SKIP = re.compile(r"\s*#\s*doctest:.*$", re.MULTILINE)


def fence_examples(text: str) -> str:
    """Put each example, with its output up to the next blank line, between fences.

    >>> print(fence_examples("Add.\\n\\n>>> 1 + 1    # doctest: +SKIP\\n2\\n\\nMore."))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    <BLANKLINE>
    More.
    """
    lines: list[str] = []
    inside = False
    for line in [*text.splitlines(), ""]:
        if not inside and line.lstrip().startswith(">>>"):
            lines += [] if not lines or not lines[-1].strip() else [""]
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(_SKIP.sub("", line).lstrip() if inside and line.lstrip().startswith((">>>", "...")) else line)
    return "\n".join(lines[:-1] if not lines[-1] else lines)


class DocstringExamples(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **options: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fence_examples(obj.docstring.value)
