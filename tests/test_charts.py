"""Line charts: axes, scales and the elements of a picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from cute_sparse_mla.charts import Axis, Line, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_linear_axes_enclose_their_values() -> None:
    axis = Axis("x").fitted([0.3, 7.9])
    assert axis.ticks == [0, 2, 4, 6, 8] and (axis.low, axis.high) == (0, 8)
    assert axis.place(4) == pytest.approx(0.5)
    assert Axis("x", low=0).fitted([900, 1430]).ticks[0] == 0
    assert Axis("x").fitted([5.0, 5.0]).place(5.0) >= 0


def test_logarithmic_axes() -> None:
    axis = Axis("x", log=True).fitted([1.6, 34])
    assert axis.ticks == pytest.approx([1, 2, 5, 10, 20, 50])
    assert axis.place(1) == 0 and axis.place(50) == pytest.approx(1)
    assert Axis("x", log=True).fitted([1e-4, 1e3]).ticks == pytest.approx([10.0**n for n in range(-4, 4)])
    powers = Axis("x", log=True, ticks=(4096, 8192)).fitted([4096, 8192])
    assert powers.place(4096) == 0 and powers.place(8192) == 1


def test_pictures_hold_every_line_once() -> None:
    lines = [Line([(1, 2), (3, 4)], "a & b", dots=True), Line([(1, 1), (2, 5), (3, 3)], dashed=True), Line([], "none")]
    panels = ("first", lines, Axis("x"), Axis("y"))
    root = ElementTree.fromstring(picture(panels, panels, ("empty", [], Axis("x"), Axis("y", log=True))))
    assert root.attrib["viewBox"] == "0 0 1520 800"
    assert len(root.findall(f"{SVG}g")) == 3
    points = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(p) for p in points] == [2, 3, 2, 3]
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert words.count("a & b") == 2 and "none" not in words and "nothing measured" in words


def test_points_stand_where_their_axes_say() -> None:
    root = ElementTree.fromstring(picture(("p", [Line([(0, 0), (10, 100)])], Axis("x", low=0), Axis("y", low=0))))
    (line,) = root.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in line.attrib["points"].split())
    assert x0 < x1 and y0 > y1
