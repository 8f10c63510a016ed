"""TPU generations: the chip facts that models of time and memory rest on.

Nothing here is read from a device, and no kernel's values depend on it: block
shapes follow the VMEM of the chip a kernel is compiled for (`tiling`). These
figures turn counted bytes and counted instructions into predicted times.

Sources: HBM capacity and bandwidth are Google's published figures
(cloud.google.com/tpu/docs: v5e 819 GB/s, v5p 2765, v6e 1640, TPU7x 7380 a chip,
which JAX shows as two devices); VMEM is what Mosaic reports for each chip
(`pltpu.get_tpu_info`). The clocks of v5e and v5p follow from published peak
FLOP/s and the number of matrix units; those of v6e and TPU7x are estimates.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
  """What one JAX device of a generation has.

  Attributes:
    device_kind: What JAX calls the device.
    cores: TensorCores per JAX device, which share its HBM.
    hbm_bytes: Capacity of HBM.
    hbm_bytes_per_s: Bandwidth of HBM.
    vmem_bytes: VMEM per TensorCore.
    clock_hz: TensorCore clock; one VLIW bundle issues a cycle.
    devices_per_host: JAX devices of one host in the usual topologies.
  """

  device_kind: str
  cores: int
  hbm_bytes: int
  hbm_bytes_per_s: float
  vmem_bytes: int
  clock_hz: float
  devices_per_host: int


CHIPS = {
  "v5e": Chip(
    device_kind="TPU v5 lite",
    cores=1,
    hbm_bytes=16 << 30,
    hbm_bytes_per_s=819e9,
    vmem_bytes=128 << 20,
    clock_hz=1.5e9,
    devices_per_host=4,
  ),
  "v5p": Chip(
    device_kind="TPU v5",
    cores=2,
    hbm_bytes=95 << 30,
    hbm_bytes_per_s=2765e9,
    vmem_bytes=64 << 20,
    clock_hz=1.75e9,
    devices_per_host=4,
  ),
  "v6e": Chip(
    device_kind="TPU v6 lite",
    cores=1,
    hbm_bytes=32 << 30,
    hbm_bytes_per_s=1640e9,
    vmem_bytes=128 << 20,
    clock_hz=1.75e9,
    devices_per_host=4,
  ),
  "tpu7x": Chip(
    device_kind="TPU7x",
    cores=1,
    hbm_bytes=96 << 30,
    hbm_bytes_per_s=3690e9,
    vmem_bytes=64 << 20,
    clock_hz=1.9e9,
    devices_per_host=8,
  ),
}
