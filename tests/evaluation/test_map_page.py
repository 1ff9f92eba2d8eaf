"""The page with a map of texts."""

from __future__ import annotations

import re

from bertie.evaluation.intervals import Score
from bertie.evaluation.map_page import ClusterRow, MapPoint, map_page


def test_the_page_has_every_point_and_nothing_from_elsewhere() -> None:
    points = [MapPoint(1, 0, 0, 0, "a <b>text</b>"), MapPoint(2, 1, 1, 1, "two"), MapPoint(5, 0.5, 0.2, 0, "three")]
    clusters = [ClusterRow("cats, milk", 40, ["one"]), ClusterRow("shares", 20, ["two"])]
    page = map_page("Clusters of x.csv", points, clusters, Score(0.4, 0.3, 0.5))
    assert len(re.findall("<circle", page)) == 3
    assert "<b>text" not in page
    assert "a &lt;b&gt;text&lt;/b&gt;" in page
    assert "66.7%" in page
    assert "95% interval 0.300 to 0.500" in page
    assert not re.search(r"""(src|href)=["'](?!#)|url\(|https?://""", page)
    corner = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', page)
    assert corner[0] == ("24.0", "696.0")
    assert corner[1] == ("696.0", "24.0")


def test_one_cluster() -> None:
    page = map_page("x", [MapPoint(1, 0, 0, 0, "a")], [ClusterRow("a", 1, [])], Score(*[float("nan")] * 3))
    assert "not defined for one cluster" in page
