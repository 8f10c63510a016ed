"""The rollout's session: receives into staging, verifies, publishes.

What is served and what is received are never the same arrays. Every round gets
new staging arrays: a reader may hold on to what it was served for as long as
it likes, and nothing is ever written into it.
"""

import collections.abc
import functools
import threading
import time
import types
from typing import Any

from absl import logging
import jax
import jax.numpy as jnp

from laneweave.sync import manifest as manifest_lib
from laneweave.sync import memory, rounds
from laneweave.sync import verify as verify_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.control import client as client_lib
from laneweave.sync.control import control_pb2
from laneweave.sync.transport import base, create

VERIFY = ("fingerprint", "off")


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="sharding")
def _zeros(shape, dtype, *, sharding):
  return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


class RolloutSync:
  """Built once; one call of each phase per round, in order.

      sync = RolloutSync(target, cfg=cfg, control_address="10.0.0.1:4711")
      sync.join(timeout_s=60)
      while (manifest := sync.next_round(timeout_s=600)) is not None:
        sync.bind(manifest)
        sync.receive(timeout_s=60)
        if not sync.verify():
          sync.publish()
        else:
          sync.abort("fingerprints differ")

  Phases are idempotent for the round they were called for and refuse another.

  Attributes:
    transport: The transport in use: "raiden" or "local".
    timings: Seconds of the round's phases: transfer, h2d, verify, publish, and
      pause_s, for which a reader could have had to wait.
  """

  def __init__(
    self,
    target: collections.abc.Mapping[str, Any],
    *,
    cfg: SyncConfig,
    control_address: str,
    transport: str = "auto",
    parallelism: int = 8,
    bind_ip: str = "127.0.0.1",
    replica: str = "0",
    verify: str = "fingerprint",
  ):
    """Nothing is allocated or sent before `join`.

    Args:
      target: Shape, dtype and sharding of every array, by canonical name.
      cfg: The configuration; `kernel_backend` and `use_raiden_ffi` are read.
      control_address: "host:port" of the trainer's control service.
      transport: "auto", "raiden" or "local".
      parallelism: Raiden's network streams.
      bind_ip: Address to listen on and to be reached by.
      replica: Name of this rollout, unique in the session.
      verify: "fingerprint" or "off": publish unverified.

    Raises:
      ValueError: an option that does not exist, or a leaf without a sharding.
      RuntimeError: the transport cannot be had here.
    """
    if verify not in VERIFY:
      raise ValueError(f"`verify` {verify!r} is not one of {', '.join(VERIFY)}")
    bare = [
      n for n, x in target.items() if getattr(x, "sharding", None) is None
    ]
    if bare or not target:
      raise ValueError(
        "`target` must name at least one array, each with a sharding"
        + (f"; `{bare[0]}` has none" if bare else "")
      )
    self._target = {n: target[n] for n in manifest_lib.sort_names(target)}
    self._cfg = cfg
    self._verify = verify
    self._replica = replica
    self.transport = create.resolve_name(transport, cfg.use_raiden_ffi)
    self._endpoint = create.endpoint(
      self.transport,
      job="rollout",
      replica=replica,
      parallelism=parallelism,
      bind_ip=bind_ip,
    )
    self._client = client_lib.ControlClient(control_address, replica)
    self._lock = threading.Lock()
    self._serving: collections.abc.Mapping[str, jax.Array] | None = None
    self._serving_version: int | None = None
    self._staging: dict[str, jax.Array] = {}
    self._round: rounds.RoundManifest | None = None
    self._phase = "over"
    self._mismatched: tuple[str, ...] = ()
    self.timings: dict[str, float] = {}

  @property
  def serving(self) -> collections.abc.Mapping[str, jax.Array]:
    """The arrays being served; read-only, and never written to.

    Raises:
      rounds.RoundError: nothing was published yet.
    """
    with self._lock:
      if self._serving is None:
        raise rounds.RoundError(
          "no version was published yet; there is nothing to serve"
        )
      return self._serving

  @property
  def serving_version(self) -> int | None:
    """The version being served, or None before the first."""
    with self._lock:
      return self._serving_version

  def join(self, timeout_s: float) -> None:
    """Allocates staging and joins the trainer.

    Args:
      timeout_s: How long to wait for the trainer's first version.

    Raises:
      base.TransportError: no trainer in time, or one that holds other arrays.
    """
    self._allocate()
    self._endpoint.bind(self._staging)
    self._client.join(self._endpoint.work_unit(), timeout_s)

  def _allocate(self):
    """New staging arrays, unless there are unused ones."""
    if not self._staging:
      self._staging = {
        name: _zeros(tuple(x.shape), jnp.dtype(x.dtype), sharding=x.sharding)
        for name, x in self._target.items()
      }

  def next_round(self, timeout_s: float) -> rounds.RoundManifest | None:
    """Waits for a round; allocates its staging arrays meanwhile.

    Args:
      timeout_s: How long to wait.

    Returns:
      The manifest, or None when the trainer has ended the session.

    Raises:
      base.TransportError: the trainer is gone, or nothing came in time.
    """
    self._allocate()
    after = 0 if self._round is None else self._round.round_id
    return self._client.next_round(after, timeout_s)

  def bind(self, manifest: rounds.RoundManifest) -> None:
    """Makes staging ready for a round.

    Args:
      manifest: The round's manifest.

    Raises:
      rounds.RoundError: the round, or its version, is an old one.
      base.TransportError: the manifest names other arrays than the target.
    """
    if self._round is not None:
      if manifest == self._round and self._phase != "over":
        return
      old = manifest.round_id <= self._round.round_id
      if old or manifest.version <= self._round.version:
        raise rounds.RoundError(
          f"{manifest} is not newer than {self._round}, which this rollout"
          " knows already"
        )
    problems = self._differences(manifest)
    if problems:
      raise base.TransportError(
        f"{manifest} does not fit this rollout: " + "; ".join(problems[:5])
      )
    self._allocate()
    self._endpoint.bind(self._staging)
    self._round, self._phase = manifest, "bound"
    self._mismatched, self.timings = (), {}

  def _differences(self, manifest):
    offered = {
      v.name: (v.shape, v.dtype, v.ordinal) for v in manifest.variables
    }
    wanted = {
      name: (tuple(x.shape), jnp.dtype(x.dtype).name, i)
      for i, (name, x) in enumerate(self._target.items())
    }
    return [
      f"`{n}` is {offered.get(n)} there and {wanted.get(n)} here"
      for n in manifest_lib.sort_names(offered.keys() | wanted.keys())
      if offered.get(n) != wanted.get(n)
    ]

  def _expect(self, *phases) -> rounds.RoundManifest:
    """The current round, if it is in one of these phases."""
    if self._round is None or self._phase not in phases:
      raise rounds.RoundError(
        f"{self._round or 'no round'} is {self._phase}; expected"
        f" {' or '.join(phases)}"
      )
    return self._round

  def receive(self, timeout_s: float) -> None:
    """Waits for the bytes and brings them to the devices.

    Args:
      timeout_s: How long to wait.

    Raises:
      rounds.RoundError: not bound.
      base.TransportError: the transfer failed; what is served stays.
    """
    if self._phase in ("received", "verified"):
      return
    key = self._client.key(self._expect("bound"))
    self.timings["transfer"] = self._client.receive(key, timeout_s)
    start = time.perf_counter()
    self._staging = self._endpoint.load()
    self.timings["h2d"] = time.perf_counter() - start
    self._phase = "received"

  def verify(self) -> tuple[str, ...]:
    """Checks every array's fingerprint, on the devices.

    Returns:
      Names of arrays that are not what the trainer sent; none: the round can
      be published.

    Raises:
      rounds.RoundError: not received.
    """
    if self._phase == "verified":
      return self._mismatched
    current = self._expect("received")
    start = time.perf_counter()
    if self._verify == "off":
      self._mismatched = ()
    else:
      self._mismatched = verify_lib.mismatched(
        current, self._staging, backend=self._cfg.kernel_backend
      )
    self.timings["verify"] = time.perf_counter() - start
    self._phase = "verified"
    return self._mismatched

  def publish(self) -> int:
    """Serves what was received: one swap, for all arrays at once.

    Returns:
      The version now served.

    Raises:
      rounds.RoundError: not verified, or verified and found wrong.
      base.TransportError: published, but the trainer could not be told.
    """
    current = self._expect("verified", "published")
    if self._phase == "published":
      return current.version
    if self._mismatched:
      raise rounds.RoundError(
        f"{current}: {len(self._mismatched)} arrays are not what was"
        f" sent, first `{self._mismatched[0]}`; abort it"
      )
    start = time.perf_counter()
    staged = types.MappingProxyType(self._staging)
    quiesced = time.perf_counter()
    with self._lock:
      # Kept to the end of the call: arrays nobody reads any more are freed
      # after the pause, not in it.
      before, self._serving = self._serving, staged
      self._serving_version = current.version
    done = time.perf_counter()
    del before
    self._staging = {}
    self._phase = "published"
    self.timings["pause_s"] = done - quiesced
    self.timings["publish"] = done - start
    logging.info("%s published", current)
    self._report(current, rounds.PUBLISHED, "")
    return current.version

  def abort(self, reason: str) -> None:
    """Gives a round up; what is served stays. Idempotent.

    Args:
      reason: Why, for the trainer and the log.

    Raises:
      rounds.RoundError: the round is published.
    """
    if self._phase in ("over", "aborted"):
      return
    current = self._expect("bound", "received", "verified")
    self._phase = "aborted"
    # A transfer that failed may still be writing: these arrays are not used
    # again.
    self._staging = {}
    logging.warning("%s aborted: %s", current, reason)
    self._report(current, rounds.ABORTED, reason)

  def _report(self, current, outcome, reason):
    self._client.report(
      control_pb2.ReportRequest(
        key=self._client.key(current),
        outcome=outcome,
        reason=reason,
        mismatched=self._mismatched,
        timings=self.timings,
        peak_rss_bytes=memory.peak_rss_bytes(),
      )
    )

  def close(self) -> None:
    """Ends this side; what is served stays readable. Idempotent."""
    self._client.close()
    self._endpoint.close()
    self._staging = {}
