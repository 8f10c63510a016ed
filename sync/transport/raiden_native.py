"""Raiden's native synchronizer and controller (wheel `tpu-sync-jax`).

One synchronizer a side lives as long as the session and is bound anew every
round, which is what makes rounds after the first cheap.

How Raiden behaves, and what is done about it:

* Bound with its buffer lock it deadlocks on the next bind, so the lock is
  skipped and this class keeps the bound arrays alive itself.
* It holds the memory of bound arrays until others are bound in their place,
  even if they were deleted, and takes only a full list of equal sizes. To be
  freed they are replaced by placeholders, one array for all of one kind.
* `h2d` writes into the buffers of the bound arrays behind JAX's back. A JAX
  array whose value was once read on the host keeps a copy of that value, so a
  bound array must be new in every round and not be read before `load`.
* It binds anew only what has the same sizes, and would take a reshaped array
  of equal size without a word. Arrays that are described otherwise than the
  last ones get a new synchronizer.
* A transfer copies the bound arrays to host staging once more unless told not
  to. They are staged already, and may have been released since.
* On CPU devices staging buffers are linear. `skip_tiling` must then be False
  for every variable, or the planner moves whole device tiles and permutes the
  data.
* Its ports accept bytes from anyone who reaches them. Without `auto_h2d` these
  go no further than the staging buffers. What lands is checked by the session
  before it is served.
"""

import asyncio
import collections.abc
import concurrent.futures
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp

from laneweave.sync.transport import (
  base,
  raiden_commands,
  raiden_package,
  variables,
)

# Before any device is touched: each of Raiden's native modules brings its own
# protobuf descriptors.
_synchronizer = raiden_package.load(raiden_package.NATIVE)
_controller = raiden_package.load("rpc.raiden_controller")
_proto = raiden_package.load("rpc.raiden_service_pb2")

_CUT_S = 5.0  # For commands that were cut off to end.


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="sharding")
def _zeros(shape, dtype, *, sharding):
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


class NativeEndpoint:
  """One persistent `WeightSynchronizer`."""

  stages_apart = True

  def __init__(self, *, job: str, replica: str, parallelism: int, bind_ip: str):
    """Keeps the settings; the synchronizer is made by the first `bind`.

    Args:
      job: "trainer" or "rollout".
      replica: Replica of the job.
      parallelism: Raiden's network streams.
      bind_ip: Address that the other side reaches this one by.
    """
    self._job = job
    self._replica = replica
    self._parallelism = parallelism
    self._bind_ip = bind_ip
    self._synchronizer: Any = None
    self._arrays: dict[str, jax.Array] = {}
    self._placeholders: list[jax.Array] = []
    self._unit: base.WorkUnit | None = None

  def allocate(
    self, target: collections.abc.Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, Any]:
    """See `base.Endpoint`; zeros, each array with buffers of its own."""
    return {
      name: _zeros(tuple(x.shape), jnp.dtype(x.dtype), sharding=x.sharding)
      for name, x in target.items()
    }

  def bind(self, arrays: collections.abc.Mapping[str, Any]) -> None:
    """See `base.Endpoint`."""
    if arrays.keys() == self._arrays.keys() and all(
      x is self._arrays[name] for name, x in arrays.items()
    ):
      return
    described = variables.variables_of(arrays)
    _check_addressable(arrays)
    arrays = dict(arrays)
    bound = list(arrays.values())
    jax.block_until_ready(bound)
    if self._unit is not None and self._unit.variables != described:
      self.close()
    if self._synchronizer is None:
      self._synchronizer = _synchronizer.WeightSynchronizer(
        bound,
        local_port=0,
        parallelism=self._parallelism,
        unsafe_skip_buffer_lock=True,
        listener_port=0,
        bind_ip=self._bind_ip,
      )
      self._unit = self._describe(bound[0].sharding, described)
    else:
      self._synchronizer.bind_weights(bound)
    self._arrays, self._placeholders = arrays, []

  def _describe(self, sharding, described):
    devices = variables.mesh_devices(sharding) or []
    mesh = getattr(sharding, "mesh", None)
    address = f"{self._bind_ip}:{self._synchronizer.local_port}"
    return base.WorkUnit(
      job=self._job,
      replica=self._replica,
      endpoints=(address,) * len(devices),
      control_address=f"{self._bind_ip}:{self._synchronizer.listener_port}",
      mesh_shape=tuple(mesh.shape.values()) if mesh is not None else (1,),
      mesh_axes=tuple(mesh.axis_names) if mesh is not None else ("device",),
      linear_staging=devices[0].platform == "cpu",
      variables=described,
    )

  def work_unit(self) -> base.WorkUnit:
    """See `base.Endpoint`."""
    if self._unit is None:
      raise base.TransportError("nothing is bound yet; call bind() first")
    return self._unit

  def stage(self) -> None:
    """See `base.Endpoint`."""
    self._copy("d2h")

  def load(self) -> dict[str, jax.Array]:
    """See `base.Endpoint`; the bound arrays themselves."""
    self._copy("h2d")
    jax.block_until_ready(list(self._arrays.values()))
    return dict(self._arrays)

  def _copy(self, way):
    if not self._arrays:
      raise base.TransportError(f"nothing is bound; call bind() before {way}")
    try:
      getattr(self._synchronizer, way)()
    except RuntimeError as error:
      raise base.TransportError(
        f"Raiden's {way} of the {self._job}'s arrays failed: {error}"
      ) from error

  def release(self) -> None:
    """See `base.Endpoint`; the synchronizer stays for the next round."""
    if not self._arrays:
      return
    kinds = {}
    for x in self._arrays.values():
      kind = (x.shape, x.dtype, x.sharding)
      if kind not in kinds:
        kinds[kind] = _zeros(x.shape, x.dtype, sharding=x.sharding)
    self._placeholders = [
      kinds[x.shape, x.dtype, x.sharding] for x in self._arrays.values()
    ]
    jax.block_until_ready(self._placeholders)
    self._synchronizer.bind_weights(self._placeholders)
    self._arrays = {}

  def close(self) -> None:
    """See `base.Endpoint`."""
    if self._synchronizer is not None:
      self._synchronizer.shutdown()
      self._synchronizer = None
    self._arrays, self._placeholders = {}, []
    self._unit = None


def _check_addressable(arrays) -> None:
  """One process must hold all of a side."""
  problems = [
    f"`{name}` has shards on devices of other processes"
    for name, x in arrays.items()
    if not x.is_fully_addressable
  ]
  if problems:
    raise base.MismatchError(
      "the native transport moves what one process holds", problems
    )


class NativeController:
  """Raiden's controller, in the trainer's process."""

  def __init__(self, *, parallelism: int):
    """Starts the controller.

    Args:
      parallelism: Network streams of each transfer.
    """
    self._parallelism = parallelism
    self._known: dict[tuple[str, str], base.WorkUnit] = {}
    self._commands = raiden_commands.CommandClient()
    self._controller = _controller.RaidenController(
      port=0, worker_rpc_client=self._commands
    )
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="raiden-controller", daemon=True
    )
    self._thread.start()

  def register(self, unit: base.WorkUnit) -> None:
    """See `base.Controller`."""
    key = (unit.job, unit.replica)
    if self._known.get(key) == unit:
      return
    self._controller.register_work_unit(
      _raiden_id(unit),
      list(unit.endpoints),
      unit.control_address,
      mesh_shape=list(unit.mesh_shape),
      mesh_axes=list(unit.mesh_axes),
      host_subgrid=list(unit.host_subgrid) or None,
      variables=[
        _proto.VariableMetadataProto(
          name=v.name,
          shape=v.shape,
          mesh_shape=v.mesh_shape,
          layout=range(len(v.shape) - 1, -1, -1),
          item_size=jnp.dtype(v.dtype).itemsize,
          layer_idx=v.ordinal,
          sharding_spec=v.sharding_spec,
          global_shard_indices=v.global_shard_indices,
        )
        for v in unit.variables
      ],
    )
    self._known[key] = unit

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
    linear = any(u.linear_staging for u in (source, *destinations))
    self._commands.open(timeout_s)
    try:
      future = self._controller.start_transfer(
        src_units=[_raiden_id(source)],
        dst_units=[_raiden_id(u) for u in destinations],
        dst_mem_type=_controller.RaidenMemoryType.DRAM,
        use_block_chunks=True,
        is_sender=True,
        expected_block_count=0,
        uuid=uuid,
        req_id=request,
        group_size=1,
        parallelism=self._parallelism,
        skip_d2h=True,
        skip_tiling=(
          {v.ordinal: False for v in source.variables} if linear else None
        ),
      )
      waiting = asyncio.run_coroutine_threadsafe(
        _wait(future, timeout_s), self._loop
      )
      waiting.result(timeout_s + _CUT_S)
    # Whatever Raiden raises here means the same: the transfer failed.
    except Exception as error:
      self._commands.cut()
      late = isinstance(error, (TimeoutError, concurrent.futures.TimeoutError))
      raise base.TransportError(
        f"the transfer {request} did not end within {timeout_s:.0f} s; a"
        " rollout or the network stalled"
        if late
        else f"the transfer {request} failed: {type(error).__name__}: {error}"
      ) from error

  def close(self) -> None:
    """See `base.Controller`."""
    self._commands.close()
    if self._loop.is_running():
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join(timeout=_CUT_S)
    if not self._loop.is_running():
      self._loop.close()


async def _wait(future, timeout_s):
  return await asyncio.wait_for(future.wait(), timeout_s)


def _raiden_id(unit: base.WorkUnit) -> Any:
  return _controller.RaidenId(unit.job, unit.replica, "weights")
