"""One process: arrays go from mesh to mesh by `jax.device_put`.

For machines on which Raiden cannot be installed, and for tests. Both ends
must live in one process; nothing crosses a network.
"""

import collections.abc
import itertools

import jax

from laneweave.sync.transport import base

_ENDPOINTS: dict[str, "LocalEndpoint"] = {}
_numbers = itertools.count()


class LocalEndpoint:
  """One end, found by the controller through its address in this process."""

  def __init__(self, *, job: str, replica: str):
    """Registers the endpoint.

    Args:
      job: "trainer" or "rollout".
      replica: Replica of the job.
    """
    self._job = job
    self._replica = replica
    self._address = f"local:{next(_numbers)}"
    self._arrays: dict[str, jax.Array] = {}
    self._unit: base.WorkUnit | None = None
    _ENDPOINTS[self._address] = self

  def bind(self, arrays: collections.abc.Mapping[str, jax.Array]) -> None:
    """See `base.Endpoint`."""
    self._arrays = dict(arrays)
    if self._unit is None:
      self._unit = base.WorkUnit(
        job=self._job,
        replica=self._replica,
        endpoints=(self._address,),
        control_address=self._address,
        mesh_shape=(),
        mesh_axes=(),
        linear_staging=False,
        variables=base.variables_of(self._arrays),
      )

  def work_unit(self) -> base.WorkUnit:
    """See `base.Endpoint`."""
    if self._unit is None:
      raise base.TransportError("nothing is bound yet; call bind() first")
    return self._unit

  def take(self, source: "LocalEndpoint") -> None:
    """Copies the other end's arrays to this end's shardings."""
    self._arrays = {
      name: jax.device_put(x, self._arrays[name].sharding, may_alias=False)
      for name, x in source._arrays.items()
    }

  def stage(self) -> None:
    """See `base.Endpoint`; nothing to do."""

  def load(self) -> dict[str, jax.Array]:
    """See `base.Endpoint`."""
    return jax.block_until_ready(dict(self._arrays))

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
    if unit.control_address not in _ENDPOINTS:
      raise base.TransportError(
        f"the {unit.job} at {unit.control_address} is not in this process;"
        " --transport=local joins two ends of one process only"
      )

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
    del uuid, request, timeout_s
    for unit in destinations:
      _ENDPOINTS[unit.control_address].take(_ENDPOINTS[source.control_address])

  def close(self) -> None:
    """See `base.Controller`."""
