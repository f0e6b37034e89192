"""Success rates one can trust: which episodes, how they are run, what they depend on, what differs.

The result is a pure function of (policy, evaluation list, settings). It does not depend on how many
simulators run side by side, on how fast a policy ends its episodes, or on the number of ranks.
"""

from torchrl_vla.evaluate.comparison import Comparison, compare
from torchrl_vla.evaluate.episodes import (
    EpisodeResult,
    Perturbation,
    decide,
    perturb,
    run_episodes,
    run_on_ranks,
    undisturbed,
)
from torchrl_vla.evaluate.films import Judge, film, film_grid, q_judge, state_value
from torchrl_vla.evaluate.identity import describe_environment, fingerprint
from torchrl_vla.evaluate.results import as_rows, list_of, summarise

__all__ = [
    "Comparison",
    "EpisodeResult",
    "Judge",
    "Perturbation",
    "as_rows",
    "compare",
    "decide",
    "describe_environment",
    "film",
    "film_grid",
    "fingerprint",
    "list_of",
    "perturb",
    "q_judge",
    "run_episodes",
    "run_on_ranks",
    "state_value",
    "summarise",
    "undisturbed",
]
