"""The playground in a real Chromium, on a real server with the built-in model: every view, errors, accessibility."""

from __future__ import annotations

import ast
import io
import json
import re
import shlex
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertie.checkpoints import hub
from bertie.checkpoints.checkpoint import Checkpoint
from bertie.tasks import Classifier, Embedder, MaskedLM, Reader, Reranker, Tagger, ZeroShot
from bertie.tasks.text_map import map_texts

sync_api = pytest.importorskip("playwright.sync_api", reason="the page tests need playwright: pip install playwright")
httpx = pytest.importorskip("httpx")
expect = sync_api.expect

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
INSTALLED = [str(path) for path in Path.home().glob(".cache/ms-playwright/chromium-*/chrome-linux*/chrome")]
CHROMIUM = next(filter(None, [*map(shutil.which, BROWSERS), *INSTALLED]), None)
NO_CHROMIUM = "the page tests need Chromium: python -m playwright install --with-deps chromium"
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM),
    pytest.mark.skipif(hub.DEFAULT not in hub.built_in(), reason="there is no built-in model in this installation"),
]

AXE = Path(__file__).parent / "axe" / "axe.min.js"
VIEWS = ("fill", "tokens", "attention", "tag", "answer", "classify", "similarity", "map", "rerank", "search")
TIMEOUT = 60_000  # milliseconds; the machine may be busy
MAX_LENGTH = 96  # so that a page of text needs several windows
LONG = " ".join(f"In the year {1800 + i} nothing of note took place in the village by the lake." for i in range(40))
NEEDLE = "The secret password of the club was Albatross."
HAYSTACK = LONG[:1510] + NEEDLE + " " + LONG[1510:]
TRICKY = 'It\'s "naïve" 😀 of $HOME, `Paris` is the [MASK] of France\\.'


# --- the server and the browser ---


class Served:
    """The server in a thread of this process."""

    def __init__(
        self, index: Path | None = None, max_length: int | None = MAX_LENGTH, models: Sequence[str] = (hub.DEFAULT,)
    ) -> None:
        from bertie.search.index import Index
        from bertie.serve.http import App, ServerSettings
        from bertie.serve.logs import Log
        from bertie.serve.registry import Registry
        from bertie.serve.workers import Server, bind_socket

        # Nothing is refused, however slow the machine.
        registry = Registry(models, budget=2048, max_wait=60)
        self.checkpoint = registry[hub.DEFAULT].checkpoint
        self.checkpoint.limit = max_length
        opened = None if index is None else (Index.open(index, Embedder(self.checkpoint)), hub.DEFAULT)
        bound = bind_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        made = App(registry, ServerSettings(deadline=300), index=opened, log=Log(io.StringIO()))
        ready = threading.Event()
        self.server = Server(made, grace=0.0, shutdown_seconds=5.0, on_ready=ready.set)
        self.thread = threading.Thread(target=self.server.run, args=([bound],), daemon=True)
        self.thread.start()
        assert ready.wait(60)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join(30)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


@pytest.fixture(scope="module")
def checkpoint(served: Served) -> Checkpoint:
    return served.checkpoint


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


Open = Callable[..., Any]


@pytest.fixture
def visit(browser: Any, served: Served) -> Iterator[Open]:
    """Open a view. Errors in the console and requests to other servers fail the test."""
    contexts: list[Any] = []
    bad: list[str] = []

    def visiting(
        view: str,
        url: str = served.url,
        wait: bool = True,
        quiet: tuple[str, ...] = (),
        before: Any = None,
        fragment: str | None = None,
        **options: Any,
    ) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(TIMEOUT)
        context.add_init_script(path=AXE)
        page = context.new_page()

        def heard(message: Any) -> None:
            if message.type in ("error", "warning") and not any(one in message.text for one in quiet):
                bad.append(message.text)

        page.on("console", heard)
        page.on("pageerror", lambda error: bad.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith((url, "data:")) else bad.append(one.url))
        if before is not None:
            before(page)
        page.goto(f"{url}/#/{fragment or view}")
        if wait and view != "search":
            wait_until_settled(page, view)
        return page

    expect.set_options(timeout=TIMEOUT)
    yield visiting
    for context in contexts:
        context.close()
    assert bad == []


def wait_until_settled(page: Any, view: str) -> None:
    expect(page.locator(f"#view-{view} .read").first).to_contain_text(" in ")
    expect(page.locator(f"#view-{view}[aria-busy]")).to_have_count(0)


def bars(page: Any, where: str) -> list[tuple[str, str]]:
    return [
        (one.locator(".name").inner_text(), one.locator(".score").inner_text())
        for one in page.locator(f"{where} > li").all()
    ]


def percent(x: float) -> str:
    return ">99.9%" if 0.9995 <= x < 1 else f"{100 * x:.1f}%"


def read(one: Any) -> str:
    return f"Read {one.tokens_read:,} of {one.tokens_total:,} tokens in {one.windows} window"


# --- the views ---


def test_fill_as_you_type(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("fill")
    text = "Paris is the [MASK] of France."
    page.fill("#fill-text", text)  # without pressing a button
    expect(page.locator("#view-fill .masks h3")).to_have_count(1)
    (found,) = MaskedLM(checkpoint).fill([text])
    said = [(one.text, percent(one.score)) for one in found.masks[0].candidates]
    assert bars(page, "#view-fill .masks .bars") == said
    assert said[0][0] == "capital"
    expect(page.locator("#announcement")).to_have_text(f"Predictions: capital {said[0][1]}")  # for screen readers
    expect(page.locator("#view-fill .read")).to_contain_text(read(found))

    page.fill("#fill-text", "Paris 🦄 is the [MASK] of France.")
    expect(page.locator("#view-fill .read")).to_contain_text("1 not covered by the vocabulary")
    page.fill("#fill-text", "Paris is the capital of ")
    expect(page.locator("#view-fill .error")).to_have_text("The text needs at least one [MASK] token.")
    page.press("#fill-text", "End")
    page.click("#fill-mask")
    wait_until_settled(page, "fill")
    expect(page.locator("#view-fill .error")).to_be_hidden()
    expect(page.locator("#fill-text")).to_have_value("Paris is the capital of [MASK]")
    page.select_option("#fill-form [name=top]", "10")
    expect(page.locator("#view-fill .masks .bars > li")).to_have_count(10)


def test_attention_of_layers_and_heads(visit: Open, checkpoint: Checkpoint) -> None:
    from bertie.serve.attention import attention

    page = visit("attention", quiet=("getImageData", "status of 422"))
    text = page.input_value("#attention-text")
    found = attention(checkpoint, text)
    tokens = [one.text for one in found.tokens]
    assert page.locator("#view-attention .tokens button").all_inner_texts() == tokens
    assert tokens[5] == "bank"

    def check(found: Any, chosen: int) -> None:
        for side, table in (("bidirectional", found.weights), ("causal", found.causal)):
            row = sorted(
                ((w, i) for i, w in enumerate(table[chosen]) if w >= 0.0005), key=lambda one: (-one[0], one[1])
            )
            shown = [(tokens[i], percent(w)) for w, i in row[:5]]
            expect(page.locator(f"#view-attention .{side}-list > li").first.locator(".score")).to_have_text(shown[0][1])
            assert bars(page, f"#view-attention .{side}-list") == shown
            assert side == "bidirectional" or all(i <= chosen for _, i in row)

    check(found, 5)
    assert page.locator("#view-attention .bidirectional svg line.strong").count() > 5
    page.select_option("#attention-layer", label="2")
    page.select_option("#attention-head", label="3")
    expect(page.locator("#request-curl")).to_contain_text('"layer":2,"head":3')
    wait_until_settled(page, "attention")
    page.locator("#view-attention .tokens button", has_text="river").focus()
    page.keyboard.press("Enter")
    check(attention(checkpoint, text, layer=2, head=3), tokens.index("river"))
    expect(page.locator("#view-attention .tokens button[aria-pressed=true]")).to_have_text("river")

    page.check("input[value=heatmap]")
    # The upper triangle of the causal map is background, the lower triangle is not.
    painted = """([id, n]) => {
        const canvas = document.querySelector(id + " canvas"), draw = canvas.getContext("2d");
        const scale = canvas.width / parseFloat(canvas.style.inlineSize), side = 84 * scale;
        const cell = (canvas.width - side - 4 * scale) / n;
        const place = (i) => side + (i + 0.4) * cell;
        const at = (i, j) => draw.getImageData(place(j), place(i), 1, 1).data.join();
        return [at(2, n - 2), at(3, n - 2), at(0, 0), at(n - 3, 2)];
    }"""
    first, second, *seen = page.evaluate(painted, ["#view-attention .causal", len(tokens)])
    assert first == second
    assert first not in seen
    first, second, *_ = page.evaluate(painted, ["#view-attention .bidirectional", len(tokens)])
    assert first != second

    page.fill("#attention-text", "word " * 200)
    expect(page.locator("#view-attention .error")).to_contain_text("attention is shown for at most 96; shorten it")


def test_labelled_spans_in_the_text(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("tag")
    text = "😀😀 Ada Lovelace met Angela Merkel in London. " + LONG  # two UTF-16 code units each, and two windows
    page.fill("#tag-text", text)
    (found,) = Tagger(checkpoint).tag([text])
    assert found.windows > 1
    expect(page.locator("#view-tag .read")).to_contain_text(read(found))
    marks = page.locator("#view-tag .marked mark").all()
    said = [
        (one.inner_text().removesuffix(one.locator(".label").inner_text()), one.locator(".label").inner_text())
        for one in marks
    ]
    assert said == [(span.text, span.label) for span in found.spans]
    assert ("Ada Lovelace", "PER") in said
    assert ("London", "LOC") in said
    people = sum(span.label == "PER" for span in found.spans)
    expect(page.locator("#view-tag .legend")).to_contain_text(f"PER {people}")
    assert (
        page.locator("#view-tag .marked").evaluate(
            "(one) => [...one.childNodes].map((n) => n.nodeName === 'MARK' ? n.firstChild.data : n.data).join('')"
        )
        == text
    )


def test_answers_and_the_window_map(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("answer")
    expect(page.locator("#view-answer .verdict")).to_contain_text("Reform Club")
    expect(page.locator("#view-answer .answer-span")).to_contain_text("Reform Club")
    question = "What was the secret password of the club?"
    page.fill("#answer-question", question)
    page.fill("#answer-context", HAYSTACK)
    page.press("#answer-question", "Enter")
    (found,) = Reader(checkpoint).answer([(question, HAYSTACK)], top_k=3)
    expect(page.locator("#view-answer .read")).to_contain_text(read(found))
    assert "Albatross" in found.best.text
    expect(page.locator("#view-answer .verdict")).to_have_text(found.best.text)
    expect(page.locator("#view-answer .answer-span")).to_have_text(found.best.text)
    assert found.windows > 3
    expect(page.locator("#view-answer .map .reads")).to_have_count(found.windows)
    boxes = [
        tuple(float(one.get_attribute(name) or "") for name in ("x", "width"))
        for one in page.locator("#view-answer .map .owns").all()
    ]
    x = 600 * (found.best.start or 0) / len(HAYSTACK)
    holding = next(i for i, (start, width) in enumerate(boxes) if start <= x < start + width)
    expect(page.locator("#view-answer .map")).to_contain_text(f"The answer comes from window {holding + 1}.")
    assert abs(float(page.locator("#view-answer .map .answer").get_attribute("x") or "") + 1.5 - x) < 0.01
    box = page.locator("#view-answer .excerpt").bounding_box()
    span = page.locator("#view-answer .answer-span").bounding_box()
    assert box["y"] <= span["y"] <= box["y"] + box["height"]  # scrolled to

    page.get_by_role("button", name="Three chapters of a novel").click()
    expect(page.locator("#answer-context")).to_have_value(re.compile("^Chapter I"))


def test_similarity_by_two_poolings(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("similarity")
    texts = page.input_value("#similarity-texts").split("\n")
    for pooling in ("cls", "mean"):
        vectors = Embedder(checkpoint, pooling=pooling).embed(texts)
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        rows = page.locator(f"#view-similarity .{pooling} tbody tr").all()
        shown = np.array([[float(cell) for cell in row.locator("td").all_inner_texts()] for row in rows])
        np.testing.assert_allclose(shown, vectors @ vectors.T, atol=0.0051)
        assert [row.locator("th").get_attribute("title") for row in rows] == texts
    page.fill("#similarity-texts", "only one")
    expect(page.locator("#view-similarity .error")).to_have_text("Enter 2 to 24 sentences, one per line; there are 1.")


def test_search_without_and_with_an_index(visit: Open, checkpoint: Checkpoint, tmp_path: Path) -> None:
    from bertie.search.index import Index

    page = visit("search")
    expect(page.locator("#search-none")).to_contain_text("No index is loaded.")
    expect(page.locator("#search-form")).to_be_hidden()
    with Index.create(tmp_path / "index", Embedder(checkpoint)) as index:
        index.add(["Cats eat meat and fish.", "Bread is baked in an oven.", "Ships sail across the sea."])
    server = Served(tmp_path / "index")
    try:
        page = visit("search", server.url)
        expect(page.locator("#search-none")).to_be_hidden()
        page.fill("#search-query", "what do cats eat")
        page.press("#search-query", "Enter")
        wait_until_settled(page, "search")
        expect(page.locator("#view-search .summary")).to_have_text("The best 3 of 3 passages of index")
        best = page.locator("#view-search .hits > li").first
        expect(best.locator(".text")).to_have_text("Cats eat meat and fish.")
        assert {one.lower() for one in best.locator("mark").all_inner_texts()} == {"cats", "eat"}
        page.select_option("#search-form [name=mode]", "lexical")
        expect(page.locator("#view-search .summary")).to_have_text("The best 1 of 3 passages of index")
        page.context.close()
    finally:
        server.close()


def test_classification_and_abstention(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("classify")
    text = "A joy from the first minute to the last."  # a text of the user stays when the labels change
    page.fill("#classify-text", text)
    expect(page.locator("#view-classify .attributed")).to_have_text(text)
    wait_until_settled(page, "classify")

    def shown(scores: dict[str, float]) -> None:
        best = sorted(scores.items(), key=lambda one: -one[1])
        expect(page.locator("#view-classify .bars > li").first.locator(".score")).to_have_text(percent(best[0][1]))
        assert bars(page, "#view-classify .bars") == [(label, percent(score)) for label, score in best]

    classifier = Classifier(checkpoint)
    (found,) = classifier.classify([text])
    shown(found.scores)
    expect(page.locator("#view-classify .verdict")).to_have_text(f"positive {percent(found.score)}")
    expect(page.locator("#view-classify .calibration")).to_contain_text(
        f"temperature of {classifier.info.calibration.temperature:.2f}"
    )
    page.locator("#classify-threshold").focus()
    page.keyboard.press("End")
    expect(page.locator("#classify-threshold-value")).to_have_text("100%")
    expect(page.locator("#view-classify .verdict")).to_have_text(
        f"Abstain the best label, positive, has only {percent(found.score)}"
    )

    page.select_option("#classify-head", "nli")
    pair = (text, page.input_value("#classify-pair"))
    shown(Classifier(checkpoint, head="nli").classify([pair])[0].scores)

    page.check("input[value=zero-shot]")
    expect(page.locator("#classify-pair")).to_be_hidden()
    page.fill("#classify-labels", "sport, politics")
    expect(page.locator("#classify-text")).to_have_value(text)
    shown(ZeroShot(checkpoint).classify([text], ["sport", "politics"])[0].scores)
    page.check("#classify-multi")
    shown(ZeroShot(checkpoint).classify([text], ["sport", "politics"], multi_label=True)[0].scores)


def test_predictions_for_every_token(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("tokens")
    text = page.input_value("#tokens-text")
    found = MaskedLM(checkpoint).predict_tokens(text)
    buttons = page.locator("#view-tokens .predicted button")
    assert buttons.all_inner_texts() == [token.text for token in found.tokens]
    least = min(found.tokens, key=lambda token: token.log_likelihood)
    expect(page.locator("#view-tokens .predicted button[aria-pressed=true]")).to_have_text(least.text)
    buttons.first.click()
    shown = [(one.text.strip(), percent(one.score)) for one in found.tokens[0].candidates]
    assert bars(page, "#view-tokens .bars") == shown
    expect(page.locator("#view-tokens .summary")).to_contain_text(f"Pseudo-log-likelihood {found.log_likelihood:.2f}")


def test_candidates_are_put_into_the_text(visit: Open) -> None:
    page = visit("fill")
    page.fill("#fill-text", "Paris is the [MASK] of France. Rome is the [MASK] of Italy.")
    expect(page.locator("#view-fill .masks h3")).to_have_count(2)
    expect(page.locator("#fill-undo")).to_be_hidden()
    page.locator("#view-fill .bars").first.get_by_role("button", name="capital").click()
    expect(page.locator("#fill-text")).to_have_value("Paris is the capital of France. Rome is the [MASK] of Italy.")
    expect(page.locator("#view-fill .masks h3")).to_have_count(1)
    page.click("#fill-undo")
    expect(page.locator("#view-fill .masks h3")).to_have_count(2)
    page.evaluate("location.hash = '#/answer'")
    wait_until_settled(page, "answer")
    other = page.locator("#view-answer .candidates button").nth(1)
    other.click()
    expect(page.locator("#view-answer .answer-span")).to_have_text(other.inner_text())


def test_all_heads_and_the_words_that_decided(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("attention")
    page.get_by_role("button", name="Film review").click()
    expect(page.locator("#attention-text")).to_have_value(re.compile("loved"))
    config, text = checkpoint.model.config, page.input_value("#attention-text")
    expect(page.locator("#view-attention .heads-grid button")).to_have_count(config.depth * config.heads)
    expect(page.locator("#view-attention .attributed")).to_have_text(text)
    result = Classifier(checkpoint).attribute(text, max_pieces=64)
    words = page.locator("#view-attention .attributed .word")
    assert words.all_inner_texts() == [piece.text.strip() for piece in result.pieces]
    decided = max(result.pieces, key=lambda piece: piece.weight)
    assert words.nth(result.pieces.index(decided)).get_attribute("title") == f"+{percent(decided.weight)}"
    page.get_by_role("button", name="Layer 1, head 2", exact=True).click()
    expect(page.locator("#attention-layer")).to_have_value("1")
    expect(page.locator("#request-curl")).to_contain_text('"layer":1,"head":2')
    expect(page.locator("#view-attention .heads-grid [aria-pressed=true]")).to_have_count(1)


def test_documents_are_reranked(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("rerank")
    query, documents = page.input_value("#rerank-query"), page.input_value("#rerank-documents").split("\n")
    ranked = Reranker(checkpoint).rerank(query, documents)
    names = page.locator("#view-rerank .ranking .name").all_inner_texts()
    assert names == [document.text for document in ranked]
    best = page.locator("#view-rerank .ranking li").first
    expect(best.locator(".movement")).to_have_text(f"up from {ranked[0].index + 1}")


def test_the_map_of_texts(visit: Open, checkpoint: Checkpoint) -> None:
    page = visit("map")
    texts = page.input_value("#map-texts").split("\n")
    plot = page.locator("#view-map .plot")
    dots = plot.locator("circle")
    expect(dots).to_have_count(len(texts))
    found = map_texts(texts, Embedder(checkpoint))
    assert plot.locator("text").all_text_contents() == list(found.labels)
    dots.nth(3).hover()
    expect(page.locator("#view-map .hovered")).to_contain_text(texts[3])
    dot = dots.nth(3).bounding_box()
    x, y = dot["x"] + dot["width"] / 2, dot["y"] + dot["height"] / 2
    page.mouse.move(x - 15, y - 15)
    page.mouse.down()
    for dx, dy in ((15, -15), (15, 15), (-15, 15)):
        page.mouse.move(x + dx, y + dy, steps=3)
    page.mouse.up()
    expect(page.locator("#view-map .members li")).to_contain_text([texts[3]])
    assert page.locator("#view-map circle.faded").count() < len(texts)
    plot.click(position={"x": 3, "y": 3})  # ends the selection
    expect(page.locator("#view-map .members details")).to_have_count(len(found.labels))
    page.select_option("#map-form [name=clusters]", "2")
    expect(plot.locator("text")).to_have_count(2)


def test_two_models_side_by_side(visit: Open, checkpoint: Checkpoint) -> None:
    server = Served(models=[hub.DEFAULT, f"other={hub.DEFAULT}"])
    try:
        page = visit("fill", server.url, reduced_motion="reduce")
        page.select_option("#compare", "other")
        columns = page.locator("#view-fill .column")
        expect(columns).to_have_count(2)
        expect(columns.nth(1).locator(".model-name")).to_have_text("other")
        expect(columns.nth(1).locator(".bars > li")).to_have_count(5)
        wait_until_settled(page, "fill")
        assert columns.nth(0).locator(".bars").inner_text() == columns.nth(1).locator(".bars").inner_text()
        expect(page).to_have_url(re.compile("compare=other"))
        for view in ("attention", "classify", "map"):
            page.evaluate("view => { location.hash = document.querySelector(`#tabs a[href^='#/${view}']`).hash }", view)
            wait_until_settled(page, view)
            expect(page.locator(f"#view-{view} .column")).to_have_count(2)
            expect(page.locator(f"#view-{view} .read").nth(1)).to_contain_text(" in ")
        assert page.evaluate("() => axe.run().then((said) => said.violations.map((one) => one.id))") == []
        page.select_option("#compare", "")
        expect(page.locator(f"#view-{view} .column")).to_have_count(1)
        page.context.close()
    finally:
        server.close()


def test_a_link_restores_the_view(visit: Open, served: Served) -> None:
    page = visit("classify", permissions=["clipboard-read", "clipboard-write"])
    assert page.url.endswith("#/classify")
    page.check("input[value=zero-shot]")
    page.fill("#classify-text", "Stir the soup & add salt? 100%")
    page.fill("#classify-labels", "cooking, law")
    page.check("#classify-multi")
    page.locator("#classify-threshold").fill("35")
    expect(page).to_have_url(re.compile("threshold=35"))
    wait_until_settled(page, "classify")
    shown = bars(page, "#view-classify .bars")
    page.click("#copy-link")
    expect(page.locator("#announcement")).to_have_text("Copied")
    link = page.evaluate("() => navigator.clipboard.readText()")
    other = visit("classify", link.partition("/#")[0], wait=False, fragment=link.partition("#/")[2])
    wait_until_settled(other, "classify")
    expect(other.locator("#classify-text")).to_have_value("Stir the soup & add salt? 100%")
    assert bars(other, "#view-classify .bars") == shown
    expect(other.locator("#classify-threshold-value")).to_have_text("35%")
    # The state is kept when the view is left and visited again, and when the user goes back.
    other.locator("#tabs a", has_text="Fill-mask").click()
    wait_until_settled(other, "fill")
    other.get_by_role("link", name="Classification", exact=True).click()
    expect(other.locator("#classify-labels")).to_have_value("cooking, law")
    other.go_back()
    expect(other.locator("#view-fill")).to_be_visible()


def test_files_are_dropped_and_opened(visit: Open) -> None:
    page = visit("map")
    table = 'id,text\n1,"A cat, asleep"\n2,"He said ""no"""\n3,A dog\n'
    chooser = page.locator("#map-form input[type=file]")
    chooser.set_input_files({"name": "rows.csv", "mimeType": "text/csv", "buffer": table.encode()})
    expect(page.locator("#map-texts")).to_have_value('A cat, asleep\nHe said "no"\nA dog')
    expect(page.locator("#view-map circle")).to_have_count(3)
    chooser.set_input_files({"name": "image.png", "mimeType": "image/png", "buffer": b"\x89PNG\x00\xff"})
    expect(page.locator("#map-form .files")).to_contain_text("image.png is not a UTF-8 text file.")
    page.evaluate("location.hash = '#/tag'")
    wait_until_settled(page, "tag")
    drop = """(box) => {
        const data = new DataTransfer();
        data.items.add(new File(["Ada Lovelace lived in London."], "ada.txt", { type: "text/plain" }));
        box.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
    }"""
    page.locator("#tag-text").evaluate(drop)
    expect(page.locator("#view-tag .marked mark")).to_have_count(2)
    expect(page.locator("#tag-form .files")).to_contain_text("ada.txt")


# --- the request, as curl and as Python ---


def evaluated(code: str) -> Any:
    """Run code and return the value of its last line."""
    tree = ast.parse(code)
    last = tree.body.pop()
    assert isinstance(last, ast.Expr)
    names: dict[str, Any] = {}
    exec(compile(tree, "shown", "exec"), names)
    return eval(compile(ast.Expression(last.value), "shown", "eval"), names)


def test_the_displayed_requests_work(visit: Open) -> None:
    page = visit("fill")
    for view in VIEWS[:-1]:
        page.goto(f"{page.url.partition('#')[0]}#/{view}")
        wait_until_settled(page, view)
        check_displayed_requests(page, view)


def check_displayed_requests(page: Any, view: str) -> None:
    """The commands of a view, run as they are displayed, have the same results."""
    if view in ("fill", "tag", "classify"):
        page.fill(f"#{view}-text", TRICKY)
        expect(page.locator("#request-curl")).to_contain_text("$HOME")
        wait_until_settled(page, view)
    program, url, *rest = shlex.split(page.locator("#request-curl").text_content().replace("\\\n", " "))
    assert program == "curl"
    assert rest[:3] == ["-H", "Content-Type: application/json", "-d"]
    by_curl = httpx.post(url, content=rest[3].encode(), headers={"Content-Type": "application/json"}, timeout=60)
    assert by_curl.status_code == 200, by_curl.text
    if view in ("fill", "tag", "classify"):
        assert json.loads(rest[3])["texts"] == [TRICKY]
    by_python = evaluated(page.locator("#request-python").text_content())
    if isinstance(by_python, dict):
        assert by_python.keys() == by_curl.json().keys()
        return
    if view == "rerank":
        assert [one.index for one in by_python] == [one["index"] for one in by_curl.json()]
        return
    (one,), (other,) = by_python, by_curl.json()["results"]
    scored = {
        "fill": lambda x: [c["score"] for c in x["masks"][0]["candidates"]],
        "tag": lambda x: [s["score"] for s in x["spans"]],
        "answer": lambda x: [a["score"] for a in x["answers"]],
        "classify": lambda x: list(x["scores"].values()),
    }[view]
    np.testing.assert_allclose(scored(asdict(one)), scored(other), atol=1e-4)


def test_the_request_can_be_copied(visit: Open) -> None:
    page = visit("fill", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy the Python code").click()
    expect(page.locator("#announcement")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == page.locator("#request-python").text_content()


# --- errors ---


def answering(page: Any, path: str, *replies: dict[str, Any]) -> list[Any]:
    """Mock an endpoint: one response after the other, the last one repeated."""
    asked: list[Any] = []

    def reply(route: Any) -> None:
        asked.append(route.request)
        route.fulfill(**replies[min(len(asked), len(replies)) - 1])

    page.route(f"**/{path}", reply)
    return asked


def test_error_messages(visit: Open) -> None:
    page = visit("tag", quiet=("status of 429", "status of 500", "ERR_FAILED"))
    problem = page.locator("#view-tag .error")
    answering(
        page, "tag", {"status": 429, "headers": {"Retry-After": "7"}, "json": {"error": "full", "error_type": "x"}}
    )
    page.fill("#tag-text", "one")
    expect(problem).to_have_text("The server is overloaded; try again in 7 seconds. full")
    page.unroute("**/tag")
    answering(page, "tag", {"status": 500, "body": "<h1>oh</h1>"})
    page.fill("#tag-text", "two")
    expect(problem).to_have_text("The server answered with status 500 and no message.")
    page.unroute("**/tag")
    page.route("**/tag", lambda route: route.abort())
    page.fill("#tag-text", "three")
    expect(problem).to_have_text("The server cannot be reached. Is it still running?")
    page.unroute("**/tag")
    page.fill("#tag-text", "Ada Lovelace")
    expect(page.locator("#view-tag .marked mark")).to_have_count(1)
    expect(problem).to_be_hidden()


def test_an_api_key_is_requested_and_sent(visit: Open) -> None:
    def locked(page: Any) -> None:
        def check(route: Any) -> None:
            if route.request.headers.get("authorization") == "Bearer open sesame":
                route.continue_()
            else:
                route.fulfill(status=401, json={"error": "a key is needed", "error_type": "Unauthorized"})

        page.route("**/about", check)

    page = visit("fill", wait=False, before=locked, quiet=("status of 401",))
    expect(page.locator("#model-summary")).to_have_text("This server requires an API key.")
    expect(page.locator("#key-error")).to_be_hidden()
    expect(page.locator("#key")).to_be_focused()
    page.fill("#key", "open the door")
    page.press("#key", "Enter")
    expect(page.locator("#key-error")).to_contain_text("The server does not accept this API key.")
    page.fill("#key", "open sesame")
    page.press("#key", "Enter")
    wait_until_settled(page, "fill")
    expect(page.locator("#key-form")).to_be_hidden()
    expect(page.locator("#request-curl")).to_contain_text("$BERTIE_KEY")
    assert "sesame" not in page.content()


def test_a_model_can_be_selected(visit: Open, served: Served) -> None:
    about = httpx.get(f"{served.url}/about").json()
    other = about["models"][0] | {"name": "other", "layers": 2, "tasks": {}}
    about["models"].append(other)
    page = visit("fill", before=lambda page: answering(page, "about", {"json": about}))
    expect(page.locator("#request-curl")).to_contain_text('"model":"bertie-small"')
    expect(page.locator("#request-python")).to_contain_text(', model="bertie-small")')
    page.select_option("#compare", "other")  # the model that can answers, and the other one says why not
    error = page.locator("#view-fill .column").nth(1).locator(".output .error")
    expect(error).to_have_text("other has no head for masked-language modelling.")
    expect(page.locator("#view-fill .column").nth(0).locator(".bars > li")).to_have_count(5)
    expect(page.locator("#view-fill > .result > .error")).to_be_hidden()
    page.select_option("#model", "other")
    expect(page.locator("#model-summary")).to_contain_text("other: 23 million parameters, 2 layers")
    expect(page.locator("#view-fill > .result > .error")).to_have_text(
        "other has no head for masked-language modelling."
    )
    expect(page.locator("#attention-layer option")).to_have_count(2)


def test_the_threshold_fitted_for_a_head(visit: Open, served: Served) -> None:
    about = httpx.get(f"{served.url}/about").json()
    (head,) = (one for one in about["models"][0]["tasks"]["classify"] if one["head"] == "sentiment")
    head |= {"abstain_below": 0.9567, "precision": 0.9}
    page = visit("classify", before=lambda page: answering(page, "about", {"json": about}))
    expect(page.locator("#classify-threshold-value")).to_have_text("95.7%")
    expect(page.locator("#classify-threshold-note")).to_have_text(
        "The threshold fitted for this head, for a precision of 90.0%."
    )
    expect(page.locator("#view-classify .verdict")).to_contain_text("Abstain")


def test_only_the_latest_response_is_shown(visit: Open) -> None:
    page = visit("tag")
    waiting: list[Any] = []

    def slow(route: Any) -> None:
        if "slow" in (route.request.post_data or ""):
            waiting.append(route)
        else:
            route.continue_()

    page.route("**/tag", slow)
    page.fill("#tag-text", "slow: Berlin and Paris and Rome")
    expect(page.locator("#view-tag[aria-busy]")).to_have_count(1)
    while not waiting:
        page.wait_for_timeout(20)
    page.fill("#tag-text", "quick: Angela Merkel")
    expect(page.locator("#view-tag .marked")).to_contain_text("quick")
    wait_until_settled(page, "tag")
    assert page.locator("#view-tag .marked").inner_text().startswith("quick")
    for route in waiting:
        route.abort()


def test_a_slow_request_dims_old_results_and_can_be_cancelled(visit: Open) -> None:
    page = visit("tag")
    waiting: list[Any] = []
    page.route("**/tag", lambda route: waiting.append(route))
    page.fill("#tag-text", "Berlin and Paris and Rome")
    progress = page.locator("#view-tag .progress")
    expect(progress).to_contain_text("Waiting for the server:")
    expect(page.locator("#view-tag .outputs")).to_have_css("opacity", "0.45")
    expect(page.locator("#view-tag .marked")).to_contain_text("Ada Lovelace")  # the old result
    progress.get_by_role("button", name="Cancel").click()
    expect(progress).to_be_hidden()
    expect(page.locator("#view-tag .error")).to_contain_text("Cancelled.")
    expect(page.locator("#view-tag .outputs")).to_have_css("opacity", "1")
    page.unroute("**/tag")
    page.fill("#tag-text", "Rome")
    expect(page.locator("#view-tag .marked")).to_contain_text("Rome")
    expect(page.locator("#view-tag .error")).to_be_hidden()


def test_a_very_long_text_is_shown_in_part(visit: Open) -> None:
    page = visit("tag")
    text = "Ada Lovelace lived in London. " * 20_000  # 600,000 characters
    spans = [
        {"label": label, "start": start + i * 30, "end": end + i * 30, "text": "x", "score": 0.9}
        for i in range(20_000)
        for label, start, end in (("PER", 0, 12), ("LOC", 22, 28))
    ]
    result = {"spans": spans, "tokens_total": 140_000, "tokens_read": 140_000, "windows": 99}
    answering(page, "tag", {"json": {"model": "m", "head": "ner", "results": [result]}})
    page.fill("#tag-text", text)
    expect(page.locator("#view-tag .read")).to_contain_text("Read 140,000 of 140,000 tokens in 99 windows")
    expect(page.locator("#view-tag .legend")).to_contain_text("PER 20000")
    assert page.locator("#view-tag .marked mark").count() == 20_000 // 30 * 2 + 1
    expect(page.locator("#view-tag .marked")).to_contain_text("the first 20,000 characters are shown")
    assert len(page.locator("#request-curl").text_content()) < 1000
    page.goto(page.url.replace("#/tag", "#/fill"))
    wait_until_settled(page, "fill")


# --- accessibility ---


HOSTILE = '<img src=x onerror="document.title = 1"><b>bold</b> &amp; </mark><script>document.title = 1</script>'


def test_fragments_and_labels_that_are_names_of_properties(visit: Open) -> None:
    names = ("__proto__", "constructor", "toString", "hasOwnProperty", "fill/../tag", "<b>", "%00")
    page = visit("__proto__", wait=False)
    wait_until_settled(page, "fill")
    for name in names:
        page.evaluate("name => { location.hash = '#/' + name }", name)
        expect(page.locator("#view-fill")).to_be_visible()
        expect(page.locator("#tabs a[aria-current=page]")).to_have_text("Fill-mask")
        assert page.title() == "Fill-mask · Bertie playground"
        expect(page.locator("#request")).to_be_visible()
    page.evaluate("location.hash = '#/classify'")
    wait_until_settled(page, "classify")
    page.check("input[name=labels][value=zero-shot]")
    page.fill("#classify-labels", ", ".join((*names[:4], "<i>sports</i>")))
    expect(page.locator("#view-classify .bars > li")).to_have_count(5)
    assert {name for name, _ in bars(page, "#view-classify .bars")} == {*names[:4], "<i>sports</i>"}
    assert page.locator("#view-classify .bars i, #view-classify .verdict i").count() == 0


def test_tags_in_titles_and_texts_are_shown_as_text(visit: Open, checkpoint: Checkpoint, tmp_path: Path) -> None:
    from bertie.search.index import Index

    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "<b>name<b>.md").write_text(f"# {HOSTILE}\n\nThe river Rhine {HOSTILE} flows to the sea.\n")
    with Index.create(tmp_path / "ix", Embedder(checkpoint)) as index:
        index.refresh(docs)
    indexed = Served(tmp_path / "ix")
    try:
        page = visit("search", url=indexed.url)
        page.fill("#search-query", "river Rhine")
        page.press("#search-query", "Enter")
        hit = page.locator("#view-search .hits > li").first
        expect(hit.locator("h3")).to_contain_text("<b>name<b>.md")
        expect(hit.locator("h3")).to_contain_text(HOSTILE)
        expect(page.locator("#view-search .hits")).to_contain_text(f"The river Rhine {HOSTILE}")
        assert page.locator("#view-search .hits").locator("img, b, script").count() == 0
        page.evaluate("location.hash = '#/tag'")
        wait_until_settled(page, "tag")
        page.fill("#tag-text", f"Ada Lovelace {HOSTILE} was born in London.")
        expect(page.locator("#view-tag .marked")).to_contain_text("<img src=x")
        wait_until_settled(page, "tag")
        assert page.locator("#view-tag .marked img, #view-tag .marked b, #view-tag .marked script").count() == 0
        assert "Bertie playground" in page.title()
    finally:
        indexed.close()


def test_keyboard_navigation(visit: Open) -> None:
    page = visit("fill")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.locator("#fill-form .examples button").first).to_be_focused()
    link = page.get_by_role("link", name="Token classification")
    link.focus()
    assert link.evaluate("(element) => getComputedStyle(element).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    wait_until_settled(page, "tag")
    expect(page).to_have_title("Token classification · Bertie playground")
    expect(link).to_have_attribute("aria-current", "page")
    expect(page.locator("main > section[id^=view-]:visible")).to_have_count(1)
    page.go_back()
    expect(page.locator("#view-fill")).to_be_visible()


def test_themes(visit: Open) -> None:
    page = visit("fill", color_scheme="light")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.select_option("#theme", "dark")
    dark = page.evaluate(paper)
    assert light == "rgb(250, 249, 246)"
    assert dark == "rgb(20, 22, 26)"
    page.reload()
    wait_until_settled(page, "fill")
    assert page.evaluate(paper) == dark
    assert visit("fill", color_scheme="dark").evaluate(paper) == dark


@pytest.mark.parametrize("look", ["light", "dark", "phone"])
def test_axe_finds_no_violations(visit: Open, look: str) -> None:
    options = {
        "light": {"color_scheme": "light"},
        "dark": {"color_scheme": "dark"},
        "phone": {"viewport": {"width": 360, "height": 740}, "has_touch": True},
    }[look]
    page = visit("fill", reduced_motion="reduce", **options)  # type: ignore[arg-type]
    for view in VIEWS:
        page.goto(f"{page.url.partition('#')[0]}#/{view}")
        if view != "search":
            wait_until_settled(page, view)
        states: list[Callable[[], None]] = [lambda: None]
        if view == "attention":
            states.append(lambda: page.check("input[value=heatmap]"))
        if view == "classify":
            states.append(lambda: page.check("input[value=zero-shot]"))
        for change in states:
            change()
            wait_until_settled(page, view) if view != "search" else None
            found = page.evaluate("() => axe.run().then((said) => said.violations)")
            assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found] == [], view
        wide = page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{view} is wider than the window"
