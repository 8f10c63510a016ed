"""The rollout's session: receives into staging, verifies, publishes.

What is served and what is received are never the same arrays. Every round gets
new staging arrays, and those of the version before are freed as soon as nobody
holds them: a reader may keep what it was served for as long as it likes, and
nothing is ever written into it.
"""

import collections.abc
import threading
import time
import types
from typing import Any

from absl import logging
import jax

from laneweave.sync import acceptance, memory, rounds
from laneweave.sync import verify as verify_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.control import auth, control_pb2, keys
from laneweave.sync.control import client as client_lib
from laneweave.sync.transport import create, variables

_IDLE, _ABORTED, _PUBLISHED = "idle", "aborted", "published"
_BOUND, _RECEIVED, _VERIFIED = "bound", "received", "verified"
_OPEN = (_BOUND, _RECEIVED, _VERIFIED)


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
  Phases exclude each other; `serving` can be read at any time from any thread.
  After a `TransportError` that says that the trainer is gone, `join` finds the
  one that was started in its place.

  Attributes:
    transport: The transport in use: "raiden", "raiden_ffi" or "local".
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
    auth_key: bytes | None = None,
    simulated_gbps: float = 0.0,
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
      auth_key: The trainer's key; needed beyond loopback.
      simulated_gbps: See `TrainerSync`.

    Raises:
      ValueError: an option that does not exist, no key where one is needed, or
        leaves without a sharding, with one that splits them unevenly, or on
        different meshes.
      RuntimeError: the transport cannot be had here.
    """
    create.check_options(
      verify=verify, parallelism=parallelism, bind_ip=bind_ip
    )
    self._target = acceptance.abstract(target)
    self._variables = variables.variables_of(self._target)
    keys.require(
      auth_key,
      {
        "bind_ip": bind_ip,
        "control_address": keys.host_of(control_address),
      },
    )
    self._auth_key = auth_key
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
      simulated_gbps=simulated_gbps,
    )
    self._client = client_lib.ControlClient(
      control_address, replica, auth_key=auth_key
    )
    self._phases = threading.RLock()
    self._lock = threading.Lock()
    self._serving: collections.abc.Mapping[str, jax.Array] | None = None
    self._serving_version: int | None = None
    self._staging: dict[str, Any] = {}
    self._arrived: dict[str, jax.Array] = {}
    self._written = False
    self._round: rounds.RoundManifest | None = None
    self._phase = _IDLE
    self._mismatched: tuple[str, ...] = ()
    self.timings: dict[str, float] = {}

  @property
  def serving(self) -> collections.abc.Mapping[str, jax.Array]:
    """The arrays being served; read-only, and never written to.

    Raises:
      rounds.RoundError: nothing was published yet.
    """
    return self.snapshot()[1]

  @property
  def serving_version(self) -> int | None:
    """The version being served, or None before the first."""
    with self._lock:
      return self._serving_version

  def snapshot(self) -> tuple[int, collections.abc.Mapping[str, jax.Array]]:
    """The version being served and its arrays, which belong together.

    Raises:
      rounds.RoundError: nothing was published yet.
    """
    with self._lock:
      if self._serving is None or self._serving_version is None:
        raise rounds.RoundError(
          "no version was published yet; there is nothing to serve"
        )
      return self._serving_version, self._serving

  def join(self, timeout_s: float) -> None:
    """Makes staging ready and joins the trainer; also one that came back.

    A round that was under way is given up: its trainer is gone.

    Args:
      timeout_s: How long to wait for the trainer's first version.

    Raises:
      base.MismatchError: the trainer holds other arrays.
      base.TransportError: no trainer in time.
    """
    with self._phases:
      self._give_up()
      self._round, self._phase = None, _IDLE
      self._make_ready()
      if self._verify != "off":
        verify_lib.warm_up(self._staging, backend=self._cfg.kernel_backend)
      self._client.join(self._endpoint.work_unit(), timeout_s)

  def _give_up(self):
    """Frees staging arrays if bytes were written into them."""
    if self._written:
      self._staging, self._arrived, self._written = {}, {}, False
      self._endpoint.release()

  def _make_ready(self):
    """Binds staging arrays that were never written to."""
    if not self._staging:
      self._staging = self._endpoint.allocate(self._target)
    self._endpoint.bind(self._staging)

  def next_round(self, timeout_s: float) -> rounds.RoundManifest | None:
    """Waits for a round.

    Args:
      timeout_s: How long to wait.

    Returns:
      The manifest, or None when the trainer has ended the session.

    Raises:
      base.TransportError: the trainer is gone or was started again since
        `join`, or nothing came in time.
    """
    with self._phases:
      after = 0 if self._round is None else self._round.round_id
      return self._client.next_round(after, timeout_s)

  def bind(self, manifest: rounds.RoundManifest) -> None:
    """Makes staging ready for a round.

    Args:
      manifest: The round's manifest.

    Raises:
      auth.AuthenticationError: the manifest is not the trainer's.
      rounds.RoundError: the round, or its version, is an old one.
      base.MismatchError: the manifest names other arrays than the target.
    """
    with self._phases:
      current = self._round
      if current and manifest.key == current.key and self._phase in _OPEN:
        return
      auth.check_manifest(manifest, self._auth_key)
      acceptance.refuse_stale(
        manifest,
        session=self._client.session,
        last=self._round,
        served=self.serving_version,
      )
      acceptance.check_fit(
        manifest, self._variables, verify=self._verify != "off"
      )
      self._give_up()
      self._make_ready()
      self._round, self._phase = manifest, _BOUND
      self._mismatched, self.timings = (), {}

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
    with self._phases:
      if self._phase in (_RECEIVED, _VERIFIED):
        return
      key = self._client.key(self._expect(_BOUND))
      self.timings["transfer"] = self._client.receive(key, timeout_s)
      start = time.perf_counter()
      self._written = True
      self._arrived = self._endpoint.load()
      self.timings["h2d"] = time.perf_counter() - start
      self._phase = _RECEIVED

  def verify(self) -> tuple[str, ...]:
    """Checks every array's fingerprint, on the devices.

    Returns:
      Names of arrays that are not what the trainer sent; none: the round can
      be published.

    Raises:
      rounds.RoundError: not received.
    """
    with self._phases:
      if self._phase == _VERIFIED:
        return self._mismatched
      current = self._expect(_RECEIVED)
      start = time.perf_counter()
      if self._verify != "off":
        self._mismatched = verify_lib.mismatched(
          current, self._arrived, backend=self._cfg.kernel_backend
        )
      self.timings["verify"] = time.perf_counter() - start
      self._phase = _VERIFIED
      return self._mismatched

  def publish(self) -> int:
    """Serves what was received: one swap, for all arrays at once.

    Returns:
      The version now served.

    Raises:
      rounds.RoundError: not verified, or verified and found wrong.
      base.TransportError: published, but the trainer could not be told.
    """
    with self._phases:
      current = self._expect(_VERIFIED, _PUBLISHED)
      if self._phase == _PUBLISHED:
        return current.version
      if self._mismatched:
        raise rounds.RoundError(
          f"{current}: {len(self._mismatched)} arrays are not what was"
          f" sent, first `{self._mismatched[0]}`; abort it"
        )
      start = time.perf_counter()
      arrived = types.MappingProxyType(self._arrived)
      quiesced = time.perf_counter()
      with self._lock:
        # Kept to the end of the call: arrays nobody reads any more are freed
        # after the pause, not in it.
        before, self._serving = self._serving, arrived
        self._serving_version = current.version
      done = time.perf_counter()
      del before
      self._phase = _PUBLISHED
      self._staging, self._arrived, self._written = {}, {}, False
      self.timings["pause_s"] = done - quiesced
      self.timings["publish"] = done - start
      logging.info("%s published", current)
      try:
        self._report(current, rounds.PUBLISHED, "")
      finally:
        # Raiden must not keep hold of arrays that are served.
        self._make_ready()
      return current.version

  def abort(self, reason: str) -> None:
    """Gives a round up; what is served stays. Idempotent.

    Args:
      reason: Why, for the trainer and the log.

    Raises:
      rounds.RoundError: the round is published.
      base.TransportError: aborted, but the trainer could not be told.
    """
    with self._phases:
      if self._phase in (_IDLE, _ABORTED):
        return
      current = self._expect(*_OPEN)
      self._give_up()
      self._phase = _ABORTED
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
    self._staging, self._arrived = {}, {}
