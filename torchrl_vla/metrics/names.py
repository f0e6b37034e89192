"""Names of the metrics that more than one room reads."""

from __future__ import annotations

ENV_STEPS = "env_steps"
EPISODES = "episodes"
TRAIN_SUCCESS = "train/success_rate"
EVAL_SUCCESS = "eval/success_rate"
EVAL_LOW = "eval/success_low"
EVAL_HIGH = "eval/success_high"
ENV_STEPS_RATE = "rate/env_steps"
UPDATES_RATE = "rate/updates"
WAIT_ACTORS = "wait/actors"
WAIT_LEARNER = "wait/learner"
ACTOR_RESTARTS = "actors/restarts"
ACTORS_REMOTE = "actors/remote"
RATIO_GAP = "ratio_gap"
TARGET_KL_STOPS = "target_kl_stops"
RSS = "memory/rss_gib"

NAMES: dict[str, str] = {
    ENV_STEPS: "control steps executed since the run began, all ranks",
    EPISODES: "training episodes finished since the run began, all ranks",
    TRAIN_SUCCESS: "success of the training episodes finished lately, 0..1",
    EVAL_SUCCESS: "success of the last evaluation, 0..1",
    EVAL_LOW: "lower Wilson bound of the last evaluation, 0..1",
    EVAL_HIGH: "upper Wilson bound of the last evaluation, 0..1",
    ENV_STEPS_RATE: "control steps per second, all ranks",
    UPDATES_RATE: "updates per second",
    WAIT_ACTORS: "share of wall time the learner waited for actors, 0..1",
    WAIT_LEARNER: "share of wall time the actors waited for the learner, 0..1",
    ACTOR_RESTARTS: "actor workers replaced since the run (or its last attempt) began",
    ACTORS_REMOTE: "remote actors that are connected, all ranks",
    RSS: "resident memory of this rank and its children, GiB",
}
"""Names that the display and the report read. Runs may log any others beside them."""
