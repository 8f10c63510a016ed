"""Raiden's FFI on CPU devices: the custom calls, done by this host.

The wheel registers its handlers with the XLA that it carries, not with
jaxlib's, so on CPU its calls are found by nobody. These are handlers of the
same names, registered with jaxlib for platform "cpu" and backed by Raiden's own
core: `WeightSynchronizer.test_only_create_cpu_instance`, whose staging buffers,
ports and transfers are the real ones. They copy between a call's buffers and
staging.

One synchronizer stands for one host. A call tells which one by its shard info,
int32 `[shard, slot, host, position]`: `slot` counts the host's devices and
`shard - position` is the first shard of one set of devices, so that several
sets can live in one process. `reserve` gives out shards for that; a caller
without a reservation numbers its shards from 0.

Every call is checked before a byte is touched. What is wrong comes back as an
XLA error. A call that comes while its synchronizer is destroyed either ends or
fails; memory is freed after it.
"""

import collections.abc
import ctypes
import dataclasses
import ipaddress
import math
import pathlib
import threading
from typing import Any

from absl import logging
import jax

from laneweave.sync.transport import ffi_abi, raiden_package

_synchronizer = raiden_package.load(raiden_package.NATIVE)

_FIRST_RESERVED = 1 << 20  # Shards below are those of unreserved callers.
_MOST_SHARDS = 1 << 12  # Devices of one host.
_MOST_STREAMS = 1 << 8
_LARGEST_PORT = (1 << 16) - 1
_ADDRESS_WORDS = 4
_STAGING_EXTRA = 1 << 18  # Bytes the core adds to every staging buffer.


class _CallError(Exception):
  """What a call is refused with."""

  def __init__(self, code: int, message: str):
    super().__init__(message)
    self.code = code


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
  """What a custom call cannot carry.

  Attributes:
    bind_ip: Address that the other side reaches this host by.
    simulated_gbps: Rate of a simulated link in Gbit/s, each way; 0: none.
  """

  bind_ip: str = "127.0.0.1"
  simulated_gbps: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Group:
  """A host's synchronizer and what it was made for."""

  synchronizer: Any
  settings: Settings
  sizes: tuple[int, ...]
  num_shards: int
  parallelism: int


class _Table:
  """All synchronizers of this process."""

  def __init__(self):
    self.lock = threading.Lock()
    self.groups: dict[tuple[int, int], _Group] = {}
    self.shards: dict[int, tuple[tuple[int, int], int]] = {}
    # By first shard: settings, and the position of every (host, slot).
    self.reserved: dict[int, tuple[Settings, dict[tuple[int, int], int]]] = {}
    self.next = _FIRST_RESERVED

  def find(self, shard: int) -> tuple[_Group, int]:
    """The synchronizer and slot of a shard."""
    with self.lock:
      key, slot = self.shards.get(shard, (None, 0))
      if key is None:
        raise _CallError(
          ffi_abi.NOT_FOUND,
          f"shard {shard} has no synchronizer; it was destroyed or never made",
        )
      return self.groups[key], slot

  def drop(self, first: int) -> None:
    """Forgets the synchronizers of one set of devices."""
    with self.lock:
      self.reserved.pop(first, None)
      gone = {key: g for key, g in self.groups.items() if key[0] == first}
      for key in gone:
        del self.groups[key]
      self.shards = {
        shard: place
        for shard, place in self.shards.items()
        if place[0] not in gone
      }
    # The last reference goes here, outside the lock, or with a call that is
    # still under way.
    del gone


_table = _Table()


class Reservation:
  """Shards of one set of devices.

  Attributes:
    first: The first shard.
  """

  def __init__(self, first: int):
    self.first = first

  def close(self) -> None:
    """Destroys the synchronizers of these shards; idempotent."""
    _table.drop(self.first)


def reserve(
  settings: Settings, places: collections.abc.Sequence[tuple[int, int]]
) -> Reservation:
  """Gives out shards that no other set of devices of this process has.

  Args:
    settings: Of the synchronizers.
    places: (host, slot) of each device, by position in the mesh.

  Returns:
    The shards.
  """
  with _table.lock:
    first = _table.next
    _table.next += len(places)
    _table.reserved[first] = (
      settings,
      {place: position for position, place in enumerate(places)},
    )
  return Reservation(first)


def _create(call: "_Call", info, sizes_at: int) -> tuple[_Group, int]:
  """Finds or makes the synchronizer of a call's shard."""
  shard, slot, host, position = _shard_info(info)
  sizes = call.integers_of(sizes_at)
  num_layers = call.attribute("num_layers", 1, (1 << 31) - 1)
  num_shards = call.attribute("num_shards", 1, _MOST_SHARDS)
  parallelism = call.attribute("parallelism", 1, _MOST_STREAMS)
  local_port = call.attribute("local_port", 0, _LARGEST_PORT)
  listener_port = call.attribute("listener_port", -1, _LARGEST_PORT)
  if len(sizes) != num_layers or any(size < 0 for size in sizes):
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT,
      f"{len(sizes)} sizes from {min(sizes, default=0)} bytes on for"
      f" {num_layers} layers; one size of at least 0 bytes a layer is needed",
    )
  if min(shard, slot, host) < 0 or slot >= num_shards:
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT,
      f"shard {shard} in slot {slot} of host {host} with {num_shards} shards a"
      " host",
    )
  key = (shard - position, host)
  with _table.lock:
    group = _table.groups.get(key)
    taken = {s: place for s, place in _table.shards.items() if place[0] == key}
    if _table.shards.get(shard, (key, slot)) != (key, slot) or any(
      other != shard and place == (key, slot) for other, place in taken.items()
    ):
      raise _CallError(
        ffi_abi.INVALID_ARGUMENT,
        f"shard {shard} or slot {slot} of host {host} is another one's",
      )
    if group is None:
      group = _make(
        key, sizes, num_shards, parallelism, local_port, listener_port
      )
      _table.groups[key] = group
    wanted = (sizes, num_shards, parallelism)
    found = (group.sizes, group.num_shards, group.parallelism)
    if wanted != found:
      raise _CallError(
        ffi_abi.FAILED_PRECONDITION,
        f"host {host} has a synchronizer of {len(group.sizes)} layers,"
        f" {sum(group.sizes)} bytes, {group.num_shards} shards and"
        f" {group.parallelism} streams, and the call wants {len(sizes)},"
        f" {sum(sizes)}, {num_shards} and {parallelism}; destroy it first",
      )
    _table.shards[shard] = (key, slot)
  return group, slot


def _make(key, sizes, num_shards, parallelism, local_port, listener_port):
  """Makes a host's synchronizer; the table is locked."""
  first, host = key
  needed = num_shards * (sum(sizes) + len(sizes) * _STAGING_EXTRA)
  if needed > (free := _free_bytes()):
    raise _CallError(
      ffi_abi.RESOURCE_EXHAUSTED,
      f"staging of {num_shards} shards needs {needed} bytes of host memory, and"
      f" {free} are free",
    )
  settings, positions = _table.reserved.get(first, (Settings(), None))
  if positions is None:
    # As the wheel numbers shards when nothing else is said.
    indices = [host * num_shards + slot for slot in range(num_shards)]
  else:
    indices = [positions.get((host, slot), -1) for slot in range(num_shards)]
    if -1 in indices:
      raise _CallError(
        ffi_abi.INVALID_ARGUMENT,
        f"host {host} has {num_shards} shards in the call, and"
        f" {sum(i >= 0 for i in indices)} of them in its reservation",
      )
  made = _synchronizer.WeightSynchronizer.test_only_create_cpu_instance(
    num_layers=len(sizes),
    num_shards=num_shards,
    slice_byte_size=list(sizes),
    local_port=local_port,
    parallelism=parallelism,
    listener_port=None if listener_port < 0 else listener_port,
    bind_ip=settings.bind_ip,
    global_shard_indices=indices,
    test_only_simulated_egress_gbps=settings.simulated_gbps,
    test_only_simulated_ingress_gbps=settings.simulated_gbps,
  )
  return _Group(
    synchronizer=made,
    settings=settings,
    sizes=sizes,
    num_shards=num_shards,
    parallelism=parallelism,
  )


def _free_bytes() -> int:
  """Host memory that can be had without swapping."""
  text = pathlib.Path("/proc/meminfo").read_text()
  kib = next(
    line.split()[1]
    for line in text.splitlines()
    if line.startswith("MemAvailable:")
  )
  return int(kib) * 1024


def _shard_info(info) -> tuple[int, int, int, int]:
  if len(info) < 3:
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT,
      f"shard info has {len(info)} numbers; shard, slot and host are needed",
    )
  return info[0], info[1], info[2], info[3] if len(info) > 3 else info[0]


class _Call:
  """One call in the execute stage."""

  def __init__(self, frame: Any):
    try:
      self.args = ffi_abi.buffers(frame.args, "args", ffi_abi.ARG_BUFFER)
      self.rets = ffi_abi.buffers(frame.rets, "rets", ffi_abi.RET_BUFFER)
    except ValueError as error:
      raise _CallError(ffi_abi.INVALID_ARGUMENT, str(error)) from error
    self._attributes = ffi_abi.integers(frame.attrs)

  def attribute(self, name: str, least: int, most: int) -> int:
    """An int32 attribute in a range."""
    value = self._attributes.get(name)
    if value is None or not least <= value <= most:
      raise _CallError(
        ffi_abi.INVALID_ARGUMENT,
        f"attribute `{name}` is {value}, not an int32 from {least} to {most}",
      )
    return value

  def count(self, args: int | None, rets: int) -> None:
    """Checks how many buffers there are."""
    if (args is not None and len(self.args) != args) or len(self.rets) != rets:
      raise _CallError(
        ffi_abi.INVALID_ARGUMENT,
        f"{len(self.args)} arguments and {len(self.rets)} results;"
        f" {'any' if args is None else args} and {rets} are needed",
      )

  def integers_of(self, index: int) -> tuple[int, ...]:
    """The values of an int32 argument."""
    if index >= len(self.args):
      raise _CallError(ffi_abi.INVALID_ARGUMENT, f"argument {index} is missing")
    return tuple(_int32s(self.args[index], f"argument {index}"))

  def shard(self, index: int) -> int:
    """The shard that an argument begins with."""
    info = self.integers_of(index)
    if not info:
      raise _CallError(
        ffi_abi.INVALID_ARGUMENT, f"argument {index} names no shard"
      )
    return info[0]


def _int32s(buffer, what: str) -> "ctypes.Array[ctypes.c_int32]":
  """The numbers of an int32 buffer, in place."""
  size = math.prod(ffi_abi.dims(buffer))
  if buffer.dtype != ffi_abi.DTYPE_S32 or (size and not buffer.data):
    raise _CallError(ffi_abi.INVALID_ARGUMENT, f"{what} is no int32 array")
  if size == 0:
    return (ctypes.c_int32 * 0)()
  return (ctypes.c_int32 * size).from_address(buffer.data)


def _check_size(buffer, group: _Group, layer: int, what: str) -> int:
  """Bytes of a buffer, which must be a layer's."""
  item_size = ffi_abi.ITEM_SIZES.get(buffer.dtype)
  dims = ffi_abi.dims(buffer)
  if item_size is None:
    raise _CallError(
      ffi_abi.UNIMPLEMENTED,
      f"{what} of layer {layer} has dtype {buffer.dtype} of XLA's FFI, whose"
      " elements do not fill whole bytes",
    )
  size = math.prod(dims) * item_size
  if not 0 <= layer < len(group.sizes) or size != group.sizes[layer]:
    expected = dict(enumerate(group.sizes)).get(layer)
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT,
      f"{what} of layer {layer} has shape {list(dims)} and {size} bytes;"
      + (
        f" there are {len(group.sizes)} layers"
        if expected is None
        else f" the synchronizer was made for {expected}"
      ),
    )
  if size and not buffer.data:
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT, f"{what} of layer {layer} has no memory"
    )
  return size


def _copy(group: _Group, slot: int, layer: int, buffer, size: int, to) -> None:
  """Copies between a buffer and staging; ctypes lets go of the GIL."""
  if size == 0:
    return
  staging = group.synchronizer.get_host_buffer(layer, slot)
  if staging.nbytes < size:
    raise _CallError(
      ffi_abi.INTERNAL,
      f"staging of layer {layer} has {staging.nbytes} bytes, not {size}",
    )
  if to == "staging":
    ctypes.memmove(staging.ctypes.data, buffer.data, size)
  else:
    ctypes.memmove(buffer.data, staging.ctypes.data, size)


def _tell(call: _Call, group: _Group) -> None:
  """Writes the endpoint row: address words, data port, listener port."""
  row = _int32s(call.rets[0], "result 0")
  with_listener = call.attribute("listener_port", -1, _LARGEST_PORT) >= 0
  needed = _ADDRESS_WORDS + 1 + with_listener
  if len(row) != needed:
    raise _CallError(
      ffi_abi.INVALID_ARGUMENT,
      f"result 0 has {len(row)} numbers; the endpoint takes {needed}",
    )
  address = ipaddress.ip_address(group.settings.bind_ip)
  packed = (
    address.packed
    if address.version == 6
    else b"\0" * 10 + b"\xff\xff" + address.packed
  )
  for i in range(_ADDRESS_WORDS):
    row[i] = int.from_bytes(packed[4 * i : 4 * i + 4], "little", signed=True)
  row[_ADDRESS_WORDS] = group.synchronizer.local_port
  if with_listener:
    row[_ADDRESS_WORDS + 1] = group.synchronizer.listener_port


def _init(call: _Call) -> None:
  # An anchor, shard info and sizes; more anchors in direct buffer mode.
  call.count(None, 1)
  group, _ = _create(call, call.integers_of(1), 2)
  _tell(call, group)


def _init_and_d2h(call: _Call) -> None:
  call.count(None, 1)
  info = call.integers_of(0)
  num_layers = call.attribute("num_layers", 1, (1 << 31) - 1)
  call.count(2 + num_layers, 1)
  group, slot = _create(call, info, 1)
  sizes = [
    _check_size(buffer, group, layer, "the array")
    for layer, buffer in enumerate(call.args[2:])
  ]
  for layer, (buffer, size) in enumerate(
    zip(call.args[2:], sizes, strict=True)
  ):
    _copy(group, slot, layer, buffer, size, "staging")
  _tell(call, group)


def _multi_h2d(call: _Call) -> None:
  group, slot = _table.find(call.shard(0))
  call.count(1, len(group.sizes))
  sizes = [
    _check_size(buffer, group, layer, "the result")
    for layer, buffer in enumerate(call.rets)
  ]
  for layer, (buffer, size) in enumerate(zip(call.rets, sizes, strict=True)):
    _copy(group, slot, layer, buffer, size, "device")


def _h2d(call: _Call) -> None:
  call.count(1, 1)
  group, slot = _table.find(call.shard(0))
  layer = call.attribute("layer_idx", 0, len(group.sizes) - 1)
  size = _check_size(call.rets[0], group, layer, "the result")
  _copy(group, slot, layer, call.rets[0], size, "device")


def _d2h(call: _Call) -> None:
  call.count(2, 1)
  group, slot = _table.find(call.shard(1))
  layer = call.attribute("layer_idx", 0, len(group.sizes) - 1)
  size = _check_size(call.args[0], group, layer, "the array")
  _check_size(call.rets[0], group, layer, "the result")
  _copy(group, slot, layer, call.args[0], size, "staging")
  if size and call.rets[0].data != call.args[0].data:
    ctypes.memmove(call.rets[0].data, call.args[0].data, size)


# The second name of each is that of direct buffer mode.
TARGETS = {
  "init_weight_synchronizer": _init,
  "raiden_weight_synchronizer_create": _init,
  "init_weight_synchronizer_and_d2h": _init_and_d2h,
  "raiden_weight_synchronizer_create_and_d2h": _init_and_d2h,
  "ws_multi_h2d": _multi_h2d,
  "raiden_weight_synchronizer_multi_h2d": _multi_h2d,
  "ws_h2d": _h2d,
  "raiden_weight_synchronizer_h2d": _h2d,
  "ws_d2h": _d2h,
  "raiden_weight_synchronizer_d2h": _d2h,
}


def _handler(name: str, work: collections.abc.Callable[[_Call], None]) -> Any:
  """A C function that runs `work` and turns what it raises into XLA errors."""

  def handle(address: int) -> int | None:
    frame = ffi_abi.CallFrame.from_address(address)
    # Nothing may leave this function but an error of XLA: ctypes would print
    # any other and report success.
    try:
      if frame.extension_start and ffi_abi.answer_metadata(frame):
        return None
      problems = ffi_abi.check_frame(frame)
      if problems:
        return ffi_abi.make_error(
          frame,
          ffi_abi.FAILED_PRECONDITION,
          f"{name}: jaxlib's runtime is not the one of its FFI header:"
          f" {'; '.join(problems)}",
        )
      if frame.stage == ffi_abi.STAGE_EXECUTE:
        work(_Call(frame))
    except _CallError as error:
      return ffi_abi.make_error(frame, error.code, f"{name}: {error}")
    except BaseException as error:  # noqa: BLE001
      return ffi_abi.make_error(
        frame, ffi_abi.INTERNAL, f"{name}: {type(error).__name__}: {error}"
      )
    return None

  return ffi_abi.HANDLER(handle)


_registering = threading.Lock()
# Kept for as long as the process: XLA calls into them.
_handlers: dict[str, Any] = {}


def register() -> None:
  """Registers the handlers with jaxlib for platform "cpu"; idempotent.

  Raises:
    ffi_abi.AbiError: jaxlib's FFI is laid out otherwise than known here.
  """
  with _registering:
    if _handlers:
      return
    ffi_abi.check_header(ffi_abi.read_header())
    made = {name: _handler(name, work) for name, work in TARGETS.items()}
    for name, handler in made.items():
      jax.ffi.register_ffi_target(
        name, jax.ffi.pycapsule(handler), platform="cpu"
      )
    _handlers.update(made)
    logging.info("%d handlers of Raiden's FFI registered for CPU", len(made))
