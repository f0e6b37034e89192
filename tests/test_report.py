"""The picture and the page of made-up runs, read back: pixels, drawn lines, links."""

import base64
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from torchrl_vla import report
from torchrl_vla.metrics import MetricLog, wilson_interval
from torchrl_vla.report import plot_success, write_page
from torchrl_vla.video import EpisodeVideo


def result(successes, episodes):
    return {
        "success_rate": successes / episodes,
        "successes": successes,
        "episodes": episodes,
        "interval": list(wilson_interval(successes, episodes)),
    }


def evaluation(update, successes, per_task):
    return {
        "update": update,
        "env_steps": 100 * update,
        "minutes": update / 10,
        "per_task": per_task,
        **result(successes, 40),
    }


ROOT = Path(__file__).resolve().parent.parent
HISTORY = [
    evaluation(0, 2, {"reach": result(2, 20), "push <hard>": result(0, 20)}),
    evaluation(10, 20, {"reach": result(15, 20), "push <hard>": result(5, 20)}),
    evaluation(20, 36, {"reach": result(20, 20), "push <hard>": result(16, 20)}),
]


def make_run(folder, history=HISTORY, updates=20, **top):
    log = MetricLog(folder, writers=("jsonl",))
    for update in range(1, updates + 1):
        success = float("nan") if update % 5 == 0 else update / 20
        log.log(
            {"env_steps": 100 * update, "episodes": 3 * update, "train/success_rate": success},
            step=update,
        )
    log.close()
    if history is not None:
        last = history[-1]
        whole = {"history": history, "success_rate": last["success_rate"], **top}
        (folder / "eval.json").write_text(json.dumps(whole))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    """The figures saved during a test."""
    figures = []
    save = Figure.savefig

    def remember(figure, *args, **kwargs):
        figures.append(figure)
        return save(figure, *args, **kwargs)

    monkeypatch.setattr(Figure, "savefig", remember)
    return figures


def test_the_curve_draws_what_the_files_say(tmp_path, drawn):
    path = plot_success(make_run(tmp_path / "run", algorithm="ppo"))
    assert path == tmp_path / "run" / "success.png"
    axes, top = drawn[0].axes
    lines = {line.get_label(): line for line in axes.lines}
    curve = lines["evaluation, 95% interval"]
    assert curve.get_xdata().tolist() == [0, 1000, 2000]
    assert curve.get_ydata() == pytest.approx([0.05, 0.5, 0.9])
    assert lines["push <hard>"].get_ydata() == pytest.approx([0, 0.25, 0.8])
    assert lines["reach"].get_ydata() == pytest.approx([0.1, 0.75, 1.0])
    band = axes.collections[0].get_paths()[0].vertices
    low, high = HISTORY[1]["interval"]
    assert sorted({round(y, 6) for x, y in band if x == 1000}) == pytest.approx(
        [low, high], abs=1e-6
    )
    assert axes.get_title() == "ppo: success 5% → 90%"
    # The time axis shares the limits of the steps, or its ticks would stand in the wrong place.
    assert top.get_xlim() == axes.get_xlim()


def test_the_training_line_is_a_moving_mean_without_the_empty_rows(tmp_path, drawn):
    plot_success(make_run(tmp_path / "run"))
    line = next(line for line in drawn[0].axes[0].lines if line.get_label().startswith("training"))
    # Updates 5, 10, 15, 20 ended no episode: 16 rows stay.
    assert len(line.get_xdata()) == 16
    assert line.get_xdata()[:5].tolist() == [100, 200, 300, 400, 600]
    # The first is itself, 1/20. The fifth is the mean of 1, 2, 3, 4, 6 over 20 = 16/5/20.
    assert line.get_ydata()[[0, 4]] == pytest.approx([0.05, 0.16])
    # The last ten rows are 8 9 11 12 13 14 16 17 18 19: 137 / 10 / 20
    assert line.get_ydata()[-1] == pytest.approx(0.685)


def test_minutes_stand_at_the_steps_reached_by_then(tmp_path, drawn):
    folder = make_run(tmp_path / "run", updates=0)
    # 1,000 steps in the first minute, then a tenth of that speed: 3 min at 1,200 steps.
    rows = [(1, 0, 0), (2, 60, 1000), (3, 180, 1200)]
    text = "".join(
        json.dumps({"update": u, "time": seconds, "env_steps": steps}) + "\n"
        for u, seconds, steps in rows
    )
    (folder / "metrics.jsonl").write_text(text)
    plot_success(folder)
    top = drawn[0].axes[1]
    places = {t.get_text(): x for x, t in zip(top.get_xticks(), top.get_xticklabels(), strict=True)}
    assert places["0"] == 0
    assert places["1"] == pytest.approx(1000)
    assert places["2"] == pytest.approx(1100)
    assert places["3"] == pytest.approx(1200)


def test_the_picture_is_a_readable_png_with_the_curve_in_it(tmp_path):
    with Image.open(plot_success(make_run(tmp_path / "run"))) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape[0] >= 600
    assert pixels.shape[1] >= 1000
    blue = np.array(to_rgb("#1f5fa8")) * 255
    assert (np.abs(pixels - blue).max(-1) < 12).sum() > 1000
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


def test_without_an_algorithm_the_folder_names_the_run(tmp_path, drawn):
    folder = make_run(tmp_path / "night-3", history=HISTORY[:1])
    plot_success(folder)
    plot_success(folder, algorithm="sac")
    titles = [figure.axes[0].get_title() for figure in drawn]
    assert titles == [f"{name}: success 5%, one evaluation" for name in ("night-3", "sac")]


def test_many_tasks_share_one_label(tmp_path, drawn):
    tasks = {f"task {i}": result(i, 20) for i in range(12)}
    plot_success(make_run(tmp_path / "run", history=[evaluation(u, 9, tasks) for u in (0, 9)]))
    axes = drawn[0].axes[0]
    assert len(axes.lines) == 12 + 2
    assert axes.get_legend_handles_labels()[1].count("12 tasks") == 1


def test_a_run_before_its_first_evaluation_is_drawn_and_says_so(tmp_path, drawn):
    folder = make_run(tmp_path / "run", history=None)
    page = write_page(folder).read_text()
    assert drawn[0].axes[0].get_title() == "run: not evaluated yet"
    assert "No evaluation yet" in page
    assert "No video was made" in page
    assert "no config.yaml" in page


def test_what_cannot_be_drawn_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"metrics\.jsonl"):
        plot_success(tmp_path)
    with pytest.raises(ValueError, match="nothing to draw yet"):
        plot_success(make_run(tmp_path / "empty", history=None, updates=0))
    broken = [{key: value for key, value in HISTORY[0].items() if key != "interval"}]
    with pytest.raises(KeyError, match=r"evaluation 0 .*interval"):
        plot_success(make_run(tmp_path / "broken", history=broken))
    (tmp_path / "metrics.jsonl").write_text('{"update": 4, "time": 1, "train/success_rate": 1}\n')
    with pytest.raises(KeyError, match=r"\[4\].*env_steps"):
        plot_success(tmp_path)


class Page(HTMLParser):
    """Sources, links and the text of table cells."""

    def __init__(self, text):
        super().__init__()
        self.found = {"img": [], "video": [], "a": []}
        self.tags = set()
        self.cells, self._inside = [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag in self.found:
            attrs = dict(attrs)
            self.found[tag].append(attrs.get("src") or attrs.get("href"))
        if tag == "td":
            self._inside = True
            self.cells.append("")

    def handle_endtag(self, tag):
        self._inside = self._inside and tag != "td"

    def handle_data(self, data):
        if self._inside:
            self.cells[-1] += data


def test_the_page_holds_everything_and_needs_no_network(tmp_path):
    folder = make_run(tmp_path / "run", algorithm="ppo <b>")
    (folder / "config.yaml").write_text("algo: ppo\ntasks: <all> & more {x}\n")
    with EpisodeVideo(folder / "videos" / "push #1.mp4", fps=10) as film:
        film.add(np.zeros((64, 64, 3), np.uint8))
    path = write_page(folder)
    assert path == folder / "index.html"
    text = path.read_text(encoding="utf-8")
    page = Page(text)
    (image,) = page.found["img"]
    kind, data = image.split(",", 1)
    assert kind == "data:image/png;base64"
    assert base64.b64decode(data) == (folder / "success.png").read_bytes()
    assert page.found["video"] == page.found["a"] == ["videos/push%20%231.mp4"]
    assert not re.search(r"https?://", text)
    assert "script" not in page.tags
    assert "algo: ppo\ntasks: &lt;all&gt; &amp; more {x}" in text
    assert "<title>ppo &lt;b&gt;: success 5% → 90%</title>" in text
    # first 2/40, last 36/40 with their Wilson bounds; per task of 20; then the cost of 20 updates
    rows = [page.cells[i : i + 4] for i in (0, 4, 8)]
    assert rows[0] == ["all tasks", "5% 1 to 17", "90% 77 to 96", "40"]
    assert rows[1] == ["reach", "10% 3 to 30", "100% 84 to 100", "20"]
    assert rows[2] == ["push <hard>", "0% 0 to 16", "80% 58 to 92", "20"]
    assert page.cells[12] == "20"
    assert page.cells[14:] == ["2,000", "60"]


def test_a_page_made_again_replaces_the_old_one(tmp_path):
    folder = make_run(tmp_path / "run", history=HISTORY[:2])
    assert "90%" not in write_page(folder).read_text()
    whole = {"history": HISTORY, "success_rate": 0.9}
    (folder / report.EVAL_FILE).write_text(json.dumps(whole))
    assert "90%" in write_page(folder).read_text()


def test_the_program_writes_pages_and_names_a_folder_that_is_no_run(tmp_path):
    program = [sys.executable, str(ROOT / "launch" / "report.py")]
    run = make_run(tmp_path / "run")
    done = subprocess.run([*program, run], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(run / "index.html")
    assert (run / "success.png").stat().st_size > 1000
    refused = subprocess.run([*program, tmp_path], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "metrics.jsonl does not exist" in refused.stderr
