"""The trainer's session: converts, stages and offers a version per round."""

import dataclasses
import secrets
import time
from typing import Any

from absl import logging
import jax
import numpy as np

from laneweave.sync import convert, rounds
from laneweave.sync import manifest as manifest_lib
from laneweave.sync import plan as plan_lib
from laneweave.sync import tree as tree_lib
from laneweave.sync.config import SyncConfig
from laneweave.sync.control import auth, keys
from laneweave.sync.control import server as server_lib
from laneweave.sync.transport import base, create


class TrainerSync:
  """Built once, rebound every step.

      sync = TrainerSync(cfg)
      for version, params in steps:
        sync.prepare(params, version)
        outcome = sync.serve_round(timeout_s=60)
      sync.close()

  Attributes:
    transport: The transport in use: "raiden", "raiden_ffi" or "local".
    timings: Seconds of the last round's phases: convert, d2h, transfer.
  """

  def __init__(
    self,
    cfg: SyncConfig,
    *,
    transport: str = "auto",
    parallelism: int = 8,
    bind_ip: str = "127.0.0.1",
    control_port: int = 0,
    replicas: int = 1,
    verify: str = "fingerprint",
    auth_key: bytes | None = None,
    simulated_gbps: float = 0.0,
  ):
    """Starts the control service; nothing is converted yet.

    Args:
      cfg: The configuration.
      transport: "auto", "raiden" or "local".
      parallelism: Raiden's network streams.
      bind_ip: Address to listen on and to be reached by.
      control_port: Port of the control service; 0 for one that is free.
      replicas: Rollouts that take part in each round.
      verify: "fingerprint" or "off": take no fingerprints.
      auth_key: The key shared with rollouts, 16 bytes and more, that control
        messages and manifests are signed with; needed beyond loopback.
      simulated_gbps: Rate of a simulated link in Gbit/s, with FFI on CPU
        devices; 0: none.

    Raises:
      ValueError: an option that does not exist, or no key where one is needed.
      RuntimeError: the transport cannot be had here.
    """
    create.check_options(
      verify=verify, parallelism=parallelism, bind_ip=bind_ip, replicas=replicas
    )
    keys.require(auth_key, {"bind_ip": bind_ip})
    self._cfg = cfg
    self._auth_key = auth_key
    self._verify = verify
    self._replicas = replicas
    self.transport = create.resolve_name(transport, cfg.use_raiden_ffi)
    self._endpoint = create.endpoint(
      self.transport,
      job="trainer",
      replica="0",
      parallelism=parallelism,
      bind_ip=bind_ip,
      simulated_gbps=simulated_gbps,
    )
    self._server = server_lib.ControlServer(
      bind_ip=bind_ip, port=control_port, auth_key=auth_key
    )
    self._controller = create.controller(
      self.transport, parallelism=parallelism
    )
    self._converter: convert.Converter | None = None
    self._shapes: Any = None
    self._staged = False
    self._manifest: rounds.RoundManifest | None = None
    self._outcome: rounds.RoundOutcome | None = None
    self.timings: dict[str, float] = {}

  @property
  def control_address(self) -> str:
    """Address that rollouts join, as "host:port"."""
    return self._server.address

  @property
  def manifest(self) -> rounds.RoundManifest | None:
    """The manifest of the version that is staged, if any."""
    return self._manifest

  def prepare(
    self, params: Any, version: int, *, target: Any = None
  ) -> rounds.RoundManifest:
    """Converts and stages a version.

    The previous version's converted arrays are freed before the new ones are
    made, so that two never exist. Where a transport stages on the host, the new
    ones are freed before this returns.

    Args:
      params: The trainer's tree.
      version: Number of the version; it only grows.
      target: The rollout's tree, see `convert.convert`.

    Returns:
      The manifest; for the version that is staged already, the same one.

    Raises:
      ValueError: the tree does not fit, or the version is an old one.
    """
    current = self._manifest
    if current is not None and version == current.version and self._staged:
      return current
    if current is not None and version < current.version:
      raise ValueError(
        f"`version` {version} is older than version {current.version}, which"
        " was prepared before; versions only grow"
      )
    weights, _ = tree_lib.split_leaves(tree_lib.flatten(params))
    del params
    converter = self._plan(weights, target)
    seed = np.array([secrets.randbits(32) for _ in range(2)], np.uint32)
    start = time.perf_counter()
    self.release()
    if self._verify == "off":
      outputs, prints = {}, {}
      for piece, _ in converter.pieces(weights):
        outputs.update(piece)
    else:
      outputs, prints = converter.run(weights, seed)
    del weights
    names = manifest_lib.sort_names(outputs)
    arrays = {name: outputs.pop(name) for name in names}
    jax.block_until_ready(list(arrays.values()))
    converted = time.perf_counter()
    self._endpoint.bind(arrays)
    del arrays
    self._endpoint.stage()
    if self._endpoint.stages_apart:
      self._endpoint.release()
    staged = time.perf_counter()
    self.timings = {"convert": converted - start, "d2h": staged - converted}
    unit = self._endpoint.work_unit()
    if current is None or version != current.version:
      self._outcome = None
    self._staged = True
    self._manifest = auth.sign(
      rounds.RoundManifest(
        session=self._server.board.session,
        round_id=1 if current is None else current.round_id + 1,
        version=version,
        seed=(int(seed[0]), int(seed[1])),
        variables=unit.variables,
        fingerprints=prints,
      ),
      self._auth_key,
    )
    self._controller.register(unit)
    self._server.board.set_source(unit)
    logging.info("%s staged: %d arrays", self._manifest, len(names))
    return self._manifest

  def _plan(self, weights, target):
    """The converter, kept while the tree stays as it is."""
    shapes = (
      tuple((n, tuple(x.shape), str(x.dtype)) for n, x in weights.items()),
      target is None or manifest_lib.manifest(target, integer_layers=True),
    )
    if self._converter is None or self._shapes != shapes:
      plan = plan_lib.make_plan(weights, self._cfg, target)
      for warning in plan.warnings:
        logging.warning("%s", warning)
      self._converter = convert.Converter(plan, self._cfg)
      self._shapes = shapes
    return self._converter

  def serve_round(self, timeout_s: float) -> rounds.RoundOutcome:
    """Brings the staged version to every rollout that has not published it.

    Called again, it makes another round of the same version, with nothing
    converted anew, for rollouts that gave the first one up or joined since;
    where there are none, it returns the last outcome.

    Args:
      timeout_s: How long each step may take: joining, binding, the transfer,
        verification.

    Returns:
      The outcome. A rollout that said nothing in time must join again.

    Raises:
      rounds.RoundError: nothing is staged.
      base.TransportError: not enough rollouts joined in time.
    """
    manifest, board = self._manifest, self._server.board
    if manifest is None or not self._staged:
      raise rounds.RoundError("nothing is staged; call prepare() first")
    units = board.wait_joined(self._replicas, timeout_s)
    if len(units) < self._replicas:
      raise base.TransportError(
        f"{len(units)} of {self._replicas} rollouts joined within"
        f" {timeout_s:.0f} s; start them with"
        f" --controller_address={self.control_address}"
      )
    units = [u for u in units if board.served(u.replica) != manifest.version]
    if self._outcome is not None:
      if not units:
        return self._outcome
      manifest = auth.sign(
        dataclasses.replace(manifest, round_id=manifest.round_id + 1),
        self._auth_key,
      )
      self._manifest = manifest
    board.offer(manifest, [u.replica for u in units])
    moving = board.begin(timeout_s)
    error = self._transfer([u for u in units if u.replica in moving], timeout_s)
    board.landed(error, self.timings.get("transfer", 0.0))
    reports = board.end(timeout_s)
    self._outcome = rounds.RoundOutcome(
      outcome=rounds.combine(reports.values()),
      round_id=manifest.round_id,
      version=manifest.version,
      replicas=reports,
    )
    logging.info("%s: %s", manifest, self._outcome.outcome)
    return self._outcome

  def _transfer(self, units, timeout_s) -> str:
    """Runs the transfer; "" or what went wrong."""
    self.timings.pop("transfer", None)
    if not units:
      return "no rollout was ready"
    start = time.perf_counter()
    try:
      for unit in units:
        self._controller.register(unit)
      self._controller.transfer(
        self._endpoint.work_unit(),
        units,
        # Raiden keeps ids of past transfers: never the same one twice.
        uuid=secrets.randbits(62) + 1,
        request=f"laneweave-{secrets.token_hex(8)}",
        timeout_s=timeout_s,
      )
    except base.TransportError as error:
      logging.error("%s", error)
      return str(error)
    self.timings["transfer"] = time.perf_counter() - start
    return ""

  def release(self) -> None:
    """Gives up the staged version and its converted arrays; idempotent.

    Buffers on the host stay for the next version, which has the same size.
    """
    self._staged = False
    self._endpoint.release()

  def close(self) -> None:
    """Ends the session: rollouts are told, ports are closed; idempotent."""
    self.release()
    self._server.close()
    self._controller.close()
    self._endpoint.close()
