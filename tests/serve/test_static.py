"""The files of the page: present, self-contained and free of inline code."""

from __future__ import annotations

import re

import pytest

from bertie.serve.static import STATIC_FILES
from tests.serve.conftest import Running


@pytest.mark.parametrize("name", STATIC_FILES)
def test_files_are_served(server: Running, name: str) -> None:
    path, content_type = STATIC_FILES[name]
    reply = server.client.get(f"/page/{name}")
    assert reply.content == path.read_bytes()
    assert reply.headers["content-type"] == content_type
    assert "charset=utf-8" in content_type
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]


@pytest.mark.parametrize("name", [name for name in STATIC_FILES if not name.endswith(".txt")])
def test_nothing_is_inline_or_loaded_from_elsewhere(name: str) -> None:
    text = STATIC_FILES[name][0].read_text()
    # SVG's namespace is a name, not an address.
    assert re.findall(r"https?://[^\s\"'`<>)]+", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert not re.search(r"<script(?![^>]*src)|\son\w+=|style=|innerHTML|eval\(", text)


def test_imports_and_ids_resolve() -> None:
    """Every import names an exported symbol, and every element that a script looks up by id exists."""
    scripts = {name: path.read_text() for name, (path, _) in STATIC_FILES.items() if name.endswith(".js")}
    exports = {
        name: set(re.findall(r"^export (?:async )?(?:const|class|function) ([\w$]+)", text, re.M))
        for name, text in scripts.items()
    }
    imports = re.compile(r"import \{([^}]*)\} from \"\./([\w.]+)\";")
    for text in scripts.values():
        for names, source in imports.findall(text):
            assert {word.strip() for word in names.split(",") if word.strip()} <= exports[source]
    page = STATIC_FILES["index.html"][0].read_text()
    ids = set(re.findall(r'id="([^"]+)"', page)) | {"answer-span"}  # made by a script
    for text in scripts.values():
        assert set(re.findall(r'\$\("([^"]+)"\)', text)) <= ids
