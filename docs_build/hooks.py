"""MkDocs hooks: pages from outside docs/, notebooks, generated reference pages, charts and links."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from docs_build import charts, links, member_order, notebooks  # noqa: E402
from docs_build.absent_packages import absent_packages  # noqa: E402

EMPTY_HEAD = re.compile(r"<thead>\s*<tr>\s*(?:<th[^>]*>\s*</th>\s*)+</tr>\s*</thead>")
GENERATED = re.compile(r"<!-- generated: (\w+) -->\n(?:.*?<!-- end -->)?", re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Headings have GitHub's anchors; notebooks in the navigation are pages."""
    sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # MkDocs resets the path after it has imported this file
    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda text, separator: links.slug(text)
    config.nav = _pages_of_notebooks(config.nav)
    member_order.use()
    return config


def _pages_of_notebooks(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {name: _pages_of_notebooks(value) for name, value in nav.items()}
    if isinstance(nav, list):
        return [_pages_of_notebooks(item) for item in nav]
    return re.sub(r"\.ipynb$", ".md", nav) if isinstance(nav, str) else nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages for files outside docs/ and for notebooks."""
    for path, page in links.OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(links.ROOT / path)))
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        assert file.abs_src_path is not None
        content = notebooks.render(notebooks.read(Path(file.abs_src_path)), Path(file.src_uri).name)
        files.append(File.generated(config, re.sub(r"\.ipynb$", ".md", file.src_uri), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Generate what a page asks for, and translate its links."""

    def download(path: str) -> None:
        """Put another file of the repository, that a page links to, into the site."""
        uri = links.site_path(path)
        if path.endswith(".md") or not (links.ROOT / path).is_file():
            return  # a page, or a dead link, which MkDocs reports
        if files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(links.ROOT / path)))

    uri = page.file.src_uri
    notebook = uri.endswith(".md") and (links.DOCS / uri).with_suffix(".ipynb").exists()
    source = next((path for path, target in links.OUTSIDE.items() if target == uri), f"docs/{uri}")
    with absent_packages():
        markdown = GENERATED.sub(lambda match: _generators()[match[1]](), markdown)
    markdown = charts.draw_all(markdown)
    if notebook:
        own = f"]({Path(uri).stem}.ipynb)"
        return links.translate(markdown.replace(own, "](\0)"), source, download).replace("](\0)", own)
    return links.translate(markdown, source, download)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Remove the heads of tables that have none: they are lists of terms."""
    return EMPTY_HEAD.sub("", html)


def _generators() -> dict[str, Callable[[], str]]:
    from docs_build import cli_reference, http_reference, python_reference, recipe_reference

    return {
        "cli": cli_reference.render,
        "http": http_reference.render,
        "recipe": recipe_reference.render,
        **python_reference.generators(),
    }
