"""What a round is: its manifest, its outcome, and their wire forms."""

import collections.abc
import dataclasses

import numpy as np

from laneweave.sync.control import control_pb2
from laneweave.sync.transport import base

PUBLISHED = "published"
ABORTED = "aborted"
PARTIALLY_PUBLISHED = "partially_published"
UNKNOWN = "unknown"


class RoundError(RuntimeError):
  """A phase was called for a round that is over, unknown or not ready."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundManifest:
  """What a round brings.

  Attributes:
    session: Names the trainer's session; another one counts rounds anew.
    round_id: Counts rounds of a session, from 1.
    version: The trainer's version of the weights.
    seed: Seed of the fingerprints, two uint32 drawn anew each round.
    variables: The arrays, by ordinal, with the trainer's shardings.
    fingerprints: uint32 [2] by name; empty where none were taken.
    signature: Of all the rest, see `control.auth`; empty without a key.
  """

  session: str
  round_id: int
  version: int
  seed: tuple[int, int]
  variables: tuple[base.Variable, ...]
  fingerprints: collections.abc.Mapping[str, np.ndarray]
  signature: bytes = b""

  @property
  def key(self) -> tuple[str, int, int]:
    """What names the round: session, round and version."""
    return self.session, self.round_id, self.version

  def __str__(self) -> str:
    return f"round {self.round_id}, version {self.version}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaReport:
  """What became of a round on one rollout.

  Attributes:
    outcome: `PUBLISHED`, `ABORTED`, or `UNKNOWN` for one that said nothing.
    reason: Why it was aborted.
    mismatched: Names whose fingerprints differed.
    timings: Seconds by phase.
    peak_rss_bytes: Peak resident memory of the rollout's process.
  """

  outcome: str
  reason: str = ""
  mismatched: tuple[str, ...] = ()
  timings: collections.abc.Mapping[str, float] = dataclasses.field(
    default_factory=dict
  )
  peak_rss_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundOutcome:
  """What became of a round.

  Attributes:
    outcome: `PUBLISHED`: every rollout serves the version. `ABORTED`: none
      does, all serve what they served. `PARTIALLY_PUBLISHED`: `replicas` says
      which does. `UNKNOWN`: a rollout said nothing, and may serve either.
    round_id: The round.
    version: The version.
    replicas: Reports by replica.
  """

  outcome: str
  round_id: int
  version: int
  replicas: collections.abc.Mapping[str, ReplicaReport]


def combine(reports: collections.abc.Iterable[ReplicaReport]) -> str:
  """The outcome of a round from those of its rollouts."""
  outcomes = {r.outcome for r in reports}
  if UNKNOWN in outcomes or not outcomes:
    return UNKNOWN
  if outcomes == {PUBLISHED}:
    return PUBLISHED
  return PARTIALLY_PUBLISHED if PUBLISHED in outcomes else ABORTED


def variable_to_wire(
  v: base.Variable, fingerprint: np.ndarray | None = None
) -> control_pb2.Variable:
  """The wire form of a variable."""
  return control_pb2.Variable(
    name=v.name,
    ordinal=v.ordinal,
    shape=v.shape,
    dtype=v.dtype,
    mesh_shape=v.mesh_shape,
    sharding_spec=v.sharding_spec,
    global_shard_indices=v.global_shard_indices,
    fingerprint=[] if fingerprint is None else [int(w) for w in fingerprint],
  )


def variable_from_wire(v: control_pb2.Variable) -> base.Variable:
  """The inverse of `variable_to_wire`, without the fingerprint."""
  return base.Variable(
    name=v.name,
    ordinal=v.ordinal,
    shape=tuple(v.shape),
    dtype=v.dtype,
    mesh_shape=tuple(v.mesh_shape),
    sharding_spec=tuple(v.sharding_spec),
    global_shard_indices=tuple(v.global_shard_indices),
  )


def manifest_to_wire(m: RoundManifest) -> control_pb2.RoundManifest:
  """The wire form of a manifest."""
  return control_pb2.RoundManifest(
    session=m.session,
    round_id=m.round_id,
    version=m.version,
    seed=m.seed,
    variables=[
      variable_to_wire(v, m.fingerprints.get(v.name)) for v in m.variables
    ],
    signature=m.signature,
  )


def manifest_from_wire(m: control_pb2.RoundManifest) -> RoundManifest:
  """The inverse of `manifest_to_wire`.

  Args:
    m: A message, which anyone may have written.

  Returns:
    The manifest.

  Raises:
    base.TransportError: the message is no manifest.
  """
  names = {v.name for v in m.variables}
  odd = [v.name for v in m.variables if len(v.fingerprint) not in (0, 2)]
  if len(m.seed) != 2 or len(names) != len(m.variables) or odd:
    raise base.TransportError(
      f"the manifest of round {m.round_id} is malformed: {len(m.seed)} seed"
      f" words, {len(m.variables) - len(names)} repeated names, {len(odd)}"
      " fingerprints that are not two words"
    )
  return RoundManifest(
    session=m.session,
    round_id=m.round_id,
    version=m.version,
    seed=(m.seed[0], m.seed[1]),
    variables=tuple(variable_from_wire(v) for v in m.variables),
    fingerprints={
      v.name: np.array(v.fingerprint, np.uint32)
      for v in m.variables
      if v.fingerprint
    },
    signature=m.signature,
  )


def bytes_to_sign(m: control_pb2.RoundManifest) -> bytes:
  """What a signature of a manifest is over: the message without it.

  Args:
    m: The message, signed or not.

  Returns:
    Its deterministic serialisation.
  """
  unsigned = control_pb2.RoundManifest()
  unsigned.CopyFrom(m)
  unsigned.ClearField("signature")
  return unsigned.SerializeToString(deterministic=True)


def unit_to_wire(u: base.WorkUnit) -> control_pb2.WorkUnit:
  """The wire form of a work unit."""
  return control_pb2.WorkUnit(
    job=u.job,
    replica=u.replica,
    endpoints=u.endpoints,
    control_address=u.control_address,
    mesh_shape=u.mesh_shape,
    mesh_axes=u.mesh_axes,
    linear_staging=u.linear_staging,
    variables=[variable_to_wire(v) for v in u.variables],
    host_subgrid=u.host_subgrid,
  )


def unit_from_wire(u: control_pb2.WorkUnit) -> base.WorkUnit:
  """The inverse of `unit_to_wire`."""
  return base.WorkUnit(
    job=u.job,
    replica=u.replica,
    endpoints=tuple(u.endpoints),
    control_address=u.control_address,
    mesh_shape=tuple(u.mesh_shape),
    mesh_axes=tuple(u.mesh_axes),
    linear_staging=u.linear_staging,
    variables=tuple(variable_from_wire(v) for v in u.variables),
    host_subgrid=tuple(u.host_subgrid),
  )
