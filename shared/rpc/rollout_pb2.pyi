from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Protocol(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROTOCOL_UNSPECIFIED: _ClassVar[Protocol]
    PROTOCOL_VERSION: _ClassVar[Protocol]

class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MODE_UNSPECIFIED: _ClassVar[Mode]
    MODE_TRAIN: _ClassVar[Mode]
    MODE_EVALUATE: _ClassVar[Mode]
    MODE_SUPPLY: _ClassVar[Mode]
PROTOCOL_UNSPECIFIED: Protocol
PROTOCOL_VERSION: Protocol
MODE_UNSPECIFIED: Mode
MODE_TRAIN: Mode
MODE_EVALUATE: Mode
MODE_SUPPLY: Mode

class LoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LoadReply(_message.Message):
    __slots__ = ("rank", "size", "environments", "supply_sessions", "free_sessions")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    SUPPLY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    FREE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    size: int
    environments: int
    supply_sessions: int
    free_sessions: int
    def __init__(self, rank: _Optional[int] = ..., size: _Optional[int] = ..., environments: _Optional[int] = ..., supply_sessions: _Optional[int] = ..., free_sessions: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "observation", "samples", "notices")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    observation: Observation
    samples: Samples
    notices: Notices
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., observation: _Optional[_Union[Observation, _Mapping]] = ..., samples: _Optional[_Union[Samples, _Mapping]] = ..., notices: _Optional[_Union[Notices, _Mapping]] = ...) -> None: ...

class LearnerMessage(_message.Message):
    __slots__ = ("welcome", "action", "grant")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    action: Action
    grant: Grant
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., action: _Optional[_Union[Action, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "worker_id", "mode", "num_envs", "spec", "preferred_first_slot", "source", "episodes", "curriculum")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    NUM_ENVS_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    PREFERRED_FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    CURRICULUM_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    worker_id: str
    mode: Mode
    num_envs: int
    spec: EnvSpec
    preferred_first_slot: int
    source: SampleSpec
    episodes: int
    curriculum: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol_version: _Optional[int] = ..., worker_id: _Optional[str] = ..., mode: _Optional[_Union[Mode, str]] = ..., num_envs: _Optional[int] = ..., spec: _Optional[_Union[EnvSpec, _Mapping]] = ..., preferred_first_slot: _Optional[int] = ..., source: _Optional[_Union[SampleSpec, _Mapping]] = ..., episodes: _Optional[int] = ..., curriculum: _Optional[_Iterable[str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("first_slot", "policy_version", "run_seed", "slots", "options")
    FIRST_SLOT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_SEED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    first_slot: int
    policy_version: int
    run_seed: int
    slots: _containers.RepeatedCompositeFieldContainer[SlotStart]
    options: _containers.RepeatedCompositeFieldContainer[EpisodeOption]
    def __init__(self, first_slot: _Optional[int] = ..., policy_version: _Optional[int] = ..., run_seed: _Optional[int] = ..., slots: _Optional[_Iterable[_Union[SlotStart, _Mapping]]] = ..., options: _Optional[_Iterable[_Union[EpisodeOption, _Mapping]]] = ...) -> None: ...

class SlotStart(_message.Message):
    __slots__ = ("episode", "actions", "options")
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    episode: int
    actions: bytes
    options: _containers.RepeatedCompositeFieldContainer[EpisodeOption]
    def __init__(self, episode: _Optional[int] = ..., actions: _Optional[bytes] = ..., options: _Optional[_Iterable[_Union[EpisodeOption, _Mapping]]] = ...) -> None: ...

class EpisodeOption(_message.Message):
    __slots__ = ("name", "number", "whole", "word", "flag")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    WORD_FIELD_NUMBER: _ClassVar[int]
    FLAG_FIELD_NUMBER: _ClassVar[int]
    name: str
    number: float
    whole: int
    word: str
    flag: bool
    def __init__(self, name: _Optional[str] = ..., number: _Optional[float] = ..., whole: _Optional[int] = ..., word: _Optional[str] = ..., flag: bool = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("sequence", "arrays", "part")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    arrays: bytes
    part: int
    def __init__(self, sequence: _Optional[int] = ..., arrays: _Optional[bytes] = ..., part: _Optional[int] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("sequence", "policy_version", "arrays", "options")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    policy_version: int
    arrays: bytes
    options: _containers.RepeatedCompositeFieldContainer[EpisodeOption]
    def __init__(self, sequence: _Optional[int] = ..., policy_version: _Optional[int] = ..., arrays: _Optional[bytes] = ..., options: _Optional[_Iterable[_Union[EpisodeOption, _Mapping]]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("sequence", "epoch", "split", "indices")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    INDICES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    epoch: int
    split: int
    indices: bytes
    def __init__(self, sequence: _Optional[int] = ..., epoch: _Optional[int] = ..., split: _Optional[int] = ..., indices: _Optional[bytes] = ...) -> None: ...

class Samples(_message.Message):
    __slots__ = ("sequence", "arrays", "part", "broken")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    arrays: bytes
    part: int
    broken: _containers.RepeatedCompositeFieldContainer[BrokenSample]
    def __init__(self, sequence: _Optional[int] = ..., arrays: _Optional[bytes] = ..., part: _Optional[int] = ..., broken: _Optional[_Iterable[_Union[BrokenSample, _Mapping]]] = ...) -> None: ...

class BrokenSample(_message.Message):
    __slots__ = ("index", "reason", "detail")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    index: int
    reason: str
    detail: str
    def __init__(self, index: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class Notices(_message.Message):
    __slots__ = ("notices",)
    NOTICES_FIELD_NUMBER: _ClassVar[int]
    notices: _containers.RepeatedCompositeFieldContainer[Notice]
    def __init__(self, notices: _Optional[_Iterable[_Union[Notice, _Mapping]]] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("kind", "subject", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    subject: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class EnvSpec(_message.Message):
    __slots__ = ("name", "num_agents", "observations", "action", "metrics", "max_episode_steps", "derived", "symmetries", "agents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_AGENTS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    DERIVED_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    num_agents: int
    observations: _containers.RepeatedCompositeFieldContainer[ArraySpec]
    action: ActionSpec
    metrics: _containers.RepeatedScalarFieldContainer[str]
    max_episode_steps: int
    derived: _containers.RepeatedCompositeFieldContainer[DerivedMap]
    symmetries: _containers.RepeatedCompositeFieldContainer[Symmetry]
    agents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., num_agents: _Optional[int] = ..., observations: _Optional[_Iterable[_Union[ArraySpec, _Mapping]]] = ..., action: _Optional[_Union[ActionSpec, _Mapping]] = ..., metrics: _Optional[_Iterable[str]] = ..., max_episode_steps: _Optional[int] = ..., derived: _Optional[_Iterable[_Union[DerivedMap, _Mapping]]] = ..., symmetries: _Optional[_Iterable[_Union[Symmetry, _Mapping]]] = ..., agents: _Optional[_Iterable[str]] = ...) -> None: ...

class Symmetry(_message.Message):
    __slots__ = ("name", "arrays", "action", "action_signs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_SIGNS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArrayChange]
    action: _containers.RepeatedScalarFieldContainer[int]
    action_signs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArrayChange, _Mapping]]] = ..., action: _Optional[_Iterable[int]] = ..., action_signs: _Optional[_Iterable[float]] = ...) -> None: ...

class ArrayChange(_message.Message):
    __slots__ = ("name", "flip", "turns", "order", "signs", "offsets")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FLIP_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SIGNS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    name: str
    flip: bool
    turns: int
    order: _containers.RepeatedScalarFieldContainer[int]
    signs: _containers.RepeatedScalarFieldContainer[float]
    offsets: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, name: _Optional[str] = ..., flip: bool = ..., turns: _Optional[int] = ..., order: _Optional[_Iterable[int]] = ..., signs: _Optional[_Iterable[float]] = ..., offsets: _Optional[_Iterable[float]] = ...) -> None: ...

class DerivedMap(_message.Message):
    __slots__ = ("name", "channels")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    name: str
    channels: _containers.RepeatedCompositeFieldContainer[Channel]
    def __init__(self, name: _Optional[str] = ..., channels: _Optional[_Iterable[_Union[Channel, _Mapping]]] = ...) -> None: ...

class Channel(_message.Message):
    __slots__ = ("kind", "source", "index", "values")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    source: str
    index: int
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, kind: _Optional[str] = ..., source: _Optional[str] = ..., index: _Optional[int] = ..., values: _Optional[_Iterable[float]] = ...) -> None: ...

class SampleSpec(_message.Message):
    __slots__ = ("name", "arrays", "sizes", "digest", "classes", "ignore_index", "flip_pairs")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARRAYS_FIELD_NUMBER: _ClassVar[int]
    SIZES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CLASSES_FIELD_NUMBER: _ClassVar[int]
    IGNORE_INDEX_FIELD_NUMBER: _ClassVar[int]
    FLIP_PAIRS_FIELD_NUMBER: _ClassVar[int]
    name: str
    arrays: _containers.RepeatedCompositeFieldContainer[ArraySpec]
    sizes: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    classes: _containers.RepeatedScalarFieldContainer[str]
    ignore_index: int
    flip_pairs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., arrays: _Optional[_Iterable[_Union[ArraySpec, _Mapping]]] = ..., sizes: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., classes: _Optional[_Iterable[str]] = ..., ignore_index: _Optional[int] = ..., flip_pairs: _Optional[_Iterable[int]] = ...) -> None: ...

class ArraySpec(_message.Message):
    __slots__ = ("name", "dtype", "shape", "per_agent")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    PER_AGENT_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    per_agent: bool
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., per_agent: bool = ...) -> None: ...

class ActionSpec(_message.Message):
    __slots__ = ("discrete", "continuous", "composite")
    DISCRETE_FIELD_NUMBER: _ClassVar[int]
    CONTINUOUS_FIELD_NUMBER: _ClassVar[int]
    COMPOSITE_FIELD_NUMBER: _ClassVar[int]
    discrete: Discrete
    continuous: Continuous
    composite: Composite
    def __init__(self, discrete: _Optional[_Union[Discrete, _Mapping]] = ..., continuous: _Optional[_Union[Continuous, _Mapping]] = ..., composite: _Optional[_Union[Composite, _Mapping]] = ...) -> None: ...

class Discrete(_message.Message):
    __slots__ = ("num_actions",)
    NUM_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    num_actions: int
    def __init__(self, num_actions: _Optional[int] = ...) -> None: ...

class Continuous(_message.Message):
    __slots__ = ("size", "low", "high")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    size: int
    low: float
    high: float
    def __init__(self, size: _Optional[int] = ..., low: _Optional[float] = ..., high: _Optional[float] = ...) -> None: ...

class Composite(_message.Message):
    __slots__ = ("factors", "low", "high", "idle")
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    factors: _containers.RepeatedScalarFieldContainer[int]
    low: _containers.RepeatedScalarFieldContainer[float]
    high: _containers.RepeatedScalarFieldContainer[float]
    idle: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, factors: _Optional[_Iterable[int]] = ..., low: _Optional[_Iterable[float]] = ..., high: _Optional[_Iterable[float]] = ..., idle: _Optional[_Iterable[bool]] = ...) -> None: ...
