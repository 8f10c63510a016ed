"""Sends the controller's commands to synchronizers, each with a deadline.

Raiden's own client waits up to 30 minutes for an answer, tries a refused
connection again until then, and sends a command a second time when the first
connection broke. A process that ends meanwhile waits for those threads. This
client gives a command one connection and one deadline, and can cut all of
them off.
"""

import contextlib
import socket
import threading
import time

from laneweave.sync.transport import raiden_package

_controller = raiden_package.load("rpc.raiden_controller")
_pipe = raiden_package.load("common.control_pipe.control_pipe_client")


class CommandClient(_controller.WeightSyncWorkerRpcClient):
  """Raiden's client of the synchronizers' listeners, with deadlines."""

  def __init__(self):
    """Without a deadline nothing is sent; see `open`."""
    super().__init__(name_resolver=None)
    self._guard = threading.Lock()
    self._deadline = 0.0
    self._sockets: set[socket.socket] = set()

  def open(self, timeout_s: float) -> None:
    """Allows commands for so many seconds."""
    with self._guard:
      self._deadline = time.monotonic() + timeout_s

  def cut(self) -> None:
    """Ends every command that is under way, and allows no more."""
    with self._guard:
      self._deadline = 0.0
      for connected in self._sockets:
        with contextlib.suppress(OSError):
          connected.shutdown(socket.SHUT_RDWR)

  def close(self) -> None:
    """Ends everything; idempotent."""
    self.cut()
    super().close()

  def _send_rpc_sync(self, addr: str, payload: bytes, timeout: float = 0.0):
    """Sends one command; called in a thread of Raiden's executor."""
    del timeout
    connections = []

    def connect(address: str, timeout: float) -> socket.socket:
      del timeout
      if connections:
        raise ConnectionError(f"the synchronizer at {address} broke off")
      connected = self._connect(address)
      connections.append(connected)
      return connected

    # A new one each time: one that saw a connection break sends what comes
    # after in an older framing.
    pipe = _pipe.ControlPipeClient(socket_connector=connect)
    try:
      return pipe.send_raw_bytes_sync(
        addr,
        payload,
        message_type=self._proto_module.ControlRequest.DESCRIPTOR.full_name,
      )
    finally:
      with self._guard:
        self._sockets.difference_update(connections)

  def _connect(self, address):
    host, _, port = address.rpartition(":")
    left = self._deadline - time.monotonic()
    if left <= 0:
      raise TimeoutError(f"no time left to command {address}")
    connected = socket.create_connection(
      (host.strip("[]"), int(port)), timeout=left
    )
    with self._guard:
      left = self._deadline - time.monotonic()
      if left <= 0:
        connected.close()
        raise TimeoutError(f"no time left to command {address}")
      connected.settimeout(left)
      self._sockets.add(connected)
    return connected
