"""Files below a folder, and symbolic links on the way."""

from __future__ import annotations

from pathlib import Path

from bertie.data.folders import LINK, list_files


def test_order_links_and_loops(tmp_path: Path) -> None:
    for name in ("top/b.txt", "top/a/z.txt", "top/a.txt", "top/.hidden/x.txt", "top/.y.txt", "outside/secret.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    top = tmp_path / "top"
    (top / "a/loop").symlink_to(top)
    (top / "out").symlink_to(tmp_path / "outside")
    (top / "lost.txt").symlink_to(tmp_path / "nowhere")
    skipped: dict[str, str] = {}

    def names(folder: Path, follow: bool) -> list[str]:
        found = list_files(folder, follow_symlinks=follow, on_skip=skipped.__setitem__)
        return [path.relative_to(folder).as_posix() for path in found]

    assert names(top, False) == ["a/z.txt", "a.txt", "b.txt"]
    assert skipped == {str(top / name): LINK for name in ("a/loop", "out", "lost.txt")}
    assert names(top, True) == ["a/z.txt", "a.txt", "b.txt", "out/secret.txt"]
    (tmp_path / "given").symlink_to(top)
    assert names(tmp_path / "given", False) == ["a/z.txt", "a.txt", "b.txt"]
