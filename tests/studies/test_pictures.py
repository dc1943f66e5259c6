from __future__ import annotations

from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot

from penstock.studies.pictures import draw_search
from tests.studies.toys import SPACE, search, trained

WIDE = {**SPACE, "algo.clip": "choice(0.1, 0.2, [1,2])", "algo.epochs": "int(1, 4)", "algo.n": "logint(1, 3000)"}


@pytest.mark.parametrize(
    "scheduler", ["none", "pbt", *(pytest.param(x, marks=pytest.mark.slow) for x in ("asha", "median"))]
)
def test_three_pictures_of_a_search(scheduler: str, tmp_path: Path) -> None:
    found = search(space=WIDE, scheduler=scheduler, trials=9, mode="min", metric="$cost$")
    trained(found)
    before = dict(matplotlib.rcParams), pyplot.get_fignums()
    drawn = draw_search(tmp_path / "plots", found)
    assert (dict(matplotlib.rcParams), pyplot.get_fignums()) == before
    assert [path.name for path in drawn] == ["history.png", "coordinates.png", "importances.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_pictures_for_which_there_is_no_data_are_left_out(tmp_path: Path) -> None:
    found = search(trials=9)
    assert draw_search(tmp_path, found) == ()
    trial = found.ask()
    assert trial is not None
    found.tell(trial, 1.0)
    assert [path.name for path in draw_search(tmp_path, found)] == ["history.png"]
    trained(found, lambda values, goal: 1.0)
    # Equal scores have no importances, and of one setting there is nothing to compare.
    assert [path.name for path in draw_search(tmp_path, found)] == ["history.png", "coordinates.png"]


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path) -> None:
    found = search(trials=3)
    trained(found)
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="cannot draw"):
        assert draw_search(tmp_path / "file", found) == ()
