"""Device meshes from strings such as `fsdp=2,tp=2`."""

import collections.abc
import dataclasses
import glob
import math
import os
import re
from typing import Any

_COUNT_FLAG = "--xla_force_host_platform_device_count"
_ACCELERATORS = ("/dev/accel*", "/dev/vfio/[0-9]*", "/dev/nvidia0", "/dev/kfd")
_NAME = re.compile(r"[A-Za-z_]\w*")
# Far more chips than any pod has; what is larger is a slip of the finger.
_MOST_DEVICES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSpec:
  """Names and sizes of the axes of a mesh, major first.

  Attributes:
    axes: (name, size) of each axis.
  """

  axes: tuple[tuple[str, int], ...]

  @property
  def size(self) -> int:
    """Number of devices."""
    return math.prod(size for _, size in self.axes)

  @property
  def shape(self) -> dict[str, int]:
    """Size by name."""
    return dict(self.axes)

  def __str__(self) -> str:
    return ",".join(f"{name}={size}" for name, size in self.axes)

  def build(self, devices: collections.abc.Sequence[Any], flag: str) -> Any:
    """The mesh on the first of these devices, in their order.

    Args:
      devices: Devices to choose from.
      flag: Flag that gave the mesh, for the error.

    Returns:
      A `jax.sharding.Mesh`.

    Raises:
      ValueError: there are too few devices.
    """
    # JAX is imported late: the launcher parses meshes and never loads it.
    import jax
    import numpy as np

    if len(devices) < self.size:
      raise ValueError(
        f"`--{flag}` {self} needs {self.size} devices, and there are"
        f" {len(devices)}; choose smaller axes, or JAX_PLATFORMS=cpu for"
        " virtual devices"
      )
    names, sizes = zip(*self.axes, strict=True)
    grid = np.array(devices[: self.size]).reshape(sizes)
    return jax.sharding.Mesh(grid, names)


def parse(text: str, flag: str) -> MeshSpec:
  """Reads a mesh.

  Args:
    text: `axis=size,...`.
    flag: Flag that gave it, for the error.

  Returns:
    The mesh's axes.

  Raises:
    ValueError: text of another form.
  """
  axes = []
  for item in text.split(","):
    name, equals, size = (part.strip() for part in item.partition("="))
    if not equals or not _NAME.fullmatch(name) or not size.isdecimal():
      raise ValueError(
        f"`--{flag}` {text!r} is not a mesh: {item.strip()!r} is no"
        " `axis=size`; write it like fsdp=2,tp=2"
      )
    if len(size) > 7 or int(size) < 1:
      raise ValueError(
        f"`--{flag}` {text!r}: axis `{name}` has size {size}; a size is at"
        " least 1"
      )
    axes.append((name, int(size)))
  names = [name for name, _ in axes]
  twice = next((n for n in names if names.count(n) > 1), None)
  if twice is not None:
    raise ValueError(f"`--{flag}` {text!r} has the axis `{twice}` twice")
  spec = MeshSpec(axes=tuple(axes))
  if spec.size > _MOST_DEVICES:
    raise ValueError(f"`--{flag}` {text!r} has {spec.size} devices")
  return spec


def prepare_platform(count: int) -> None:
  """Makes the CPU platform offer at least this many devices.

  Must be called before JAX starts a platform. Where there is no accelerator
  and nobody chose a platform, CPU is chosen: looking for a TPU takes time, and
  two processes that do so at once get into each other's way. A larger count
  that is already set in XLA_FLAGS stays; other platforms are not affected.

  Args:
    count: Number of devices.
  """
  if not os.environ.get("JAX_PLATFORMS") and not _has_accelerator():
    os.environ["JAX_PLATFORMS"] = "cpu"
  flags = os.environ.get("XLA_FLAGS", "").split()
  others = [f for f in flags if not f.startswith(_COUNT_FLAG)]
  for flag in flags:
    value = flag.partition("=")[2]
    if flag.startswith(_COUNT_FLAG) and value.isdecimal():
      count = max(count, int(value))
  os.environ["XLA_FLAGS"] = " ".join([*others, f"{_COUNT_FLAG}={count}"])


def _has_accelerator() -> bool:
  """Whether the machine has a device file of a TPU or GPU."""
  return any(glob.glob(pattern) for pattern in _ACCELERATORS)
