"""The two sessions of a sync and what their rounds are made of."""

from laneweave.sync.rollout import RolloutSync
from laneweave.sync.rounds import (
  ABORTED,
  PARTIALLY_PUBLISHED,
  PUBLISHED,
  UNKNOWN,
  ReplicaReport,
  RoundError,
  RoundManifest,
  RoundOutcome,
)
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
