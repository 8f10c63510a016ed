"""One process: arrays go from mesh to mesh by `jax.device_put`.

For machines on which Raiden cannot be installed, and for tests. Both ends
must live in one process; nothing crosses a network.
"""

import collections.abc
import itertools
from typing import Any

import jax

from laneweave.sync.transport import base, variables

_ENDPOINTS: dict[str, "LocalEndpoint"] = {}
_numbers = itertools.count()


class LocalEndpoint:
  """One end, found by the controller through its address in this process."""

  stages_apart = False

  def __init__(self, *, job: str, replica: str):
    """Registers the endpoint.

    Args:
      job: "trainer" or "rollout".
      replica: Replica of the job.
    """
    self._job = job
    self._replica = replica
    self._address = f"local:{next(_numbers)}"
    self._arrays: dict[str, Any] = {}
    self._unit: base.WorkUnit | None = None
    _ENDPOINTS[self._address] = self

  def allocate(
    self, target: collections.abc.Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, Any]:
    """See `base.Endpoint`; the transfer makes new arrays."""
    return dict(target)

  def bind(self, arrays: collections.abc.Mapping[str, Any]) -> None:
    """See `base.Endpoint`."""
    described = variables.variables_of(arrays)
    self._arrays = dict(arrays)
    if self._unit is not None and self._unit.variables == described:
      return
    first = next(iter(self._arrays.values()))
    devices = variables.mesh_devices(first.sharding) or ()
    self._unit = base.WorkUnit(
      job=self._job,
      replica=self._replica,
      endpoints=(self._address,) * len(devices),
      control_address=self._address,
      mesh_shape=(len(devices),),
      mesh_axes=("device",),
      linear_staging=False,
      variables=described,
    )

  def work_unit(self) -> base.WorkUnit:
    """See `base.Endpoint`."""
    if self._unit is None:
      raise base.TransportError("nothing is bound yet; call bind() first")
    return self._unit

  def take(self, source: "LocalEndpoint") -> None:
    """Copies the other end's arrays to this end's shardings."""
    taken = {}
    for name, wanted in self._arrays.items():
      taken[name] = jax.device_put(
        source._arrays[name], wanted.sharding, may_alias=False
      )
    self._arrays = jax.block_until_ready(taken)

  def stage(self) -> None:
    """See `base.Endpoint`; nothing to do."""

  def load(self) -> dict[str, jax.Array]:
    """See `base.Endpoint`."""
    return dict(self._arrays)

  def release(self) -> None:
    """See `base.Endpoint`."""
    self._arrays = {}

  def close(self) -> None:
    """See `base.Endpoint`."""
    _ENDPOINTS.pop(self._address, None)
    self._arrays = {}


class LocalController:
  """Copies between endpoints of this process."""

  def register(self, unit: base.WorkUnit) -> None:
    """See `base.Controller`."""
    self._find(unit)

  def _find(self, unit):
    endpoint = _ENDPOINTS.get(unit.control_address)
    if endpoint is None:
      raise base.TransportError(
        f"the {unit.job} at {unit.control_address} is not in this process, or"
        " closed; --transport=local joins two ends of one process only"
      )
    return endpoint

  def transfer(
    self,
    source: base.WorkUnit,
    destinations: collections.abc.Sequence[base.WorkUnit],
    *,
    uuid: int,
    request: str,
    timeout_s: float,
  ) -> None:
    """See `base.Controller`."""
    del uuid, timeout_s
    try:
      for unit in destinations:
        self._find(unit).take(self._find(source))
    # An array that the caller gave up, or no memory for the copy.
    except (KeyError, RuntimeError) as error:
      raise base.TransportError(
        f"the transfer {request} failed: {type(error).__name__}: {error}"
      ) from error

  def close(self) -> None:
    """See `base.Controller`."""
