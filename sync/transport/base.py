"""What a transport is, and the plain data that both ends exchange."""

import collections.abc
import dataclasses
from typing import Any, Protocol

import jax

_SHOWN = 20  # Problems spelt out in one error.


class TransportError(RuntimeError):
  """A transfer failed, timed out, or cannot be set up."""


class MismatchError(TransportError, ValueError):
  """Arrays that a transport cannot carry, or that the two sides see apart.

  Attributes:
    problems: Everything that was found, each with the array's name.
  """

  def __init__(self, what: str, problems: collections.abc.Sequence[str]):
    """Makes one message of all problems.

    Args:
      what: What was checked.
      problems: What is wrong; not empty.
    """
    self.problems = tuple(problems)
    more = len(self.problems) - _SHOWN
    super().__init__(
      f"{what}: {len(self.problems)} problem(s): "
      + "; ".join(self.problems[:_SHOWN])
      + (f"; and {more} more" if more > 0 else "")
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variable:
  """One array as a transport sees it.

  Attributes:
    name: Canonical name.
    ordinal: Place in the sorted list of names that both sides agree on.
    shape: Global shape.
    dtype: dtype name.
    mesh_shape: Shards along each axis.
    sharding_spec: Mesh axes along each axis, joined by commas; "" for none.
    global_shard_indices: For each device in mesh order, which slice it holds,
      counted row-major over the grid of shards.
  """

  name: str
  ordinal: int
  shape: tuple[int, ...]
  dtype: str
  mesh_shape: tuple[int, ...]
  sharding_spec: tuple[str, ...]
  global_shard_indices: tuple[int, ...]

  def __str__(self) -> str:
    return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkUnit:
  """One side of a transfer.

  Attributes:
    job: "trainer" or "rollout".
    replica: Replica of the job.
    endpoints: Data address ("host:port") of each device, in mesh order.
    control_address: Address of the synchronizer's listener; of several hosts'
      synchronizers, joined by commas.
    mesh_shape: Sizes of the mesh axes.
    mesh_axes: Names of the mesh axes.
    linear_staging: Staging buffers are linear rather than in device tiles,
      as they are on CPU; the transfer must then not move whole tiles.
    variables: The arrays, by ordinal.
    host_subgrid: Shape of the block of the mesh that one host holds, where
      several hosts hold the mesh; else empty.
  """

  job: str
  replica: str
  endpoints: tuple[str, ...]
  control_address: str
  mesh_shape: tuple[int, ...]
  mesh_axes: tuple[str, ...]
  linear_staging: bool
  variables: tuple[Variable, ...]
  host_subgrid: tuple[int, ...] = ()


class Endpoint(Protocol):
  """One side's persistent end of a transport.

  Attributes:
    stages_apart: What was staged outlives the arrays: they can be released
      before the transfer.
  """

  stages_apart: bool

  def allocate(
    self, target: collections.abc.Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, Any]:
    """What to bind in order to receive.

    Args:
      target: Shape, dtype and sharding of every array.

    Returns:
      Arrays that share memory with nothing, or `target` itself for a transport
      that makes the arrays it receives.
    """
    ...

  def bind(self, arrays: collections.abc.Mapping[str, Any]) -> None:
    """Takes this round's arrays, or what `allocate` gave.

    Where shapes or shardings changed, the work unit changes too and must be
    registered again.
    """

  def work_unit(self) -> WorkUnit:
    """What the other side needs to know."""
    ...

  def stage(self) -> None:
    """Copies the bound arrays to host staging buffers; returns when done."""

  def load(self) -> dict[str, jax.Array]:
    """Copies staging buffers to the devices; returns the arrays, all there."""
    ...

  def release(self) -> None:
    """Lets go of the bound arrays, so that they can be freed; idempotent."""

  def close(self) -> None:
    """Frees everything; idempotent."""


class Controller(Protocol):
  """Runs transfers between registered work units."""

  def register(self, unit: WorkUnit) -> None:
    """Makes a work unit known; idempotent for an unchanged one."""

  def transfer(
    self,
    source: WorkUnit,
    destinations: collections.abc.Sequence[WorkUnit],
    *,
    uuid: int,
    request: str,
    timeout_s: float,
  ) -> None:
    """Moves all variables; returns when every byte is in the staging buffers.

    Args:
      source: The trainer's unit.
      destinations: The rollouts' units.
      uuid: Number of this transfer, never used before.
      request: Name of this transfer, never used before.
      timeout_s: How long it may take.

    Raises:
      TransportError: the transfer failed or did not end in time.
    """

  def close(self) -> None:
    """Frees everything; idempotent."""
