"""What one side does, from the checkpoint to the last round."""

import collections.abc
import contextlib
import dataclasses
import pathlib
import traceback
from typing import Any

import jax
from jax.sharding import NamedSharding
import numpy as np

from laneweave.sync import checkpoint
from laneweave.sync import flags
from laneweave.sync import logical_axes
from laneweave.sync import memory
from laneweave.sync import model_config
from laneweave.sync import plan as plan_lib
from laneweave.sync import progress
from laneweave.sync import reference
from laneweave.sync import round_weights
from laneweave.sync import session
from laneweave.sync import shards
from laneweave.sync import tree
from laneweave.sync.config import SyncConfig
from laneweave.sync.transport import create

Devices = collections.abc.Callable[[], list[jax.Device]]


class InputError(ValueError):
  """Flags, a configuration or a checkpoint that cannot be used."""


class JobError(RuntimeError):
  """A round that was not published, or weights that are wrong."""


@contextlib.contextmanager
def _blames_input():
  """What goes wrong inside is the flags' or the input's fault."""
  try:
    yield
  except (ValueError, RuntimeError) as error:
    raise InputError(str(error)) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
  """What both sides make of the flags, without touching a device.

  Attributes:
    options: The flags' values.
    opened: The checkpoint; closed by `close`.
    originals: The checkpoint's name of each weight, by canonical name.
    cfg: The sync's configuration.
    plan: The conversion.
    remarks: What looks odd.
  """

  options: flags.Options
  opened: checkpoint.Checkpoint
  originals: dict[str, str]
  cfg: SyncConfig
  plan: plan_lib.Plan
  remarks: tuple[str, ...]

  def read(self, name: str) -> np.ndarray:
    """A weight of the checkpoint, by canonical name."""
    return self.opened.read(self.originals[name])

  def place(self, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Reads the weights and puts them on the trainer's mesh, one by one."""
    rules = self.options.rules["trainer"]
    arrays = {}
    for entry in self.plan.entries:
      for name in entry.sources:
        layout = entry.layout
        logical = logical_axes.of_stacked(
            name, len(layout.shape), layout.scan_axes
        )
        spec = rules.assign(layout.shape, logical).spec
        arrays[name] = jax.device_put(
            self.read(name),
            NamedSharding(mesh, shards.to_partition_spec(spec)),
        )
    return jax.block_until_ready(arrays)

  def target(self, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Shapes and shardings of the rollout's arrays on its mesh."""
    rules = self.options.rules["rollout"]
    target = {}
    for name, x in self.plan.outputs().items():
      logical = logical_axes.of_block(name, len(x.shape))
      spec = rules.assign(x.shape, logical).spec
      target[name] = jax.ShapeDtypeStruct(
          x.shape,
          x.dtype,
          sharding=NamedSharding(mesh, shards.to_partition_spec(spec)),
      )
    return target


def set_up(options: flags.Options) -> Setup:
  """Opens the checkpoint and plans the conversion.

  Args:
    options: The flags' values.

  Returns:
    The setup; its checkpoint is open.

  Raises:
    InputError: the flags or the input cannot be used.
  """
  with _blames_input():
    opened = checkpoint.open_checkpoint(options.checkpoint)
    try:
      return _set_up(options, opened)
    except BaseException:
      opened.close()
      raise


def _set_up(options, opened) -> Setup:
  flat = tree.flatten(opened.shapes)
  # `flatten` keeps the leaves and their order.
  originals = dict(zip(flat, opened.shapes, strict=True))
  fields = model_config.load(options.maxtext_config, options.checkpoint)
  cfg, remarks = model_config.derive(
      fields,
      flat,
      options.rules["rollout"],
      moe_lane_size=options.moe_lane_size,
      weight_dtype=options.weight_dtype,
      rollout_backend=options.rollout_backend,
      kernel_backend=options.kernel_backend,
      weight_sync_debug=options.weight_sync_debug,
  )
  return Setup(
      options=options,
      opened=opened,
      originals=originals,
      cfg=cfg,
      plan=plan_lib.make_plan(flat, cfg),
      remarks=remarks,
  )


def run(
    side: str, options: flags.Options, link: progress.Link, devices: Devices
) -> bool:
  """Runs one side and tells the link how it ended.

  Args:
    side: "trainer" or "rollout".
    options: The flags' values.
    link: Where events go.
    devices: Gives the devices the side may use; called once, after the
      transport's native code is loaded.

  Returns:
    Whether it went well.
  """
  work = {"trainer": _trainer, "rollout": _rollout}[side]
  try:
    setup = set_up(options)
    with setup.opened:
      version = work(setup, link, devices)
  except Exception as error:  # noqa: BLE001
    is_input = isinstance(error, InputError)
    if not isinstance(error, (InputError, JobError)):
      traceback.print_exc()
    text = " ".join(str(error).split()) or type(error).__name__
    link.emit(
        "failed",
        error=text[:_LONGEST_ERROR],
        is_input=is_input,
        peak_rss_bytes=memory.peak_rss_bytes(),
    )
    return False
  link.emit(
      "done",
      serving_version=version,
      peak_rss_bytes=memory.peak_rss_bytes(),
  )
  return True


def _verify_mode(options) -> str:
  """What the sessions check; the reference comes on top of fingerprints."""
  return "off" if options.verify == "off" else "fingerprint"


def _trainer(setup: Setup, link: progress.Link, devices: Devices) -> int:
  """The trainer's rounds; returns the last version."""
  options = setup.options
  address = options.controller_address or ":0"
  with _blames_input():
    sync = session.TrainerSync(
        setup.cfg,
        transport=options.transport,
        parallelism=options.parallelism,
        bind_ip=options.bind_ip,
        control_port=int(address.rpartition(":")[2]),
        verify=_verify_mode(options),
    )
  with contextlib.closing(sync):
    with _blames_input():
      mesh = options.trainer_mesh.build(devices(), "trainer_mesh")
    link.emit(
        "listening", address=sync.control_address, transport=sync.transport
    )
    link.emit("plan", **_plan_fields(setup))
    arrays = setup.place(mesh)
    for number in range(1, options.rounds + 1):
      link.emit("phase", round=number, phase="convert")
      if number > 1:
        arrays = round_weights.step(arrays, number - 1, number)
        jax.block_until_ready(arrays)
      sync.prepare(arrays, version=number)
      link.emit("phase", round=number, phase="transfer")
      outcome = sync.serve_round(options.timeout_s)
      _end_round(link, number, outcome, sync.timings)
  return options.rounds


def _end_round(link, number, outcome, timings) -> None:
  """Tells how a round ended; raises unless every rollout published it."""
  seconds = dict(timings)
  reasons = []
  mismatched = set()
  for replica, told in outcome.replicas.items():
    seconds.update(told.timings)
    mismatched.update(told.mismatched)
    if told.reason:
      reasons.append(f"rollout {replica}: {told.reason}")
  link.emit(
      "round",
      round=number,
      version=outcome.version,
      outcome=outcome.outcome,
      seconds=seconds,
      mismatched=sorted(mismatched),
      reason="; ".join(reasons),
  )
  if outcome.outcome != session.PUBLISHED:
    raise JobError(
        f"round {number} is {outcome.outcome}"
        + (f": {'; '.join(reasons)}" if reasons else "")
    )


def _rollout(setup: Setup, link: progress.Link, devices: Devices) -> int | None:
  """The rollout's rounds; returns the version it serves at the end."""
  options = setup.options
  with _blames_input():
    # Loads the transport's native code, which has to come before devices.
    create.resolve_name(options.transport, setup.cfg.use_raiden_ffi)
    mesh = options.rollout_mesh.build(devices(), "rollout_mesh")
  target = setup.target(mesh)
  address = options.controller_address
  if address in (None, flags.ADDRESS_FROM_STDIN):
    address = link.address(options.timeout_s)
  with _blames_input():
    sync = session.RolloutSync(
        target,
        cfg=setup.cfg,
        control_address=address,
        transport=options.transport,
        parallelism=options.parallelism,
        bind_ip=options.bind_ip,
        verify=_verify_mode(options),
    )
  with contextlib.closing(sync):
    link.emit("plan", **_plan_fields(setup))
    sync.join(options.timeout_s)
    number = 0
    while (manifest := sync.next_round(options.timeout_s)) is not None:
      number = manifest.version
      _receive(sync, manifest, options, link)
    if number != options.rounds:
      raise JobError(
          f"the trainer ended after round {number} of {options.rounds}; both"
          " sides need the same `--rounds`"
      )
    if options.verify == "reference":
      _compare(setup, sync.serving, number, link)
    return sync.serving_version


def _receive(sync, manifest, options, link) -> None:
  """One round on the rollout."""
  number = manifest.version
  fields = {"round": number, "version": manifest.version}
  try:
    link.emit("phase", round=number, phase="receive")
    sync.bind(manifest)
    sync.receive(options.timeout_s)
    link.emit("phase", round=number, phase="verify")
    mismatched = sync.verify()
    if mismatched:
      raise JobError(
          f"round {number}: {len(mismatched)} tensors are not what was sent,"
          f" first `{mismatched[0]}`"
      )
    link.emit("phase", round=number, phase="publish")
    sync.publish()
  except Exception as error:
    reason = " ".join(str(error).split())
    outcome = session.UNKNOWN
    with contextlib.suppress(Exception):
      sync.abort(reason)
      outcome = session.ABORTED
    link.emit(
        "round",
        **fields,
        outcome=outcome,
        seconds=dict(sync.timings),
        mismatched=list(mismatched) if "mismatched" in locals() else [],
        reason=reason,
    )
    raise
  link.emit(
      "round",
      **fields,
      outcome=session.PUBLISHED,
      seconds=dict(sync.timings),
      mismatched=[],
      serving_version=sync.serving_version,
  )
