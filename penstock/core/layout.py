"""How rows are laid out for a forward, so that a row's bits do not depend on how many rows lie beside it."""

from __future__ import annotations

ROW_MULTIPLE = 4


def padded_rows(rows: int) -> int:
    """The number of rows an acting forward runs with: the next multiple of 4.

    Matrix products on CPU round differently for 1, 2 and 3 rows than for 4 and more, and a layer with one output
    differs at 5, 6 and 7 as well; at multiples of 4 every row comes out the same, given the mode of the library that
    `penstock/__init__.py` asks for (`penstock doctor` measures it).
    """
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE
