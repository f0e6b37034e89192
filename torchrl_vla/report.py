"""A run folder becomes a picture and one self-contained page.

Reads what a run wrote: ``metrics.jsonl`` (:mod:`torchrl_vla.metrics`), ``eval.json`` (the
evaluations), ``config.yaml`` (shown as it is) and ``videos/*.mp4``. Writes ``success.png`` and
``index.html`` beside them, and nothing else; it can run while the training still does.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter

from torchrl_vla.metrics import ENV_STEPS, EPISODES, TRAIN_SUCCESS, read_metrics

EVAL_FILE = "eval.json"
CONFIG_FILE = "config.yaml"
CURVE_FILE = "success.png"
PAGE_FILE = "index.html"
SMOOTHING = 10
"""Rows of ``metrics.jsonl`` in the moving mean of the training success."""

_BLUE, _GREY = "#1f5fa8", "#8a8f98"
_POINT = ("update", "env_steps", "minutes", "success_rate", "episodes", "interval", "per_task")
_MAX_TASK_LABELS = 10


def plot_success(run_dir: str | os.PathLike[str], *, algorithm: str | None = None) -> Path:
    """Draw the success curve of a run.

    The thick line with points is evaluation success against env steps, its band the interval
    stored with each evaluation (Wilson, 95%). The thin line is training success, a moving mean of
    :data:`SMOOTHING` rows; rows in which no episode ended have none and are left out. Light lines
    are single tasks. The axis on top shows the minutes at which the env steps were reached.

    Args:
        run_dir: folder of a run with ``metrics.jsonl`` and, once evaluated, ``eval.json``.
        algorithm: for the title; by default ``eval.json``'s ``"algorithm"``, and without that
            the name of the folder.

    Returns:
        ``run_dir/success.png``.

    Raises:
        FileNotFoundError: no ``metrics.jsonl``.
        KeyError: an evaluation or a row of training success lacks a field named in the message.
        ValueError: neither an evaluation nor any training success to draw.
    """
    folder = Path(run_dir)
    rows = read_metrics(folder)
    evaluation = _read_eval(folder)
    history = evaluation.get("history", [])
    steps, success = _training_success(rows)
    if not history and not len(steps):
        raise ValueError(
            f"{folder} has no evaluation in {EVAL_FILE} and no {TRAIN_SUCCESS!r} in its metrics; "
            "there is nothing to draw yet"
        )
    figure = Figure(figsize=(8.5, 5.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if len(steps):
        axes.plot(
            steps, success, color=_GREY, linewidth=1.0, label="training (moving mean)", zorder=2
        )
    if history:
        _draw_tasks(axes, history)
        _draw_evaluation(axes, history)
    _dress(axes, _title(folder, history, algorithm or evaluation.get("algorithm")))
    _minutes_on_top(axes, rows, history)
    path = folder / CURVE_FILE
    temporary = folder / f".{CURVE_FILE}.part"
    figure.savefig(temporary, format="png")
    temporary.replace(path)
    return path


def write_page(run_dir: str | os.PathLike[str], *, algorithm: str | None = None) -> Path:
    """Make the page of a run: curve (inside the file), results, videos, configuration.

    Draws the curve anew. Videos stay files beside the page and are linked relatively, so the
    folder can be moved or served as it is. The page loads nothing from anywhere else.

    Args:
        run_dir: as for :func:`plot_success`.
        algorithm: as for :func:`plot_success`.

    Returns:
        ``run_dir/index.html``.

    Raises:
        FileNotFoundError, KeyError, ValueError: as :func:`plot_success`.
    """
    folder = Path(run_dir)
    curve = plot_success(folder, algorithm=algorithm)
    evaluation = _read_eval(folder)
    history = evaluation.get("history", [])
    title = _title(folder, history, algorithm or evaluation.get("algorithm"))
    image = base64.b64encode(curve.read_bytes()).decode("ascii")
    parts = [
        f"<h1>{html.escape(folder.resolve().name)}</h1>",
        f'<img alt="Success against env steps" src="data:image/png;base64,{image}">',
        "<h2>Last evaluation</h2>",
        _result_table(history),
        "<h2>Cost</h2>",
        _cost_table(read_metrics(folder)),
        "<h2>Videos</h2>",
        _videos(folder),
        "<h2>Configuration</h2>",
        _config(folder),
    ]
    page = _PAGE.format(title=html.escape(title), style=_STYLE, body="\n".join(parts))
    path = folder / PAGE_FILE
    temporary = folder / f".{PAGE_FILE}.part"
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(path)
    return path


def _read_eval(folder: Path) -> dict[str, Any]:
    """``eval.json``, or an empty mapping before the first evaluation."""
    path = folder / EVAL_FILE
    if not path.exists():
        return {}
    evaluation = json.loads(path.read_text(encoding="utf-8"))
    for number, point in enumerate(evaluation["history"]):
        missing = [key for key in _POINT if key not in point]
        if missing:
            raise KeyError(f"{path}: evaluation {number} of 'history' lacks {missing}")
    return evaluation


def _training_success(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray, np.ndarray]:
    """Env steps and moving mean of training success, both float64 ``[rows with a success]``."""
    found = [row for row in rows if row.get(TRAIN_SUCCESS) is not None]
    lacking = [row["update"] for row in found if row.get(ENV_STEPS) is None]
    if lacking:
        raise KeyError(
            f"rows of updates {lacking[:3]} have {TRAIN_SUCCESS!r} but no {ENV_STEPS!r}; log both"
        )
    steps = np.array([row[ENV_STEPS] for row in found], np.float64)
    raw = np.array([row[TRAIN_SUCCESS] for row in found], np.float64)
    sums = np.concatenate([[0.0], np.cumsum(raw)])
    ends = np.arange(1, len(raw) + 1)
    begins = np.maximum(0, ends - SMOOTHING)
    return steps, (sums[ends] - sums[begins]) / np.maximum(1, ends - begins)


def _draw_evaluation(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    steps = [point["env_steps"] for point in history]
    low, high = zip(*(point["interval"] for point in history), strict=True)
    axes.fill_between(steps, low, high, color=_BLUE, alpha=0.18, linewidth=0, zorder=3)
    if len(history) == 1:  # a band needs two points; one evaluation gets a bar
        axes.vlines(steps, low, high, color=_BLUE, alpha=0.4, linewidth=4, zorder=3)
    axes.plot(
        steps,
        [point["success_rate"] for point in history],
        color=_BLUE,
        linewidth=2.4,
        marker="o",
        markersize=4.5,
        label="evaluation, 95% interval",
        zorder=5,
    )


def _draw_tasks(axes: Axes, history: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for point in history for name in point["per_task"]))
    if len(names) < 2:
        return
    for number, name in enumerate(names):
        found = [point for point in history if name in point["per_task"]]
        label = name if len(names) <= _MAX_TASK_LABELS else f"{len(names)} tasks"
        many = len(names) > _MAX_TASK_LABELS
        axes.plot(
            [point["env_steps"] for point in found],
            [point["per_task"][name]["success_rate"] for point in found],
            color=_GREY if many else f"C{number % 9 + 1}",
            alpha=0.35 if many else 0.55,
            linewidth=1.1,
            linestyle=(0, (4, 2)),
            label=label if number == 0 or not many else None,
            zorder=1,
        )


def _dress(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=12, fontweight="bold", pad=12)
    axes.set_xlabel("env steps (control steps of all simulators)")
    axes.set_ylabel("success")
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["right"].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    # The evaluation first: it is what the picture is for.
    order = sorted(range(len(labels)), key=lambda i: not labels[i].startswith("evaluation"))
    axes.figure.legend(
        [handles[i] for i in order],
        [labels[i] for i in order],
        loc="outside lower center",
        ncols=min(4, len(labels)),
        frameon=False,
        fontsize=9,
    )


def _minutes_on_top(
    axes: Axes, rows: Sequence[Mapping[str, Any]], history: Sequence[Mapping[str, Any]]
) -> None:
    """A second x axis with round minutes at the env steps reached by then.

    Ticks are placed one by one because speed changes during a run: the two axes are not
    proportional.
    """
    known = [(row[ENV_STEPS], row["time"] / 60) for row in rows if row.get(ENV_STEPS) is not None]
    known = known or [(point["env_steps"], point["minutes"]) for point in history]
    steps, minutes = (np.array(column, np.float64) for column in zip(*known, strict=True))
    top = axes.twiny()
    top.spines["right"].set_visible(False)
    top.set_xlim(axes.get_xlim())
    ticks = MaxNLocator(nbins=8, steps=[1, 2, 5, 10]).tick_values(minutes[0], minutes[-1])
    ticks = ticks[(ticks >= minutes[0]) & (ticks <= minutes[-1])]
    top.set_xticks(np.interp(ticks, minutes, steps), [f"{tick:g}" for tick in ticks])
    top.set_xlabel("minutes", fontsize=9)
    top.tick_params(labelsize=8)


def _title(folder: Path, history: Sequence[Mapping[str, Any]], algorithm: str | None) -> str:
    name = algorithm or folder.resolve().name
    if not history:
        return f"{name}: not evaluated yet"
    end = f"{100 * history[-1]['success_rate']:.0f}%"
    if len(history) == 1:
        return f"{name}: success {end}, one evaluation"
    return f"{name}: success {100 * history[0]['success_rate']:.0f}% → {end}"


def _result_table(history: Sequence[Mapping[str, Any]]) -> str:
    if not history:
        return f"<p>No evaluation yet: there is no {EVAL_FILE}.</p>"
    first, last = history[0], history[-1]
    rows = [("all tasks", first, last)] if first is not last else [("all tasks", None, last)]
    rows += [
        (name, first["per_task"].get(name) if first is not last else None, result)
        for name, result in last["per_task"].items()
    ]
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{_cell(start)}</td><td>{_cell(end)}</td>"
        f"<td>{end['episodes']}</td></tr>"
        for name, start, end in rows
    )
    return (
        "<table><tr><th>task</th><th>first evaluation</th><th>last evaluation</th>"
        f"<th>episodes</th></tr>{body}</table>"
        f"<p>Success with 95% Wilson intervals. Last evaluation after update {last['update']}.</p>"
    )


def _cell(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return "&ndash;"
    low, high = result["interval"]
    bounds = f"{100 * low:.0f} to {100 * high:.0f}"
    return f"<b>{100 * result['success_rate']:.0f}%</b> <small>{bounds}</small>"


def _cost_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "<p>No update was logged.</p>"
    last = rows[-1]
    cells = [("updates", f"{last['update']:,}"), ("minutes", f"{last['time'] / 60:.1f}")]
    for name in (ENV_STEPS, EPISODES):
        known = [row[name] for row in rows if row.get(name) is not None]
        if known and math.isfinite(known[-1]):
            cells.append((name.replace("_", " "), f"{known[-1]:,.0f}"))
    head = "".join(f"<th>{name}</th>" for name, _ in cells)
    return f"<table><tr>{head}</tr><tr>{''.join(f'<td>{v}</td>' for _, v in cells)}</tr></table>"


def _videos(folder: Path) -> str:
    videos = sorted((folder / "videos").glob("*.mp4"))
    figures = []
    for video in videos:
        link = quote(f"videos/{video.name}")
        figures.append(
            f'<figure><video controls muted loop preload="metadata" src="{link}"></video>'
            f'<figcaption><a href="{link}">{html.escape(video.stem)}</a></figcaption></figure>'
        )
    if not figures:
        return "<p>No video was made.</p>"
    return f'<div class="videos">{"".join(figures)}</div>'


def _config(folder: Path) -> str:
    path = folder / CONFIG_FILE
    if not path.exists():
        return f"<p>The run folder has no {CONFIG_FILE}.</p>"
    return f"<pre>{html.escape(path.read_text(encoding='utf-8'))}</pre>"


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{style}</style></head>
<body>
{body}
</body></html>
"""

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1e21; max-width: 960px; margin: 2rem auto;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
img { width: 100% } small { color: #6a7078 }
table { border-collapse: collapse } th { text-align: left; font-weight: 600 }
th, td { padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid #e6e8eb;
  font-variant-numeric: tabular-nums }
.videos { display: grid; grid-template-columns: repeat(auto-fill, minmax(256px, 1fr)); gap: 1rem }
figure { margin: 0 } video { width: 100%; background: #18181c }
figcaption { font-size: .85rem; overflow-wrap: anywhere }
pre { background: #f5f6f7; padding: 1rem; overflow-x: auto; font-size: .85rem }
"""
