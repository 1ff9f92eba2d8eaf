"""Text of HTML and PDF."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from bertie.errors import InputError, MissingPackageError
from bertie.search.text_extraction import extract_html
from tests.search.documents import read, refused, write

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


def test_malformed_html(tmp_path: Path) -> None:
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
    found = read(write(tmp_path, pages))  # type: ignore[arg-type]
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


def test_unreadable_pdf(tmp_path: Path) -> None:
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


def test_pdf_without_pypdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pypdf", None)
    write(tmp_path, {"a.pdf": pdf("x"), "b.txt": "b"})
    with pytest.raises(
        MissingPackageError, match=r"a\.pdf: PDF needs the package pypdf: pip install 'bertie\[search\]'"
    ):
        read(tmp_path)
    assert list(read(tmp_path, on_error="skip")) == ["b.txt"]


def test_tags_in_a_title_are_text() -> None:
    assert extract_html("<title>The <b>bold</b> &lt;i&gt; element</title><p>x</p>", "f") == (
        "x",
        "The <b>bold</b> <i> element",
    )
