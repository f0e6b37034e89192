"""What the off-policy learner draws from: the actors' transitions, demonstrations, their features.

The buffer holds images as uint8 and is written by the actors. With a frozen trunk every observation
is encoded once, when it arrives, and updates read the features. Which rows are drawn is a rule
(:class:`Sampling`): all rules work on places of the one buffer, no image is copied for them.
"""

from torchrl_vla.replay.feed import ReplayFeed, make_replay
from torchrl_vla.replay.sampling import Sampling

__all__ = ["ReplayFeed", "Sampling", "make_replay"]
