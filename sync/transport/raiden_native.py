"""Raiden's native synchronizer and controller (wheel `tpu-sync-jax`).

One synchronizer a side lives as long as the session and is bound anew every
round, which is what makes rounds after the first cheap.

How Raiden behaves, and what is done about it:

* Bound with its buffer lock it deadlocks on the next bind, so the lock is
  skipped and this class keeps the bound arrays alive itself.
* `h2d` writes into the buffers of the bound arrays behind JAX's back. A JAX
  array whose value was once read on the host keeps a copy of that value, so a
  bound array must be new in every round and not be read before `load`.
* On CPU devices staging buffers are linear. `skip_tiling` must then be False
  for every variable, or the planner moves whole device tiles and permutes the
  data.
* Its ports accept bytes from anyone who reaches them. What lands is checked by
  the session before it is served.
"""

import asyncio
import collections.abc
import concurrent.futures
import threading

import jax
from tpu_sync.api.jax import weight_synchronizer
from tpu_sync.rpc import raiden_controller, raiden_service_pb2

from laneweave.sync.transport import base


class NativeEndpoint:
  """One persistent `WeightSynchronizer`."""

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
    self._synchronizer = None
    self._arrays: dict[str, jax.Array] = {}
    self._unit: base.WorkUnit | None = None

  def bind(self, arrays: collections.abc.Mapping[str, jax.Array]) -> None:
    """See `base.Endpoint`."""
    arrays = dict(arrays)
    bound = list(arrays.values())
    jax.block_until_ready(bound)
    if self._synchronizer is None:
      self._synchronizer = weight_synchronizer.WeightSynchronizer(
        bound,
        local_port=0,
        parallelism=self._parallelism,
        unsafe_skip_buffer_lock=True,
        listener_port=0,
        bind_ip=self._bind_ip,
      )
    else:
      self._synchronizer.bind_weights(bound)
    self._arrays = arrays
    if self._unit is None:
      self._unit = self._describe()

  def _describe(self):
    first = next(iter(self._arrays.values()))
    devices = base.mesh_devices(first.sharding)
    mesh = getattr(first.sharding, "mesh", None)
    address = f"{self._bind_ip}:{self._synchronizer.local_port}"
    return base.WorkUnit(
      job=self._job,
      replica=self._replica,
      endpoints=(address,) * len(devices),
      control_address=f"{self._bind_ip}:{self._synchronizer.listener_port}",
      mesh_shape=tuple(mesh.shape.values()) if mesh is not None else (1,),
      mesh_axes=tuple(mesh.axis_names) if mesh is not None else ("x",),
      linear_staging=devices[0].platform == "cpu",
      variables=base.variables_of(self._arrays),
    )

  def work_unit(self) -> base.WorkUnit:
    """See `base.Endpoint`."""
    if self._unit is None:
      raise base.TransportError("nothing is bound yet; call bind() first")
    return self._unit

  def stage(self) -> None:
    """See `base.Endpoint`."""
    self._synchronizer.d2h()

  def load(self) -> dict[str, jax.Array]:
    """See `base.Endpoint`; the bound arrays themselves."""
    self._synchronizer.h2d()
    jax.block_until_ready(list(self._arrays.values()))
    return dict(self._arrays)

  def release(self) -> None:
    """See `base.Endpoint`; the synchronizer stays for the next round."""
    self._arrays = {}

  def close(self) -> None:
    """See `base.Endpoint`."""
    if self._synchronizer is not None:
      self._synchronizer.shutdown()
      self._synchronizer = None
    self._arrays = {}
    self._unit = None


class NativeController:
  """Raiden's controller, in the trainer's process."""

  def __init__(self, *, parallelism: int):
    """Starts the controller.

    Args:
      parallelism: Network streams of each transfer.
    """
    self._parallelism = parallelism
    self._controller = raiden_controller.RaidenController(
      port=0,
      worker_rpc_client=raiden_controller.WeightSyncWorkerRpcClient(
        name_resolver=None
      ),
    )
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._loop.run_forever, name="raiden-controller", daemon=True
    )
    self._thread.start()

  def register(self, unit: base.WorkUnit) -> None:
    """See `base.Controller`."""
    self._controller.register_work_unit(
      _raiden_id(unit),
      list(unit.endpoints),
      unit.control_address,
      mesh_shape=list(unit.mesh_shape),
      mesh_axes=list(unit.mesh_axes),
      variables=[
        raiden_service_pb2.VariableMetadataProto(
          name=v.name,
          shape=v.shape,
          mesh_shape=v.mesh_shape,
          layout=range(len(v.shape) - 1, -1, -1),
          item_size=jax.numpy.dtype(v.dtype).itemsize,
          layer_idx=v.ordinal,
          sharding_spec=v.sharding_spec,
          global_shard_indices=v.global_shard_indices,
        )
        for v in unit.variables
      ],
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
    linear = any(u.linear_staging for u in (source, *destinations))
    future = self._controller.start_transfer(
      src_units=[_raiden_id(source)],
      dst_units=[_raiden_id(u) for u in destinations],
      dst_mem_type=raiden_controller.RaidenMemoryType.DRAM,
      use_block_chunks=True,
      is_sender=True,
      expected_block_count=0,
      uuid=uuid,
      req_id=request,
      group_size=1,
      parallelism=self._parallelism,
      skip_tiling=(
        {v.ordinal: False for v in source.variables} if linear else None
      ),
    )
    waiting = asyncio.run_coroutine_threadsafe(
      _wait(future, timeout_s), self._loop
    )
    try:
      waiting.result(timeout_s + 5)
    except (TimeoutError, concurrent.futures.TimeoutError):
      waiting.cancel()
      raise base.TransportError(
        f"the transfer {request} did not end within {timeout_s:.0f} s; the"
        " rollout or the network stalled"
      ) from None
    # Whatever Raiden raises here means the same: the transfer failed.
    except Exception as error:
      raise base.TransportError(
        f"the transfer {request} failed: {type(error).__name__}: {error}"
      ) from error

  def close(self) -> None:
    """See `base.Controller`."""
    if self._loop.is_running():
      self._loop.call_soon_threadsafe(self._loop.stop)
      self._thread.join(timeout=5)


async def _wait(future, timeout_s):
  return await asyncio.wait_for(future.wait(), timeout_s)


def _raiden_id(unit: base.WorkUnit) -> raiden_controller.RaidenId:
  return raiden_controller.RaidenId(unit.job, unit.replica, "weights")
