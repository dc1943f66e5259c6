"""The page in a headless Chromium: it draws what runs say, and runs nothing that their names say."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.run.log import MetricsLog
from penstock.view import server as server_module
from penstock.view.server import ViewServer
from tests.run.plots.made import PPO_META, make_run, settings
from tests.view.served import serving, three_runs, told

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
Look = Callable[..., str]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium (Debian) runs these tests"),
]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """The page as a browser has drawn it after some seconds of its own time."""

    def dumped(server: ViewServer, route: str = "", *options: str) -> str:
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'browser'}"]
        words += ["--virtual-time-budget=5000", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", *options]
        assert CHROMIUM is not None
        done = subprocess.run(
            [CHROMIUM, *words, "--enable-logging=stderr", "--dump-dom", f"{server.url}{route}"],
            capture_output=True, text=True, timeout=90,
        )  # fmt: skip
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not said, said
        return done.stdout

    return dumped


def words(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def test_curves_with_their_names_are_drawn(tmp_path: Path, look: Look) -> None:
    with serving(three_runs(tmp_path / "runs")) as server:
        page = look(server)
    assert re.search(r'data-ready="\d+"', page) and page.count("<canvas") == 1
    text = words(page)
    assert "2 curves, 3 runs" in text and "ppo, lr=0.001 (2 seeds)" in text and "rollout/ep_rew_mean" in text
    assert "live" in text


def test_runs_of_one_seed_are_not_counted_as_seeds(tmp_path: Path, look: Look) -> None:
    runs = three_runs(tmp_path / "runs")
    make_run(runs / "b-again", 5.0, {**PPO_META, "seed": 0}, settings(0, 1e-2))
    with serving(runs) as server:
        text = words(look(server))
    assert "2 runs of 1 seed" in text and " 2 seeds " in text


def test_a_table_a_run_and_an_empty_folder(tmp_path: Path, look: Look) -> None:
    with serving(three_runs(tmp_path / "runs")) as server:
        table = words(look(server, "#/table"))
        run = next(one for one in told(server, "api/runs")["runs"] if one["name"] == "b")["id"]
        page = words(look(server, f"#/run/{run}"))
        assert "This run is gone." in words(look(server, "#/run/0"))
    assert "curve environment runs steps return evaluation wall time lr" in table and "ppo, lr=0.01" in table
    for text in ("10k of 1k steps", "rollout/ep_rew_mean", "None counted.", "algo.lr", "0.01"):
        assert text in page, text
    (tmp_path / "none").mkdir()
    with serving(tmp_path / "none") as server:
        assert "No runs yet" in words(look(server))


def test_names_of_runs_settings_and_metrics_run_nothing(tmp_path: Path, look: Look) -> None:
    evil = "<img src=x onerror=document.title='owned'>"
    script = "<script>document.title='owned'</script>"
    for name in (evil, script.replace("/", "∕"), "\"'><b>x"):
        plain = {**settings(1, lr=script), "mine": {evil: evil}}
        run = make_run(tmp_path / "runs" / name, meta={**PPO_META, "env": evil, "host": script}, settings=plain)
        (run / "metrics.jsonl").write_text(
            json.dumps({"step": 1, evil: 1.0, f"rollout/{script}/ep_rew_mean": 2.0}) + "\n"
        )
    with serving(tmp_path / "runs") as server:
        listing = told(server, "api/runs")
        pages = [look(server), look(server, "#/table"), look(server, f"#/run/{listing['runs'][0]['id']}")]
    for page in pages:
        assert "owned</title>" not in page and "<img" not in page and "<b>x" not in page
        assert page.count("<script") == 2, "those of the page itself"
    assert "&lt;img src=x" in pages[0] and "&lt;script&gt;" in pages[2]


@pytest.mark.parametrize("size", ["520,900", "1400,900"])
def test_it_is_drawn_narrow_and_wide(size: str, tmp_path: Path, look: Look) -> None:
    with serving(three_runs(tmp_path / "runs")) as server:
        page = look(server, "", f"--window-size={size}")
    width = int(re.search(r"<canvas[^>]*width=\"(\d+)\"", page)[1])  # pyright: ignore[reportOptionalSubscript]
    assert width <= int(size.split(",")[0])


def test_it_follows_runs_as_they_grow(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(three_runs(tmp_path / "runs")) as server:
        answered = server.charts.chart

        def then_more(*asked: Any) -> Any:
            curves = answered(*asked)
            if not new.exists():
                make_run(new, 9.0, PPO_META, settings(0, lr=0.5))
            return curves

        new = tmp_path / "runs" / "new"
        monkeypatch.setattr(server.charts, "chart", then_more)
        page = words(look(server, "", "--virtual-time-budget=30000"))
    assert "3 curves, 4 runs" in page and "ppo, lr=0.5" in page


def test_a_person_filters_chooses_sorts_and_opens(tmp_path: Path, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page"
    shutil.copytree(server_module._PAGE, page)  # pyright: ignore[reportPrivateUsage]
    shutil.copy(Path(__file__).parent / "hands.js", page)
    text = (page / "index.html").read_text()
    (page / "index.html").write_text(text.replace("</head>", '<script src="hands.js" type="module"></script></head>'))
    monkeypatch.setattr(server_module, "_PAGE", page)
    monkeypatch.setitem(server_module._KINDS, "hands.js", "text/javascript")  # pyright: ignore[reportPrivateUsage]
    runs = three_runs(tmp_path / "runs")
    log = MetricsLog(runs / "b", resume_step=10_000)
    log.write(10_001, {"rollout/ep_rew_max": 1.0})
    log.close()
    with serving(runs) as server:
        found = re.search(r'data-said="([^"]*)"', look(server, "", "--virtual-time-budget=20000"))
    assert found is not None
    seeds, single = "ppo, lr=0.001 (2 seeds)", "ppo, lr=0.01"
    said = dict(json.loads(html.unescape(found[1])))
    mean, nearest, at = said.pop("cursor")
    assert 8.5 < float(mean) < 16 and nearest == "51" and re.fullmatch(r"\d(\.\d+)? min", at)
    assert said == {
        "begin": [seeds, single],
        "filter a setting": [single],
        "filter a seed": [seeds],
        "filter nothing": ["0 of 2 curves, 0 runs"],
        "no filter": [seeds, single],
        "hide one": [single, "Show ppo, lr=0.001"],
        "none": ["No curve is shown. Choose some in the list."],
        "all": [seeds, single],
        "open": ["a-s0", "a-s1"],
        "wall time": ["Curves", "Wall time"],
        "another chart": ["rollout/ep_rew_mean", "eval/mean_reward"],
        "one chart less": ["eval/mean_reward"],
        "table": ["ppo, lr=0.001", "ppo, lr=0.01"],
        "sorted": ["ppo, lr=0.01", "ppo, lr=0.001"],
        "a run": ["a-s0"],
        "more metrics": [True],
        "back": ["eval/mean_reward"],
    }
