"""A self-contained HTML page with a map of texts and their clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from math import isnan

from bertie.evaluation.intervals import Score
from bertie.evaluation.pages import Header, Plot, Section, Table, Tile, to_html

SIDE, MARGIN = 720, 24
MOST_NAMED = 30  # clusters whose number is drawn


@dataclass(frozen=True, slots=True)
class MapPoint:
    """A text on the map: its row from 1, place in the unit square, and cluster from 0."""

    row: int
    x: float
    y: float
    cluster: int
    text: str


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """A cluster in the table."""

    label: str
    size: int
    examples: Sequence[str]


def map_page(title: str, points: Sequence[MapPoint], clusters: Sequence[ClusterRow], silhouette: Score) -> str:
    """Render the page."""
    total = sum(cluster.size for cluster in clusters)
    tiles = [
        Tile("texts", f"{total:,}", "" if len(points) == total else f"{len(points):,} of them on the map"),
        Tile("clusters", f"{len(clusters):,}"),
        Tile(
            "silhouette", f"{silhouette.value:.3f}" if silhouette.value == silhouette.value else "–", _note(silhouette)
        ),
    ]
    rows = [
        [
            str(i),
            cluster.label,
            f"{cluster.size:,}",
            f"{cluster.size / max(total, 1):.1%}",
            " · ".join(cluster.examples),
        ]
        for i, cluster in enumerate(clusters, 1)
    ]
    texts = [[str(p.row), str(p.cluster + 1), clusters[p.cluster].label, p.text] for p in points]
    caption = "Similar texts are near each other. Hover over a point for its text; click to enlarge."
    sections = [
        Section("Map", [Plot(_scatter(points, clusters), caption)]),
        Section("Clusters", [Table(("", "label", "texts", "share", "examples"), rows, sortable=True)]),
        Section("Texts on the map", [Table(("row", "cluster", "label", "text"), texts, sortable=True, filtered=True)]),
    ]
    return to_html(title, sections, Header(tiles=tiles))


def _note(silhouette: Score) -> str:
    if isnan(silhouette.low):
        return "not defined for one cluster"
    return f"95% interval {silhouette.low:.3f} to {silhouette.high:.3f}; from −1 to 1"


def _scatter(points: Sequence[MapPoint], clusters: Sequence[ClusterRow]) -> str:
    inside = SIDE - 2 * MARGIN
    shapes = []
    places: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        x, y = MARGIN + point.x * inside, MARGIN + (1 - point.y) * inside
        places.setdefault(point.cluster, []).append((x, y))
        title = escape(f"{point.cluster + 1}. {clusters[point.cluster].label} – row {point.row}: {point.text}")
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_color(point.cluster)}" fill-opacity=".8">'
            f"<title>{title}</title></circle>"
        )
    for i, own in sorted(places.items()):
        if i < MOST_NAMED:
            x, y = sorted(x for x, _ in own)[len(own) // 2], sorted(y for _, y in own)[len(own) // 2]
            halo = "paint-order:stroke;stroke:var(--page);stroke-width:4px"
            name = escape(clusters[i].label.split(",")[0])
            shapes.append(f'<text class="mid strong" x="{x:.1f}" y="{y:.1f}" style="{halo}">{i + 1} {name}</text>')
    alt = f"map of {len(points)} texts in {len(clusters)} clusters"
    return (
        f'<svg class="zoom" role="img" aria-label="{alt}" viewBox="0 0 {SIDE} {SIDE}" style="max-width:{SIDE}px">'
        f'<rect class="frame" width="{SIDE}" height="{SIDE}"/>{"".join(shapes)}</svg>'
    )


def _color(cluster: int) -> str:
    """Hues apart by the golden angle, so that clusters of neighbouring numbers differ."""
    return f"hsl({cluster * 137.5 % 360:.0f} 65% {(48, 60, 38)[cluster // 12 % 3]}%)"
