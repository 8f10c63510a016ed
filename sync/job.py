"""What one side does, from the checkpoint to the last round."""

import collections.abc
import contextlib
import traceback
from typing import Any

import jax
import numpy as np

from laneweave.sync import (
  flags,
  job_setup,
  memory,
  progress,
  reference,
  round_weights,
  session,
)
from laneweave.sync import manifest as manifest_lib
from laneweave.sync.job_setup import InputError, Setup, blames_input
from laneweave.sync.transport import base, create

type Devices = collections.abc.Callable[[], list[Any]]


class JobError(RuntimeError):
  """A round that was not published, or weights that are wrong."""


_LONGEST_ERROR = 2000  # Characters.
# What can happen in a run and says all there is to say; anything else is a
# defect, and shows where it comes from.
_EXPECTED = (
  InputError,
  JobError,
  TimeoutError,
  base.TransportError,
  session.RoundError,
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
    setup = job_setup.set_up(options, side)
    with setup.opened:
      version = work(setup, link, devices)
  except Exception as error:  # noqa: BLE001
    is_input = isinstance(error, InputError)
    if not isinstance(error, _EXPECTED):
      traceback.print_exc()
    # With `weight_sync_debug` a note names the parameter.
    said = " ".join([str(error), *getattr(error, "__notes__", ())])
    text = " ".join(said.split()) or type(error).__name__
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
  with blames_input():
    sync = session.TrainerSync(
      setup.cfg,
      transport=options.transport,
      parallelism=options.parallelism,
      bind_ip=options.bind_ip,
      simulated_gbps=options.simulated_gbps,
      control_port=int(address.rpartition(":")[2]),
      verify=_verify_mode(options),
      auth_key=options.auth_key(),
    )
  with contextlib.closing(sync):
    with blames_input():
      mesh = options.trainer_mesh.build(devices(), "trainer_mesh")
      _check_backend(options.kernel_backend, mesh)
    _tell_plan(link, setup, mesh, options.trainer_mesh, sync.transport)
    link.emit("listening", address=sync.control_address)
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


def _check_backend(backend: str, mesh: jax.sharding.Mesh) -> None:
  """Refuses a backend that these devices do not have."""
  platform = mesh.devices.flat[0].platform
  if backend == "mosaic" and platform != "tpu":
    raise ValueError(
      f"`--kernel_backend=mosaic` runs on TPU, and the devices are {platform};"
      " use interpret, xla or auto"
    )


def _tell_plan(link, setup, mesh, spec, transport) -> None:
  """Tells where this side runs and what it is going to do."""
  device = mesh.devices.flat[0]
  link.emit(
    "plan",
    mesh=str(spec),
    platform=f"{device.platform} ({device.device_kind})",
    transport=transport,
    **setup.summary(),
  )


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
    serving_version=(
      outcome.version if outcome.outcome == session.PUBLISHED else None
    ),
  )
  if outcome.outcome != session.PUBLISHED:
    raise JobError(
      f"round {number} is {outcome.outcome}"
      + (f": {'; '.join(reasons)}" if reasons else "")
    )


def _rollout(setup: Setup, link: progress.Link, devices: Devices) -> int | None:
  """The rollout's rounds; returns the version it serves at the end."""
  options = setup.options
  with blames_input():
    # Loads the transport's native code, which has to come before devices.
    create.resolve_name(options.transport, setup.cfg.use_raiden_ffi)
    mesh = options.rollout_mesh.build(devices(), "rollout_mesh")
    _check_backend(options.kernel_backend, mesh)
  target = setup.target(mesh)
  address = options.controller_address
  if address in (None, flags.ADDRESS_FROM_STDIN):
    address = link.address(options.timeout_s)
  with blames_input():
    sync = session.RolloutSync(
      target,
      cfg=setup.cfg,
      control_address=address,
      transport=options.transport,
      parallelism=options.parallelism,
      bind_ip=options.bind_ip,
      simulated_gbps=options.simulated_gbps,
      verify=_verify_mode(options),
      auth_key=options.auth_key(),
    )
  with contextlib.closing(sync):
    _tell_plan(link, setup, mesh, options.rollout_mesh, sync.transport)
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
  """One round on the rollout; nothing is published unless all of it is."""
  number = manifest.version
  mismatched = ()
  reason = ""
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
    with contextlib.suppress(session.RoundError, base.TransportError):
      sync.abort(reason)
    raise
  finally:
    served = sync.serving_version
    link.emit(
      "round",
      round=number,
      version=number,
      outcome=session.PUBLISHED if served == number else session.ABORTED,
      seconds=dict(sync.timings),
      mismatched=list(mismatched),
      reason=reason,
      serving_version=served,
    )


def _compare(setup: Setup, serving, number: int, link: progress.Link) -> None:
  """Holds what is served against the reference, bit for bit."""
  weights = {name: setup.read(name) for name in setup.originals}
  for entry in setup.plan.entries:
    for name in entry.sources:
      weights[name] = round_weights.in_numpy(weights[name], number)
  expected = reference.convert_reference(weights, setup.cfg)
  del weights
  mismatched = [
    name
    for name in manifest_lib.sort_names(expected.keys() | serving.keys())
    if not _same_bits(expected.get(name), serving.get(name))
  ]
  link.emit("reference", tensors=len(expected), mismatched=mismatched)
  if mismatched:
    raise JobError(
      f"{len(mismatched)} tensors differ from the NumPy reference, first"
      f" `{mismatched[0]}`"
    )


def _same_bits(expected: np.ndarray | None, served: jax.Array | None) -> bool:
  """Whether shape, dtype and every bit agree."""
  if expected is None or served is None:
    return False
  found = np.asarray(served)
  return (
    found.shape == expected.shape
    and found.dtype == expected.dtype
    and found.tobytes() == expected.tobytes()
  )
