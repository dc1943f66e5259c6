from penstock.core.layout import padded_rows


def test_rows_are_padded_to_the_next_multiple_of_four():
    assert [padded_rows(n) for n in (0, 1, 2, 3, 4, 5, 7, 8, 9, 1000, 1001)] == [0, 4, 4, 4, 4, 8, 8, 8, 12, 1000, 1004]
