"""Looks of many curves: no two alike, a few by colour alone."""

from __future__ import annotations

import pytest

from penstock.run.plots.looks import FEW, curve_look, escaped


def test_no_two_looks_are_alike() -> None:
    looks = [curve_look(i, 84) for i in range(84)]
    assert len({look["color"] for look in looks[:21]}) == 21
    assert len({(look["color"], look["linestyle"], look["marker"]) for look in looks}) == 84
    assert {look["linestyle"] for look in looks[:21]} == {"-"}


def test_few_curves_need_no_marks_and_more_have_one_for_each_seven() -> None:
    assert [curve_look(i, 21)["marker"] for i in range(21)] == [""] * FEW + ["o"] * FEW + ["^"] * FEW


def _oklab(colour: str) -> tuple[float, float, float]:
    """Ottosson 2020, "A perceptual color space for image processing", from sRGB."""
    srgb = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    m = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * long - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * long + 0.7827717662 * m - 0.8086757660 * s,
    )


def test_colours_are_far_apart_and_far_from_the_paper() -> None:
    colours = [_oklab(curve_look(i, 21)["color"]) for i in range(21)]
    assert _oklab("#FFFFFF") == pytest.approx((1.0, 0.0, 0.0), abs=1e-4)
    for i, one in enumerate(colours):
        assert one[0] < 0.82
        for other in colours[:i]:
            assert sum((a - b) ** 2 for a, b in zip(one, other)) ** 0.5 > 0.09


def test_dollars_are_text() -> None:
    assert escaped("a$x$") == r"a\$x\$"
