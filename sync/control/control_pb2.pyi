from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HelloRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HelloReply(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class Envelope(_message.Message):
    __slots__ = ("body", "session", "caller", "sequence", "mac")
    BODY_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    body: bytes
    session: str
    caller: bytes
    sequence: int
    mac: bytes
    def __init__(self, body: _Optional[bytes] = ..., session: _Optional[str] = ..., caller: _Optional[bytes] = ..., sequence: _Optional[int] = ..., mac: _Optional[bytes] = ...) -> None: ...

class RoundKey(_message.Message):
    __slots__ = ("replica", "round_id", "version", "session")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    round_id: int
    version: int
    session: str
    def __init__(self, replica: _Optional[str] = ..., round_id: _Optional[int] = ..., version: _Optional[int] = ..., session: _Optional[str] = ...) -> None: ...

class Variable(_message.Message):
    __slots__ = ("name", "ordinal", "shape", "dtype", "mesh_shape", "sharding_spec", "global_shard_indices", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MESH_SHAPE_FIELD_NUMBER: _ClassVar[int]
    SHARDING_SPEC_FIELD_NUMBER: _ClassVar[int]
    GLOBAL_SHARD_INDICES_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    ordinal: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    mesh_shape: _containers.RepeatedScalarFieldContainer[int]
    sharding_spec: _containers.RepeatedScalarFieldContainer[str]
    global_shard_indices: _containers.RepeatedScalarFieldContainer[int]
    fingerprint: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., ordinal: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., mesh_shape: _Optional[_Iterable[int]] = ..., sharding_spec: _Optional[_Iterable[str]] = ..., global_shard_indices: _Optional[_Iterable[int]] = ..., fingerprint: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkUnit(_message.Message):
    __slots__ = ("job", "replica", "endpoints", "control_address", "mesh_shape", "mesh_axes", "linear_staging", "variables", "host_subgrid")
    JOB_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MESH_SHAPE_FIELD_NUMBER: _ClassVar[int]
    MESH_AXES_FIELD_NUMBER: _ClassVar[int]
    LINEAR_STAGING_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    HOST_SUBGRID_FIELD_NUMBER: _ClassVar[int]
    job: str
    replica: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    control_address: str
    mesh_shape: _containers.RepeatedScalarFieldContainer[int]
    mesh_axes: _containers.RepeatedScalarFieldContainer[str]
    linear_staging: bool
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    host_subgrid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, job: _Optional[str] = ..., replica: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., control_address: _Optional[str] = ..., mesh_shape: _Optional[_Iterable[int]] = ..., mesh_axes: _Optional[_Iterable[str]] = ..., linear_staging: _Optional[bool] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., host_subgrid: _Optional[_Iterable[int]] = ...) -> None: ...

class RoundManifest(_message.Message):
    __slots__ = ("round_id", "version", "seed", "variables", "signature", "session")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    version: int
    seed: _containers.RepeatedScalarFieldContainer[int]
    variables: _containers.RepeatedCompositeFieldContainer[Variable]
    signature: bytes
    session: str
    def __init__(self, round_id: _Optional[int] = ..., version: _Optional[int] = ..., seed: _Optional[_Iterable[int]] = ..., variables: _Optional[_Iterable[_Union[Variable, _Mapping]]] = ..., signature: _Optional[bytes] = ..., session: _Optional[str] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("unit", "wait_s")
    UNIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    unit: WorkUnit
    wait_s: float
    def __init__(self, unit: _Optional[_Union[WorkUnit, _Mapping]] = ..., wait_s: _Optional[float] = ...) -> None: ...

class JoinReply(_message.Message):
    __slots__ = ("problems", "nothing_staged", "session")
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    NOTHING_STAGED_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    problems: _containers.RepeatedScalarFieldContainer[str]
    nothing_staged: bool
    session: str
    def __init__(self, problems: _Optional[_Iterable[str]] = ..., nothing_staged: _Optional[bool] = ..., session: _Optional[str] = ...) -> None: ...

class NextRoundRequest(_message.Message):
    __slots__ = ("replica", "after_round", "wait_s", "session")
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    replica: str
    after_round: int
    wait_s: float
    session: str
    def __init__(self, replica: _Optional[str] = ..., after_round: _Optional[int] = ..., wait_s: _Optional[float] = ..., session: _Optional[str] = ...) -> None: ...

class RoundOffer(_message.Message):
    __slots__ = ("manifest", "closed", "error")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    manifest: RoundManifest
    closed: bool
    error: str
    def __init__(self, manifest: _Optional[_Union[RoundManifest, _Mapping]] = ..., closed: _Optional[bool] = ..., error: _Optional[str] = ...) -> None: ...

class ReceiveReply(_message.Message):
    __slots__ = ("error", "transfer_s")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    error: str
    transfer_s: float
    def __init__(self, error: _Optional[str] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("key", "outcome", "reason", "mismatched", "timings", "peak_rss_bytes")
    class TimingsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MISMATCHED_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PEAK_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    key: RoundKey
    outcome: str
    reason: str
    mismatched: _containers.RepeatedScalarFieldContainer[str]
    timings: _containers.ScalarMap[str, float]
    peak_rss_bytes: int
    def __init__(self, key: _Optional[_Union[RoundKey, _Mapping]] = ..., outcome: _Optional[str] = ..., reason: _Optional[str] = ..., mismatched: _Optional[_Iterable[str]] = ..., timings: _Optional[_Mapping[str, float]] = ..., peak_rss_bytes: _Optional[int] = ...) -> None: ...

class ReportReply(_message.Message):
    __slots__ = ("error",)
    ERROR_FIELD_NUMBER: _ClassVar[int]
    error: str
    def __init__(self, error: _Optional[str] = ...) -> None: ...
