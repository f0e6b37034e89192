"""Metric names, their reduction over ranks, rates, and the writers of a run folder.

This room turns numbers into rows. It does not decide what is measured (loops do), draw
(:mod:`torchrl_vla.report`) or talk to a terminal (:mod:`torchrl_vla.progress`, same rank: the two
meet only in the strings of :data:`NAMES`). It opens no process group: collectives come in as
functions. Only one rank of a run may own a :class:`MetricLog`.

Names are ``room/thing``; the suffix says how ranks combine: ``_sum`` and ``_count`` add up,
``_max`` takes the largest, anything else is averaged.
"""

from torchrl_vla.metrics.log import METRICS_FILE, WRITERS, MetricLog, read_metrics
from torchrl_vla.metrics.measure import Means, Rate, Stopwatch, rss_gib
from torchrl_vla.metrics.names import (
    ACTOR_RESTARTS,
    ACTORS_REMOTE,
    ENV_STEPS,
    ENV_STEPS_RATE,
    EPISODES,
    EVAL_HIGH,
    EVAL_LOW,
    EVAL_SUCCESS,
    NAMES,
    RATIO_GAP,
    RSS,
    TARGET_KL_STOPS,
    TRAIN_SUCCESS,
    UPDATES_RATE,
    WAIT_ACTORS,
    WAIT_LEARNER,
)
from torchrl_vla.metrics.reduction import reduce_metrics, wilson_interval

__all__ = [
    "ACTORS_REMOTE",
    "ACTOR_RESTARTS",
    "ENV_STEPS",
    "ENV_STEPS_RATE",
    "EPISODES",
    "EVAL_HIGH",
    "EVAL_LOW",
    "EVAL_SUCCESS",
    "METRICS_FILE",
    "NAMES",
    "RATIO_GAP",
    "RSS",
    "TARGET_KL_STOPS",
    "TRAIN_SUCCESS",
    "UPDATES_RATE",
    "WAIT_ACTORS",
    "WAIT_LEARNER",
    "WRITERS",
    "Means",
    "MetricLog",
    "Rate",
    "Stopwatch",
    "read_metrics",
    "reduce_metrics",
    "rss_gib",
    "wilson_interval",
]
