"""The two sessions of a sync and what their rounds are made of."""

from laneweave.sync.rollout import RolloutSync
from laneweave.sync.rounds import ABORTED
from laneweave.sync.rounds import PARTIALLY_PUBLISHED
from laneweave.sync.rounds import PUBLISHED
from laneweave.sync.rounds import ReplicaReport
from laneweave.sync.rounds import RoundError
from laneweave.sync.rounds import RoundManifest
from laneweave.sync.rounds import RoundOutcome
from laneweave.sync.rounds import UNKNOWN
from laneweave.sync.trainer import TrainerSync

__all__ = [
    "ABORTED",
    "PARTIALLY_PUBLISHED",
    "PUBLISHED",
    "UNKNOWN",
    "ReplicaReport",
    "RolloutSync",
    "RoundError",
    "RoundManifest",
    "RoundOutcome",
    "TrainerSync",
]
