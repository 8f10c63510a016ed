"""Raiden's FFI (wheel `tpu-sync-jax`): staging without the client's memory.

Under Pathways the weights live behind a proxy. The wheel's custom calls run
where the devices are and copy between them and host staging there; what the
client sees is a row of numbers a device that says where its staging is reached.
On CPU devices `ffi_cpu_handlers` answers the calls.

How the wheel behaves, and what is done about it:

* Each of its functions makes a new `jax.jit`, so every call would be compiled
  anew. They are traced once, inside a `jax.jit` of this module.
* They read `.sharding.spec` off the arrays, which traced ones do not have;
  `_Placed` carries the sharding beside the traced array.
* Sizes of shards are int32: a shard of 2^31 bytes or more is refused by name.
* It works out hosts from `mesh.local_mesh`, which under Pathways is the whole
  mesh. It is given shard info that is complete instead; see `hosts`.
* A synchronizer is found by its first shard number, kept by the process until
  it is destroyed, and reused by the next round.
* Its `destroy_weight_synchronizer` destroys all of the process, so it is called
  with the last endpoint.
"""

import collections.abc
import functools
import ipaddress
import itertools
import math
import threading
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np

from laneweave.sync.transport import (
  base,
  ffi_cpu_handlers,
  hosts,
  raiden_package,
  variables,
)

# Before any device is touched, like all of Raiden's native modules.
_ffi = raiden_package.load(raiden_package.FFI)

_LARGEST_SHARD = (1 << 31) - 1
_ROW = 6  # Four address words, data port, listener port.


class _Placed:
  """A traced array and its sharding, as the wheel asks for it.

  As a tree it is the array: what comes out of a trace is the bare one.
  """

  def __init__(self, x: Any, sharding: NamedSharding):
    self.x = x
    self.sharding = sharding
    self.shape = x.shape
    self.dtype = x.dtype


jax.tree_util.register_pytree_node(
  _Placed, lambda p: ((p.x,), None), lambda _, children: children[0]
)

_open_lock = threading.Lock()
_open: set[int] = set()
_numbers = itertools.count()


class FfiEndpoint:
  """One persistent synchronizer a host, reached by custom calls."""

  stages_apart = True

  def __init__(
    self,
    *,
    job: str,
    replica: str,
    parallelism: int,
    bind_ip: str,
    simulated_gbps: float = 0.0,
  ):
    """Keeps the settings; synchronizers are made by `bind` or `stage`.

    Args:
      job: "trainer" or "rollout".
      replica: Replica of the job.
      parallelism: Raiden's network streams.
      bind_ip: Address that the other side reaches this one by, on CPU devices.
        Others tell their own.
      simulated_gbps: Rate of a simulated link in Gbit/s, on CPU devices only;
        0: none.
    """
    self._job = job
    self._replica = replica
    self._parallelism = parallelism
    self._settings = ffi_cpu_handlers.Settings(
      bind_ip=bind_ip, simulated_gbps=simulated_gbps
    )
    self._number = next(_numbers)
    self._arrays: dict[str, Any] = {}
    self._described: tuple[base.Variable, ...] | None = None
    self._calls: _Calls | None = None
    self._reservation: ffi_cpu_handlers.Reservation | None = None
    self._unit: base.WorkUnit | None = None

  def allocate(
    self, target: collections.abc.Mapping[str, jax.ShapeDtypeStruct]
  ) -> dict[str, Any]:
    """See `base.Endpoint`; the copy to the devices makes new arrays."""
    return dict(target)

  def bind(self, arrays: collections.abc.Mapping[str, Any]) -> None:
    """See `base.Endpoint`; makes synchronizers where arrays are to arrive."""
    described = variables.variables_of(arrays)
    if described != self._described:
      mesh = _one_mesh(arrays)
      _check_sizes(arrays)
      self.close()
      self._prepare(mesh, arrays)
      self._described = described
    self._arrays = dict(arrays)
    if self._unit is None and not _are_arrays(arrays):
      self._take_rows(self._run("create", self._need().create))

  def _prepare(self, mesh, arrays):
    """Works out everything that stays the same from round to round."""
    found = hosts.find(mesh)
    platform = mesh.devices.flat[0].platform
    first = 0
    if platform == "cpu":
      ffi_cpu_handlers.register()
      self._reservation = ffi_cpu_handlers.reserve(self._settings, found.places)
      first = self._reservation.first
    elif self._settings.simulated_gbps:
      raise ValueError(
        f"`simulated_gbps` {self._settings.simulated_gbps:g} simulates a link"
        f" between CPU devices, and these are {platform}"
      )
    self._calls = _Calls(
      mesh=mesh,
      found=found,
      first=first,
      parallelism=self._parallelism,
      shapes=[
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_on(mesh, x.sharding))
        for x in arrays.values()
      ],
    )
    with _open_lock:
      _open.add(self._number)

  def _need(self) -> "_Calls":
    if self._calls is None or not self._arrays:
      raise base.TransportError(f"the {self._job} has nothing bound; bind()")
    return self._calls

  def _run(self, what, call, *arguments):
    """Calls into XLA and waits; its errors are a transport's."""
    try:
      return jax.block_until_ready(call(*arguments))
    except RuntimeError as error:
      raise base.TransportError(
        f"Raiden's FFI failed to {what} for the {self._job}: {error}"
      ) from error

  def _take_rows(self, rows):
    """Makes the work unit out of the endpoint rows."""
    calls = self._need()
    endpoints, listeners = decode_rows(np.asarray(rows))
    self._unit = base.WorkUnit(
      job=self._job,
      replica=self._replica,
      endpoints=endpoints,
      # One synchronizer a host, each with its listener.
      control_address=",".join(dict.fromkeys(listeners)),
      mesh_shape=tuple(calls.mesh.shape.values()),
      mesh_axes=tuple(calls.mesh.axis_names),
      linear_staging=calls.mesh.devices.flat[0].platform == "cpu",
      variables=self._described or (),
      host_subgrid=calls.found.subgrid or (),
    )

  def work_unit(self) -> base.WorkUnit:
    """See `base.Endpoint`; a trainer's is known once it has staged."""
    if self._unit is None:
      raise base.TransportError(
        "nothing is bound yet; call bind(), and stage() on the trainer"
      )
    return self._unit

  def stage(self) -> None:
    """See `base.Endpoint`."""
    calls = self._need()
    if not _are_arrays(self._arrays):
      raise base.TransportError(
        f"the {self._job} has bound shapes, and only arrays can be staged"
      )
    rows = self._run(
      "copy arrays to the host", calls.stage, list(self._arrays.values())
    )
    if self._unit is None:
      self._take_rows(rows)

  def load(self) -> dict[str, jax.Array]:
    """See `base.Endpoint`; new arrays."""
    calls = self._need()
    if self._unit is None:
      raise base.TransportError(
        f"the {self._job} has no synchronizer yet; call stage() before load()"
      )
    loaded = self._run("copy arrays to the devices", calls.load)
    return {
      name: x
      if x.sharding == bound.sharding
      else jax.device_put(x, bound.sharding)
      for (name, bound), x in zip(self._arrays.items(), loaded, strict=True)
    }

  def release(self) -> None:
    """See `base.Endpoint`; nothing but this class holds the arrays."""
    self._arrays = {}

  def close(self) -> None:
    """See `base.Endpoint`."""
    self._arrays, self._calls, self._described = {}, None, None
    self._unit = None
    if self._reservation is not None:
      self._reservation.close()
      self._reservation = None
    with _open_lock:
      last = _open == {self._number}
      _open.discard(self._number)
    if last:
      _ffi.destroy_weight_synchronizer()


class _Calls:
  """The wheel's functions for one set of arrays, each traced once."""

  def __init__(self, *, mesh, found, first, parallelism, shapes):
    self.mesh = mesh
    self.found = found
    self._shapes = shapes
    axes = mesh.axis_names
    info = np.array(
      [
        [first + position, slot, host, position]
        for position, (host, slot) in enumerate(found.places)
      ],
      np.int32,
    ).reshape(*mesh.devices.shape, 4)
    self._info = jax.device_put(
      info, NamedSharding(mesh, PartitionSpec(*axes, None))
    )
    sizes = np.array([_shard_bytes(s) for s in shapes], np.int32)
    self._sizes = jax.device_put(
      sizes, NamedSharding(mesh, PartitionSpec(None))
    )
    # The custom call needs an array to run beside, whatever it holds.
    self._anchor = jax.device_put(
      np.zeros(1, np.int32), NamedSharding(mesh, PartitionSpec(None))
    )
    self._options = {
      "parallelism": parallelism,
      "num_layers": len(shapes),
      "listener_port": 0,
      "num_shards": found.per_host,
    }

  @functools.cached_property
  def _stage(self):
    def call(arrays, info, sizes):
      placed = [
        _Placed(x, s.sharding)
        for x, s in zip(arrays, self._shapes, strict=True)
      ]
      return _ffi.init_weight_synchronizer_and_d2h(
        placed, info, self.mesh, sizes, **self._options
      )

    return jax.jit(call)

  def stage(self, arrays):
    """Makes synchronizers or finds them, and copies arrays to staging."""
    return self._stage(arrays, self._info, self._sizes)

  @functools.cached_property
  def _create(self):
    def call(anchor, info, sizes):
      placed = _Placed(anchor, NamedSharding(self.mesh, PartitionSpec(None)))
      return _ffi.init_weight_synchronizer(
        [placed], info, self.mesh, sizes, **self._options
      )

    return jax.jit(call)

  def create(self):
    """Makes synchronizers."""
    return self._create(self._anchor, self._info, self._sizes)

  @functools.cached_property
  def _load(self):
    return jax.jit(lambda info: _ffi.multi_h2d(self._shapes, info, self.mesh))

  def load(self):
    """Copies staging to new arrays."""
    return list(self._load(self._info))


def _are_arrays(arrays) -> bool:
  return all(isinstance(x, jax.Array) for x in arrays.values())


def _mesh_of(sharding) -> Mesh:
  mesh = getattr(sharding, "mesh", None)
  if isinstance(mesh, Mesh):
    return mesh
  devices = variables.mesh_devices(sharding) or []
  return Mesh(np.array(devices), ("device",))


def _on(mesh, sharding) -> NamedSharding:
  """A sharding on the common mesh; one device's has no axes to name."""
  spec = getattr(sharding, "spec", PartitionSpec())
  return NamedSharding(mesh, spec)


def _one_mesh(arrays) -> Mesh:
  """The mesh of all arrays, which have the same devices in the same order."""
  first, mesh = None, None
  problems = []
  for name, x in arrays.items():
    found = _mesh_of(x.sharding)
    if mesh is None:
      first, mesh = name, found
    if list(found.shape.items()) != list(mesh.shape.items()):
      problems.append(
        f"`{name}` lies on a mesh {dict(found.shape)} and `{first}` on"
        f" {dict(mesh.shape)}; place both on one mesh"
      )
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
      problems.append(f"`{name}` has shards on devices of other processes")
  if problems or mesh is None:
    raise base.MismatchError(
      "arrays that Raiden's FFI cannot take", problems or ["there are none"]
    )
  return mesh


def _shard_bytes(x) -> int:
  return math.prod(x.sharding.shard_shape(x.shape)) * np.dtype(x.dtype).itemsize


def _check_sizes(arrays) -> None:
  """Refuses shards whose size is no int32."""
  problems = [
    f"`{name}` {np.dtype(x.dtype).name}{list(x.shape)} has shards of"
    f" {list(x.sharding.shard_shape(x.shape))}, {_shard_bytes(x)} bytes"
    for name, x in arrays.items()
    if _shard_bytes(x) > _LARGEST_SHARD
  ]
  if problems:
    raise base.MismatchError(
      f"Raiden's FFI carries a shard's size as int32, {_LARGEST_SHARD} bytes at"
      " most; split these over more devices, or set `use_raiden_ffi` to False",
      problems,
    )


def decode_rows(rows: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
  """Where each device's staging is reached.

  Layout, as the wheel writes it: four words with the bytes of an IPv6 address
  in order (IPv4 mapped, ::ffff:a.b.c.d), data port, listener port.

  Args:
    rows: int32[..., 6], the leading axes those of the mesh.

  Returns:
    Data address and listener address of each device, in mesh order.

  Raises:
    base.TransportError: rows of another layout, or ports that are none.
  """
  rows = np.asarray(rows)
  if rows.dtype != np.int32 or rows.ndim < 1 or rows.shape[-1] != _ROW:
    raise base.TransportError(
      f"Raiden's FFI gave {rows.dtype.name}{list(rows.shape)} as endpoints, not"
      f" int32[..., {_ROW}]; the wheel is not the one of the lock file"
    )
  endpoints, listeners = [], []
  for row in rows.reshape(-1, _ROW):
    packed = ipaddress.IPv6Address(row[:4].astype("<i4").tobytes())
    mapped = packed.ipv4_mapped
    host = f"[{packed}]" if mapped is None else str(mapped)
    ports = [int(port) for port in row[4:]]
    if not all(0 < port < 1 << 16 for port in ports):
      raise base.TransportError(
        f"Raiden's FFI gave {ports} as data and listener port of {host}; a"
        " synchronizer does not listen"
      )
    endpoints.append(f"{host}:{ports[0]}")
    listeners.append(f"{host}:{ports[1]}")
  return tuple(endpoints), tuple(listeners)
