"""What a file holds, as text: by its encoding, from HTML, from PDF."""

from __future__ import annotations

import codecs
import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser

from bertie.errors import InputError, MissingPackageError

# UTF-32's little-endian mark begins with UTF-16's.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_CHARSET = re.compile(rb"<(?:meta[^>]+charset|\?xml[^>]+encoding)\s*=\s*[\"']?\s*([A-Za-z0-9_.:-]+)", re.IGNORECASE)


# --- encodings ---


def decode(data: bytes, name: str, encoding: str | None, declared: str | None = None) -> str:
    """Text by its byte order mark, as UTF-8, as what it declares, or else as `encoding`, and never by a guess."""
    marked = next((kind for mark, kind in BYTE_ORDER_MARKS if data.startswith(mark)), None)
    others = [] if marked else [one for one in (_meant(declared), encoding) if one]
    # 7-bit encodings such as ISO-2022-JP look like UTF-8 but for their escapes, and UTF-16 of English but for its NULs.
    tries = [*others, "utf-8"] if others and (b"\x1b" in data or b"\0" in data) else [marked or "utf-8", *others]
    text: str | None = None
    for one in tries:
        try:
            text = data.decode(one)
            break
        except UnicodeDecodeError as error:
            at = f"byte 0x{data[error.start]:02x} at offset {error.start}"
    if "\0" in (text or "") or (text is None and not marked and b"\0" in data):
        raise InputError(
            f"{name} is binary, not text (a NUL at offset {data.find(0)}); leave it out, or name its encoding with "
            "--encoding (encoding=) if it is UTF-16 without a byte order mark"
        )
    if text is None:
        raise InputError(
            f"{name} is not {' nor '.join(tries)} ({at}); name its encoding with --encoding (encoding=), such as cp1252"
        )
    return text


def _meant(charset: str | None) -> str | None:
    """The encoding that a page means: by Latin-1 and ASCII Windows' code page, as in every browser."""
    if charset is None or not is_encoding(charset):
        return None
    return "cp1252" if codecs.lookup(charset).name in ("iso8859-1", "ascii") else charset


def is_encoding(encoding: str) -> bool:
    """Whether Python knows an encoding of texts by this name."""
    try:
        io.TextIOWrapper(io.BytesIO(), encoding)  # unlike codecs.lookup, it refuses those that make no text
    except LookupError:
        return False
    return True


def charset_of(page: bytes) -> str | None:
    """What an HTML page says that its encoding is."""
    found = _CHARSET.search(page[:2048])
    return found and found[1].decode()


# --- PDF ---


def extract_pdf(data: bytes, name: str) -> tuple[str, str | None, int]:
    """The text, pages apart by form feeds; the title; the number of pages."""
    try:
        import pypdf
        from pypdf.errors import DependencyError
    except ImportError:
        raise MissingPackageError(f"{name}: PDF needs the package pypdf: pip install 'bertie[search]'") from None
    if b"%PDF-" not in data[:1024]:
        raise InputError(f"{name} is no PDF: it does not begin as one")
    if b"%%EOF" not in data.rstrip(b"\0\r\n\t ")[-1024:]:  # pypdf would make do with the pages that are left
        raise InputError(f"{name} is cut short: a PDF must end in %%EOF; fetch it again")
    locked = f"{name} is encrypted; save it without a password (qpdf --decrypt in.pdf out.pdf)"
    pages: list[str] = []
    with _quiet("pypdf"):
        try:
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise InputError(locked)
            for page in reader.pages:
                pages.append(page.extract_text())
            title = reader.metadata.title if reader.metadata else None
        except InputError:
            raise
        except DependencyError:
            raise InputError(f"{locked}; or, if it opens without one, pip install cryptography") from None
        except Exception as error:  # pypdf raises whatever a broken file makes it stumble over
            what = f"after page {len(pages)}" if pages else "as PDF"
            raise InputError(
                f"{name} cannot be read {what}: {str(error)[:200] or type(error).__name__}; "
                "repair it (qpdf in.pdf out.pdf) or leave it out"
            ) from None
    # Fonts without a table of letters give NULs and halves of characters.
    text = "\f".join(pages).replace("\0", "").encode("utf-8", "replace").decode("utf-8")
    if not text.strip():
        raise InputError(f"{name} holds no text on its {len(pages)} pages, only pictures; run OCR first (ocrmypdf)")
    clean = title.replace("\0", "").strip() if isinstance(title, str) else ""
    return text, clean.encode("utf-8", "replace").decode("utf-8") or None, len(pages)


@contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Without the warnings of a package, which name no file."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


# --- HTML ---


def extract_html(page: str, name: str) -> tuple[str, str | None]:
    """What a reader of the page sees, with headings, lists and code as Markdown writes them; and its title."""
    parser = _parsed(page, name, all_=False)
    if parser.inside not in (None, "script", "style"):  # it has no end, and all behind it would be lost
        parser = _parsed(page, name, all_=True)
    return parser.text(), " ".join("".join(parser.title).split()) or None


def _parsed(page: str, name: str, all_: bool) -> _Page:
    parser = _Page(all_)
    end = page.rfind(">") + 1  # what follows is no markup, and to look for some the parser takes quadratic time
    try:
        parser.feed(page[:end])
        parser.close()
    except (AssertionError, ValueError) as error:  # of the standard library, on broken declarations
        raise InputError(f"{name} cannot be read as HTML: {error}") from None
    parser.handle_data(unescape(page[end:]))
    return parser


class _Page(HTMLParser):
    LEFT_OUT = frozenset("script style nav template noscript svg select button textarea iframe object".split())
    EMPTY = frozenset("area base br col embed hr img input link meta source track wbr".split())
    LINES = frozenset("br li tr dt dd option".split())
    PARAGRAPHS = frozenset(
        "address article aside blockquote body caption details div dl fieldset figcaption figure footer form "
        "h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section summary table ul".split()
    )
    HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")

    def __init__(self, all_: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.inside: str | None = None  # an element that is left out
        self._depth = 0  # of elements of its name
        self._all = all_  # leave out nothing but programs
        self._out: list[str] = []
        self._gap, self._prefix = "", ""
        self._in_title = self._in_heading = False
        self._code: list[str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self.inside is not None:
            self._depth += tag == self.inside
            return
        left_out = tag in self.LEFT_OUT or (tag not in self.EMPTY and _hidden(attributes))
        if tag in ("script", "style") or (left_out and not self._all):
            self.inside, self._depth = tag, 1
            self._break(tag)
            return
        if tag == "title":
            self._in_title = True
        elif self._code is not None:
            if tag == "br":
                self._code.append("\n")
        elif tag == "pre":
            self._code = []
        elif tag in ("td", "th"):
            if not self._gap.startswith("\n") and self._out:
                self._gap = " | "
        else:
            self._break(tag)
            if tag in self.HEADINGS:
                self._in_heading, self._prefix = True, "#" * int(tag[1]) + " "
            elif tag == "li":
                self._prefix = "- "

    def handle_endtag(self, tag: str) -> None:
        if self.inside is not None:
            self._depth -= tag == self.inside
            if not self._depth:
                self.inside = None
            return
        if tag == "title":
            self._in_title = False
        elif tag == "pre":
            self._end_code()
        elif self._code is None:
            if tag in self.HEADINGS:
                self._in_heading = False
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self.inside is not None:
            return
        if self._in_title:
            self.title.append(data)
            return
        if self._code is not None:
            self._code.append(data)
            return
        words = " ".join(data.split())
        if data[:1].isspace() and not self._gap:
            self._gap = " "
        if words:
            self._write(words)
            if data[-1:].isspace():
                self._gap = " "

    def _break(self, tag: str) -> None:
        gap = "\n\n" if tag in self.PARAGRAPHS else "\n" if tag in self.LINES else ""
        if gap and self._in_heading and tag in ("br", "div"):
            gap = " "
        if gap == "\n\n":
            self._in_heading, self._prefix = False, ""
        if len(gap) >= len(self._gap.strip(" |")) and gap:
            self._gap = gap

    def _write(self, text: str) -> None:
        if self._out:
            self._out.append(self._gap)
        self._out += [self._prefix, text]
        self._gap = self._prefix = ""

    def _end_code(self) -> None:
        code, self._code = "".join(self._code or ()).strip("\n"), None
        if code.strip():
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", code)), default=0))
            self._gap = "\n\n"
            self._write(f"{fence}\n{code}\n{fence}")
        self._gap = "\n\n"

    def text(self) -> str:
        """All that was seen."""
        self._end_code()
        return "".join(self._out)


def _hidden(attributes: list[tuple[str, str | None]]) -> bool:
    return any(
        name == "hidden" or (name == "style" and re.search(r"display\s*:\s*none", value or "", re.IGNORECASE))
        for name, value in attributes
    )
