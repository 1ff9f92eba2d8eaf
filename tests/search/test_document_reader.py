from __future__ import annotations

import gzip
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bertie.errors import InputError, MissingPackageError, NotFoundError
from bertie.search.document_reader import read_documents
from bertie.search.file_changes import FileChanges
from bertie.search.records import Document


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        os.utime(path, ns=(10**18, 10**18))  # long ago, so that nothing has to be waited for
    return folder


def read(*paths: Path, **options: Any) -> dict[str, Document]:
    found = list(read_documents(paths, **options))
    assert len({one.id for one in found}) == len(found)
    return {one.id: one for one in found}


def refused(path: Path, message: str, **options: Any) -> None:
    """Reading it is an error with these words; or it is skipped with the same words."""
    with pytest.raises(InputError, match=message):
        list(read_documents(path, **options))
    skips: list[tuple[str, str]] = []
    assert not list(read_documents(path, **options, on_error="skip", on_skip=lambda *one: skips.append(one)))
    ((name, reason),) = skips
    assert name == str(path)
    with pytest.raises(InputError, match=message):
        raise InputError(reason)


# --- files and folders ---


def test_folder(tmp_path: Path) -> None:
    write(
        tmp_path, {"b.txt": "two", "a/z.md": "# One #\n\ntext", "a/b/c.rst": "Deep\n====\n\ntext", ".hidden.txt": "no"}
    )
    write(tmp_path, {".git/x.txt": "no", "a/x.py": "no", "B.TXT": "upper", "empty.txt": ""})
    skips: list[tuple[str, str]] = []
    found = list(read_documents(tmp_path, on_skip=lambda *one: skips.append(one)))
    assert [one.id for one in found] == ["B.TXT", "a/b/c.rst", "a/z.md", "b.txt", "empty.txt"]
    assert [one.metadata.get("title") for one in found] == [None, "Deep", "One", None, None]
    assert [one.text for one in found][-2:] == ["two", ""]
    assert found[3].source == str(tmp_path / "b.txt")
    assert [name for name, _ in skips] == [str(tmp_path / "a/x.py")]
    assert "its suffix is none of .txt" in skips[0][1]


def test_files_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"a/notes": "plain", "b/c.txt": "c"})
    found = read(tmp_path / "a/notes", tmp_path / "b", tmp_path / "b/c.txt")
    assert {name: one.text for name, one in found.items()} == {"notes": "plain", "c.txt": "c"}, "no file twice"
    write(tmp_path, {"a/c.txt": "another"})
    with pytest.raises(InputError, match=r"a/c\.txt and .*b/c\.txt would both get the document id 'c\.txt'"):
        read(tmp_path / "a", tmp_path / "b")


def test_links(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "other/b.txt": "b"})
    (tmp_path / "docs/self").symlink_to(tmp_path / "docs")
    (tmp_path / "docs/up").symlink_to(tmp_path)
    (tmp_path / "docs/out").symlink_to(tmp_path / "other")
    assert list(read(tmp_path / "docs")) == ["a.txt", "out/b.txt"]
    (tmp_path / "docs/up").unlink()
    (tmp_path / "docs/lost.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match=r"lost\.txt is a broken symbolic link"):
        read(tmp_path / "docs")
    assert list(read(tmp_path / "docs", on_error="skip")) == ["a.txt", "out/b.txt"]


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no such file or folder: .*nowhere"):
        read_documents(tmp_path / "nowhere", on_error="skip")
    for folder in (tmp_path / "empty", tmp_path / "useless"):
        folder.mkdir()
    write(tmp_path, {"useless/x.py": ""})
    for name in ("empty", "useless"):
        with pytest.raises(InputError, match=rf"the folder .*{name} contains no readable file; suffixes: \.txt"):
            list(read_documents(tmp_path / name, on_error="skip"))
    os.mkfifo(tmp_path / "pipe.txt")
    refused(tmp_path / "pipe.txt", "is not a regular file")
    with pytest.raises(InputError, match=r"is JSON; convert it to JSONL"):
        list(read_documents(write(tmp_path, {"a.json": "[]"}) / "a.json"))
    with pytest.raises(InputError, match="paths is empty"):
        read_documents([])


def test_wrong_options(tmp_path: Path) -> None:
    for options, message in (
        ({"encoding": "klingon"}, "encoding='klingon' is unknown"),
        ({"encoding": "base64"}, "encoding='base64' is unknown"),
        ({"on_error": "ignore"}, "on_error='ignore' must be 'raise' or 'skip'"),
        ({"metadata": "year"}, "metadata='year' must be a list of columns"),
    ):
        with pytest.raises(InputError, match=message):
            read_documents(tmp_path, **options)  # type: ignore[arg-type]


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As told by the system: whoever runs the tests may be allowed everything."""
    write(tmp_path, {"a.txt": "a", "closed/b.txt": "b", "secret.txt": "c"})
    listdir, real = os.listdir, open

    def no_listdir(path: str) -> list[str]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return listdir(path)

    def no_open(path: Any, *rest: Any, **more: Any) -> Any:
        if str(path).endswith("secret.txt"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "listdir", no_listdir)
    monkeypatch.setattr("builtins.open", no_open)
    with pytest.raises(InputError, match=r"the folder .*closed cannot be read: Permission denied"):
        read(tmp_path)
    refused(tmp_path / "secret.txt", r"secret\.txt cannot be read: Permission denied")
    assert list(read(tmp_path, on_error="skip")) == ["a.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_no_permission_for_real(tmp_path: Path) -> None:
    path = write(tmp_path, {"a.txt": "a"}) / "a.txt"
    path.chmod(0)
    refused(path, "cannot be read: Permission denied")


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    try:
        (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    except OSError:
        pytest.skip("this file system takes no such names")
    with pytest.raises(InputError, match=r"caf\\udce9\.txt': the file name is not UTF-8"):
        read(tmp_path)


# --- encodings ---

TEXT = "Grüße aus Köln, sagte Zoë."


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_marked_and_utf8(tmp_path: Path, encoding: str) -> None:
    write(tmp_path, {"a.txt": TEXT.encode(encoding), "b.csv": f'text,x\r\n"{TEXT}",1\r\n'.encode(encoding)})
    assert [one.text for one in read(tmp_path).values()] == [TEXT, TEXT]
    found = read(tmp_path, encoding="cp1252")
    assert [one.text for one in found.values()] == [TEXT, TEXT], "it is known for what it is"


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le", "iso2022_jp", "shift_jis"])
def test_named_encoding(tmp_path: Path, encoding: str) -> None:
    text = "日本語" if "j" in encoding else "Grüße – “so”"
    rows = {"a.jsonl": json.dumps({"text": text}, ensure_ascii=False) + "\n", "a.csv": f"text\n{text}\n"}
    write(tmp_path, {"a.txt": text.encode(encoding), **{name: raw.encode(encoding) for name, raw in rows.items()}})
    write(tmp_path, {"utf8.txt": "ünïcode", "utf8.csv": "text\nünïcode\n"})
    found = {name: one.text for name, one in read(tmp_path, encoding=encoding).items()}
    assert found == {
        "a.csv#1": text,
        "a.jsonl#1": text,
        "a.txt": text,
        "utf8.csv#1": "ünïcode",
        "utf8.txt": "ünïcode",
    }, "a folder may hold both"


def test_nothing_is_guessed(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "a.txt": TEXT.encode("cp1252"),
            "mixed.txt": b"ok \xc3\xa9 " * 1000 + b"caf\xe9 ole",
            "b.csv": b"text\n\xe9\n",
        },
    )
    refused(tmp_path / "a.txt", r"a\.txt is not utf-8 \(byte 0xfc at offset 2\); pass its encoding with --encoding")
    refused(tmp_path / "mixed.txt", r"mixed\.txt is not utf-8 \(byte 0xe9 at offset 6003\)")
    refused(tmp_path / "b.csv", r"b\.csv, line 2 is not UTF-8")
    refused(tmp_path / "a.txt", r"not utf-8 nor shift_jis", encoding="shift_jis")
    refused(tmp_path / "b.csv", r"b\.csv is neither UTF-8 nor ascii", encoding="ascii")


def test_binary(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"a.txt": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff\xfe", "b.md": b"text \0 text", "c.txt": "ab".encode("utf-16-le")},
    )
    refused(tmp_path / "a.txt", r"a\.txt is binary, not text \(NUL at offset 8\)")
    refused(tmp_path / "a.txt", r"a\.txt is binary", encoding="latin-1")
    refused(tmp_path / "b.md", r"b\.md is binary, not text \(NUL at offset 5\)")
    refused(tmp_path / "c.txt", r"UTF-16 without a byte order mark")


def test_compressed(tmp_path: Path) -> None:
    whole = gzip.compress(b"# Title\n\ntext")
    write(
        tmp_path,
        {"a.md.gz": whole, "b.csv.gz": gzip.compress("text\nÄ\n".encode("cp1252")), "c/cut.txt.gz": whole[:-6]},
    )
    found = read(tmp_path / "a.md.gz", tmp_path / "b.csv.gz", encoding="cp1252")
    assert {name: one.text for name, one in found.items()} == {"a.md.gz": "# Title\n\ntext", "b.csv.gz#1": "Ä"}
    assert found["a.md.gz"].metadata["title"] == "Title"
    refused(tmp_path / "c/cut.txt.gz", "cannot be decompressed, it is corrupt or truncated")


# --- rows ---

ROWS = [
    {"id": "x", "text": "one", "year": 1999, "tags": ["a"], "ok": True, "none": None},
    {"id": 7, "text": "two", "p": 0.5},
]


def test_jsonl(tmp_path: Path) -> None:
    write(tmp_path, {"a/r.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS)})
    found = read(tmp_path)
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "a/r.jsonl#x": {"path": "a/r.jsonl", "year": 1999, "ok": True},
        "a/r.jsonl#7": {"path": "a/r.jsonl", "p": 0.5},
    }
    found = read(tmp_path, metadata=["year"], title="id")
    assert [dict(one.metadata) for one in found.values()] == [
        {"path": "a/r.jsonl", "year": 1999},
        {"path": "a/r.jsonl"},
    ]
    with pytest.raises(InputError, match=r"row 1: column 'tags' contains a list; metadata must be scalar values"):
        read(tmp_path, metadata=["tags"])


def test_csv(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": 'name,body,k\nA,"one,\ntwo",5\nB,three,\n', "s.tsv": "body\nx\n"})
    found = read(tmp_path, text="body")
    assert {name: (one.text, dict(one.metadata)) for name, one in found.items()} == {
        "r.csv#1": ("one,\ntwo", {"path": "r.csv", "name": "A", "k": "5"}),
        "r.csv#2": ("three", {"path": "r.csv", "name": "B"}),
        "s.tsv#1": ("x", {"path": "s.tsv"}),
    }
    found = read(tmp_path / "r.csv", text="body", id="name", title="k", metadata=[])
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "r.csv#A": {"path": "r.csv", "title": "5"},
        "r.csv#B": {"path": "r.csv"},
    }


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from datetime import date

    from pyarrow import parquet

    table = pa.table({"_id": ["a", "b"], "text": ["one", "two"], "day": [date(2020, 1, 2), None], "v": [[1.0], [2.0]]})
    parquet.write_table(table, tmp_path / "r.parquet")
    found = read(tmp_path)
    assert {name: dict(one.metadata) for name, one in found.items()} == {
        "r.parquet#a": {"path": "r.parquet", "day": "2020-01-02"},
        "r.parquet#b": {"path": "r.parquet"},
    }


def test_wrong_columns(tmp_path: Path) -> None:
    write(
        tmp_path, {"r.csv": "name,body\nA,one\nB,two\n", "dup.csv": "id,text\nA,one\nA,two\nB,three\n", "empty.csv": ""}
    )
    refused(
        tmp_path / "r.csv", r"r\.csv has no column 'content', only 'name', 'body'.*text= \(--column\)", text="content"
    )
    refused(tmp_path / "r.csv", r"r\.csv has no column 'year', only", text="body", metadata=["year"])
    refused(tmp_path / "r.csv", r"r\.csv has no column 'key', only", text="body", id="key")
    refused(tmp_path / "empty.csv", r"empty\.csv is empty")
    with pytest.raises(InputError, match=r"dup\.csv, row 2: duplicate id 'A' in column 'id'"):
        read(tmp_path / "dup.csv")
    assert list(read(tmp_path / "dup.csv", on_error="skip")) == ["dup.csv#A", "dup.csv#B"], "only that row is left out"


def test_wrong_rows(tmp_path: Path) -> None:
    write(
        tmp_path,
        {"r.jsonl": '{"text": "a"}\n{"text": null}\n{"text": "\\ud800"}\n{"text": "d"}\n{broken\n{"text": "f"}\n'},
    )
    skips: list[str] = []
    found = read(tmp_path, on_error="skip", on_skip=lambda _, reason: skips.append(reason))
    assert list(found) == ["r.jsonl#1", "r.jsonl#4"]
    assert [one.partition("r.jsonl, ")[2].split(" ")[:2] for one in skips] == [
        ["row", "2:"],
        ["row", "3:"],
        ["line", "5"],
    ]
    assert not any("@" in one.version for one in found.values()), "not all was read: next time it is read again"
    with pytest.raises(InputError, match="row 2: no value in column 'text'"):
        read(tmp_path)


# --- HTML ---

PAGE = """<!DOCTYPE html><html><head><title>A &amp; B
 page</title><style>p {color: red}</style><script>var x = "<p>no</p>";</script></head>
<body><nav><ul><li>Home<li>About</ul></nav>
<h1>Rivers   <em>of</em><br>Europe</h1><p>The Rhine&nbsp;is
 <b>long</b>&mdash;1,233&#160;km.</p><p hidden>not seen</p><div style="display: none">nor <div>this</div></div>
<h2>List</h2><ul><li>one</li><li>two <a href="#">link</a></li></ul>
<table><tr><th>name</th><th>km</th></tr><tr><td>Elbe</td><td>1094</td></tr></table>
<pre><code>if x:
    # no heading
    `y`</code></pre><!-- a comment --><h3></h3><p>The<span> </span>end.</p><svg><title>no</title></svg></body></html>"""


def test_html(tmp_path: Path) -> None:
    one = read(write(tmp_path, {"a.html": PAGE}))["a.html"]
    assert one.metadata["title"] == "A & B page"
    assert one.text == (
        "# Rivers of Europe\n\nThe Rhine is long—1,233 km.\n\n## List\n\n- one\n- two link\n\n"
        "name | km\nElbe | 1094\n\n```\nif x:\n    # no heading\n    `y`\n```\n\nThe end."
    )


def test_html_that_is_broken(tmp_path: Path) -> None:
    pages = {
        "a.html": "<p>one<nav>two<p>three",  # nothing may be lost behind an element without an end
        "b.html": "one <b>two</p></div> three < four & five",
        "c.html": "one<nav>no</nav>two<b hidden>no</b> three",
        "d.html": "<h1>one<ul><li>two<pre>three",
        "e.html": "<p>one<script>two",
        "f.html": "<div hidden>one</div><p>two</p>",
        "g.html": "",
        "h.html": "one" + "<a " * 50_000,
    }
    found = read(write(tmp_path, pages))
    assert [one.text for one in found.values()] == [
        "one\n\ntwo\n\nthree",
        "one two\n\nthree < four & five",
        "one\n\ntwo three",
        "# one\n\n- two\n\n```\nthree\n```",
        "one",
        "two",
        "",
        "one" + "<a " * 49_999 + "<a",
    ]


def test_html_charset(tmp_path: Path) -> None:
    text = "<p>Gr\u00fc\u00dfe \u2013 so</p>"
    write(tmp_path, {"a.html": b'<meta charset="iso-8859-1">' + text.encode("cp1252")})  # as browsers take it
    write(
        tmp_path,
        {"b.htm": b'<meta http-equiv="x" content="text/html; charset=koi8-r">' + "<p>Привет</p>".encode("koi8-r")},
    )
    write(tmp_path, {"c.xhtml": b'<?xml version="1.0" encoding="shift_jis"?>' + "<p>日本</p>".encode("shift_jis")})
    write(tmp_path, {"d.html": b"<meta charset=latin1>" + text.encode("utf-8"), "bad/e.html": b"<meta charset=xx>\xe9"})
    with pytest.raises(InputError, match=r"bad/e\.html is not utf-8 \(byte 0xe9 at offset 17\)"):
        read(tmp_path)
    found = read(tmp_path, encoding="latin-1")
    assert [one.text for one in found.values()] == ["Grüße – so", "Привет", "é", "日本", "Grüße – so"]


# --- PDF ---


def pdf(*pages: str, title: str = "") -> bytes:
    """A PDF with a line of text a page, written by hand."""
    objects = ["<< /Type /Catalog /Pages 2 0 R >>"]
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    objects.append(f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>")
    objects.append("<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    for i, text in enumerate(pages):
        shown = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET" if text else ""
        objects.append(
            f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
            "/Resources << /Font << /F1 3 0 R >> >> >>"
        )
        objects.append(f"<< /Length {len(shown)} >>\nstream\n{shown}\nendstream")
    objects.append(f"<< /Title ({title}) >>")
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n{body}\nendobj\n".encode()
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(objects) + 1
    end = f"xref\n0 {size}\n0000000000 65535 f \n{table}trailer\n<< /Size {size} /Root 1 0 R /Info {size - 1} 0 R >>\n"
    return out + f"{end}startxref\n{len(out)}\n%%EOF\n".encode()


def encrypted(password: str) -> bytes:
    pypdf = pytest.importorskip("pypdf")
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(pdf("Secret rivers")))
    writer.encrypt(password, "owner", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_pdf(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    write(tmp_path, {"a.pdf": pdf("First page.", "", "Third page.", title="On rivers"), "open.pdf": encrypted("")})
    found = read(tmp_path)
    assert found["a.pdf"].text == "First page.\f\fThird page."
    assert found["a.pdf"].metadata == {"path": "a.pdf", "pages": 3, "title": "On rivers"}
    assert found["open.pdf"].text == "Secret rivers", "its user password is empty: everyone may read it"


def test_pdf_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("pypdf")
    whole = pdf("First page.", "Second page.")
    damaged = whole.replace(b"/Type /Pages", b"/Type /Pagan").replace(b"/Kids [", b"/Kids (")
    write(
        tmp_path, {"cut.pdf": whole[:-200], "locked.pdf": encrypted("x"), "blank.pdf": pdf("", ""), "no.pdf": b"hello"}
    )
    write(
        tmp_path,
        {"empty.pdf": b"", "damaged.pdf": damaged, "junk.pdf": b"%PDF-1.4\n" + bytes(range(256)) * 9 + b"%%EOF"},
    )
    for name, message in (
        ("cut.pdf", r"cut\.pdf is truncated: a PDF must end in %%EOF"),
        ("locked.pdf", r"locked\.pdf is encrypted; save it without a password \(qpdf --decrypt"),
        ("blank.pdf", r"blank\.pdf contains no text on its 2 pages, only images; run OCR first"),
        ("no.pdf", r"no\.pdf is not a PDF"),
        ("empty.pdf", r"empty\.pdf is not a PDF"),
        ("damaged.pdf", r"damaged\.pdf (cannot be read as PDF: .*; repair it|contains no text)"),
        ("junk.pdf", r"junk\.pdf cannot be read as PDF: .*; repair it \(qpdf"),
    ):
        refused(tmp_path / name, message)


def test_pdf_that_needs_cryptography(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pypdf = pytest.importorskip("pypdf")

    def needs(*_: object) -> None:
        raise pypdf.errors.DependencyError("cryptography>=3.1 is required for AES algorithm")

    monkeypatch.setattr(pypdf, "PdfReader", needs)
    path = write(tmp_path, {"a.pdf": pdf("x")}) / "a.pdf"
    refused(path, r"a\.pdf is encrypted; .*; or, if it opens without one, pip install cryptography")


def test_pdf_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    write(tmp_path, {"a.pdf": pdf("x"), "b.txt": "b"})
    with pytest.raises(
        MissingPackageError, match=r"a\.pdf: PDF needs the package pypdf: pip install 'bertie\[search\]'"
    ):
        read(tmp_path)
    assert list(read(tmp_path, on_error="skip")) == ["b.txt"]


# --- what has changed ---


class Memory:
    """What a store knows of its documents."""

    def __init__(self) -> None:
        self.held: dict[str, Document] = {}

    def refresh(self, *paths: Path, stop: int | None = None, **options: Any) -> tuple[list[str], list[str], int]:
        known = [(one.id, one.source, one.version) for one in self.held.values()]
        changes = FileChanges(paths, known, **options)
        done = []
        for document in changes:
            if len(done) == stop:
                return done, [], changes.unchanged
            self.held[document.id] = document
            done.append(document.id)
        for name in changes.deleted:
            del self.held[name]
        assert changes.added + changes.changed == len(done)
        return done, changes.deleted, changes.unchanged


@pytest.fixture
def opens(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files as they are opened."""
    seen: list[str] = []
    real = open

    def spy(path: Any, *rest: Any, **more: Any) -> Any:
        seen.append(os.path.basename(str(path)))
        return real(path, *rest, **more)

    monkeypatch.setattr("builtins.open", spy)
    return seen


def test_changes_of_files(tmp_path: Path, opens: list[str]) -> None:
    write(tmp_path, {"a.txt": "a", "b/c.txt": "c", "d.txt": "d"})
    store = Memory()
    assert store.refresh(tmp_path) == (["a.txt", "b/c.txt", "d.txt"], [], 0)
    opens.clear()
    assert store.refresh(tmp_path) == ([], [], 3)
    assert opens == [], "no file is read"
    (tmp_path / "a.txt").write_text("new")
    os.utime(tmp_path / "d.txt")
    assert store.refresh(tmp_path) == (["a.txt"], [], 2)
    assert opens == ["a.txt", "d.txt"], "the one that was only touched is read, and found the same"
    (tmp_path / "b/c.txt").unlink()
    write(tmp_path, {"e.txt": "e"})
    assert store.refresh(tmp_path) == (["e.txt"], ["b/c.txt"], 2)
    assert sorted(store.held) == ["a.txt", "d.txt", "e.txt"]


def test_a_change_right_after_reading_is_seen(tmp_path: Path) -> None:
    store = Memory()
    for content in ("1", "2", "3"):
        (tmp_path / "a.txt").write_text(content)  # of the same size, within a tick of the clock or two
        assert store.refresh(tmp_path)[0] == ["a.txt"]


def test_changes_of_rows(tmp_path: Path, opens: list[str]) -> None:
    rows = [{"id": i, "text": f"text {i}"} for i in range(5)]

    def save(when: int) -> None:
        (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        os.utime(tmp_path / "r.jsonl", ns=(when, when))

    save(1)
    store = Memory()
    assert len(store.refresh(tmp_path)[0]) == 5
    rows[1]["text"] = "new"
    del rows[2]
    rows.append({"id": 9, "text": "nine"})
    save(2)
    changed, gone, _ = store.refresh(tmp_path)
    assert {"r.jsonl#1", "r.jsonl#9"} <= set(changed) <= {"r.jsonl#1", "r.jsonl#9", "r.jsonl#4"}
    assert gone == ["r.jsonl#2"]
    opens.clear()
    assert store.refresh(tmp_path) == ([], [], 5)
    assert opens == []
    assert {name: one.text for name, one in store.held.items()} == {f"r.jsonl#{row['id']}": row["text"] for row in rows}


def test_what_was_interrupted_goes_on(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": "text\n" + "".join(f"row {i}\n" for i in range(10))})
    store = Memory()
    assert len(store.refresh(tmp_path, stop=4)[0]) == 4
    assert store.refresh(tmp_path) == ([f"r.csv#{i}" for i in range(5, 11)], [], 4), "part of a file is not all of it"
    assert store.refresh(tmp_path) == ([], [], 10)


def test_other_options_read_again(tmp_path: Path) -> None:
    write(tmp_path, {"r.csv": "text,more\na,b\n"})
    store = Memory()
    store.refresh(tmp_path)
    assert store.refresh(tmp_path, text="more") == (["r.csv#1"], [], 0)
    assert store.held["r.csv#1"].text == "b"


def test_nothing_is_lost_that_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path, {"docs/a.txt": "a", "docs/b/c.txt": "c", "docs/r.csv": "text\none\ntwo\n", "elsewhere/x.txt": "x"})
    store = Memory()
    store.refresh(tmp_path / "docs")
    store.refresh(tmp_path / "elsewhere")
    assert len(store.held) == 5
    write(tmp_path, {"docs/a.txt": b"\xff\xff", "docs/r.csv": "text\none\ntwo,three\nfour\n"})
    with pytest.raises(InputError, match=r"a\.txt is not utf-8"):
        store.refresh(tmp_path / "docs")
    assert store.refresh(tmp_path / "docs", on_error="skip") == ([], [], 2)
    assert len(store.held) == 5
    with pytest.raises(NotFoundError):
        store.refresh(tmp_path / "moved")
    (tmp_path / "docs/a.txt").unlink()
    assert store.refresh(tmp_path / "docs", on_error="skip")[1] == ["a.txt"]
    assert "x.txt" in store.held


def test_another_document_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path, {"one/a.txt": "a", "two/a.txt": "another"})
    store = Memory()
    store.refresh(tmp_path / "one")
    with pytest.raises(
        InputError, match=r"two/a\.txt would get the document id 'a\.txt', which exists already \(from .*one/a\.txt"
    ):
        store.refresh(tmp_path / "two")
    (tmp_path / "one").rename(tmp_path / "three")
    assert store.refresh(tmp_path / "three") == (["a.txt"], [], 0), "it has moved"
    store.held["x.txt"] = Document("x.txt", "by hand")
    write(tmp_path, {"three/x.txt": "x"})
    with pytest.raises(InputError, match="added as a text"):
        store.refresh(tmp_path / "three")
