"""Compiles a program for a TPU that is not there, and counts what is in it.

Used in a process whose environment is that of one target
(`targets.environment`): libtpu reads it when it is imported.
"""

import collections.abc
import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

from laneweave.tools import blocks, bundles, hlo, targets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
  """A compiled program.

  Attributes:
    module: Its HLO.
    calls: Its Pallas kernels, as traced.
    kernels: Schedules of its kernels, Pallas's and XLA's.
    temp_bytes: HBM that it takes besides its arguments and results.
  """

  module: hlo.Module
  calls: list[blocks.Call]
  kernels: list[bundles.Kernel]
  temp_bytes: int

  @property
  def copies(self) -> int:
    """Instructions besides Pallas's kernels that touch HBM."""
    return hlo.copies(self.module)

  @property
  def moved_bytes(self) -> int:
    """Bytes read and written, a Pallas kernel's arrays counted once."""
    return hlo.moved_bytes(self.module)

  @property
  def launches(self) -> int:
    """Kernels that it starts."""
    return hlo.launches(self.module)

  def issue_us(self, clock_hz: float) -> float:
    """Microseconds for which one TensorCore issues its bundles."""
    return 1e6 * sum(k.cycles for k in self.kernels) / clock_hz


class Compiler:
  """Compiles for one device of a target."""

  def __init__(self, target: str, dump: pathlib.Path):
    """Makes the target's topology.

    Args:
      target: A key of `targets.TARGETS`, whose environment this process has.
      dump: Folder that libtpu dumps final bundles to.
    """
    topology = topologies.get_topology_desc(
      platform="tpu", topology_name=targets.TARGETS[target].topology
    )
    self._device = topology.devices[0]
    self._dump = dump

  def shape(
    self, shape: collections.abc.Sequence[int], dtype: Any
  ) -> jax.ShapeDtypeStruct:
    """An argument on the device."""
    return jax.ShapeDtypeStruct(
      tuple(shape), dtype, sharding=SingleDeviceSharding(self._device)
    )

  def _as_if_attached(self) -> contextlib.AbstractContextManager:
    """Names the device to code that asks for chip facts while tracing."""
    kind = AbstractDevice(
      device_kind=self._device.device_kind, num_cores=None, platform="tpu"
    )
    return jax.sharding.use_abstract_mesh(
      AbstractMesh((), (), abstract_device=kind)
    )

  def compile(
    self, function: collections.abc.Callable[..., Any], *arguments: Any
  ) -> Program:
    """Compiles a function.

    Args:
      function: To be jitted.
      *arguments: From `shape`.

    Returns:
      What is in the program.

    Raises:
      RuntimeError: XLA's own, of a program that does not fit the chip.
    """
    bundles.collect(self._dump)
    with self._as_if_attached():
      traced = jax.jit(function).trace(*arguments)
      compiled = traced.lower().compile()
    calls = blocks.calls(traced.jaxpr)
    dimensions = max(
      (sum(size > 1 for size in call.grid) for call in calls), default=1
    )
    return Program(
      module=hlo.parse(compiled.as_text() or ""),
      calls=calls,
      kernels=bundles.collect(self._dump, dimensions),
      temp_bytes=compiled.memory_analysis().temp_size_in_bytes,
    )
