"""Extract plain text from PDF and HTML."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from html.parser import HTMLParser

from bertie.errors import InputError, MissingPackageError

# --- PDF ---


def extract_pdf(data: bytes, name: str) -> tuple[str, str | None, int]:
    """Return the text with pages separated by form feeds, the title, and the number of pages."""
    try:
        import pypdf
        from pypdf.errors import DependencyError
    except ImportError:
        raise MissingPackageError(f"{name}: PDF needs the package pypdf: pip install 'bertie[search]'") from None
    if b"%PDF-" not in data[:1024]:
        raise InputError(f"{name} is not a PDF: the %PDF header is missing")
    if b"%%EOF" not in data.rstrip(b"\0\r\n\t ")[-1024:]:  # pypdf would read the remaining pages without an error
        raise InputError(f"{name} is truncated: a PDF must end in %%EOF; download it again")
    locked = f"{name} is encrypted; save it without a password (qpdf --decrypt in.pdf out.pdf)"
    pages: list[str] = []
    with _silence("pypdf"):
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
        except Exception as error:  # pypdf raises arbitrary exceptions on corrupt files
            position = f"after page {len(pages)}" if pages else "as PDF"
            raise InputError(
                f"{name} cannot be read {position}: {str(error)[:200] or type(error).__name__}; "
                "repair it (qpdf in.pdf out.pdf) or exclude it"
            ) from None
    # Fonts without a character map yield NULs and lone surrogates.
    text = "\f".join(pages).replace("\0", "").encode("utf-8", "replace").decode("utf-8")
    if not text.strip():
        raise InputError(f"{name} contains no text on its {len(pages)} pages, only images; run OCR first (ocrmypdf)")
    clean = title.replace("\0", "").strip() if isinstance(title, str) else ""
    return text, clean.encode("utf-8", "replace").decode("utf-8") or None, len(pages)


@contextmanager
def _silence(logger: str) -> Iterator[None]:
    """Suppress the warnings of a package, which do not name the file."""
    log = logging.getLogger(logger)
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


# --- HTML ---


def extract_html(page: str, name: str) -> tuple[str, str | None]:
    """Return the visible text of a page as simple Markdown, and its title."""
    parser = _parse_html(page, name, keep_hidden=False)
    if parser.skipped not in (None, "script", "style"):  # an unclosed element would swallow the rest of the page
        parser = _parse_html(page, name, keep_hidden=True)
    return parser.text(), " ".join("".join(parser.title).split()) or None


def _parse_html(page: str, name: str, keep_hidden: bool) -> _VisibleText:
    parser = _VisibleText(keep_hidden)
    end = page.rfind(">") + 1  # there is no markup after it, and searching for some takes the parser quadratic time
    try:
        parser.feed(page[:end])
        parser.close()
    except (AssertionError, ValueError) as error:  # raised by the standard library on invalid declarations
        raise InputError(f"{name} cannot be read as HTML: {error}") from None
    parser.handle_data(unescape(page[end:]))
    return parser


class _VisibleText(HTMLParser):
    SKIPPED = frozenset("script style nav template noscript svg select button textarea iframe object".split())
    VOID = frozenset("area base br col embed hr img input link meta source track wbr".split())
    LINES = frozenset("br li tr dt dd option".split())
    PARAGRAPHS = frozenset(
        "address article aside blockquote body caption details div dl fieldset figcaption figure footer form "
        "h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section summary table ul".split()
    )
    HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")

    def __init__(self, keep_hidden: bool) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.skipped: str | None = None  # the element whose content is being skipped
        self._depth = 0  # nesting depth of elements of that name
        self._keep_hidden = keep_hidden  # skip nothing but scripts and styles
        self._out: list[str] = []
        self._gap, self._prefix = "", ""
        self._in_title = self._in_heading = False
        self._code: list[str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self.skipped is not None:
            self._depth += tag == self.skipped
            return
        if self._in_title and tag != "title":  # HTML knows no tags in a title: "The <b> element" is text
            self.title.append(self.get_starttag_text() or "")
            return
        hidden = tag in self.SKIPPED or (tag not in self.VOID and _is_hidden(attributes))
        if tag in ("script", "style") or (hidden and not self._keep_hidden):
            self.skipped, self._depth = tag, 1
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
        if self.skipped is not None:
            self._depth -= tag == self.skipped
            if not self._depth:
                self.skipped = None
            return
        if self._in_title and tag != "title":
            self.title.append(f"</{tag}>")
        elif tag == "title":
            self._in_title = False
        elif tag == "pre":
            self._end_code()
        elif self._code is None:
            if tag in self.HEADINGS:
                self._in_heading = False
            self._break(tag)

    def handle_data(self, data: str) -> None:
        if self.skipped is not None:
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
        """Return the collected text."""
        self._end_code()
        return "".join(self._out)


def _is_hidden(attributes: list[tuple[str, str | None]]) -> bool:
    return any(
        name == "hidden" or (name == "style" and re.search(r"display\s*:\s*none", value or "", re.IGNORECASE))
        for name, value in attributes
    )
