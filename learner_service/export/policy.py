"""A trained policy as one file that runs without murmur: ONNX, or PyTorch's exported program.

What is exported is `Policy.act` without a generator, traced: exactly what evaluations and a
serving learner play. Inputs are the raw observations by name, as the environment gives them
([B, A, ...], wire dtype); scaling, centring, agent numbers, masks and clipping are inside. Outputs
are "action" and, where the policy has them, "logits" and "mean". A policy with memory takes
"memory" and gives "next_memory". A row with an input that no environment may give, such as NaN, has
the action -1, or NaN where actions hold numbers: a file cannot raise. The batch dimension is free.
The file says all of this of itself, in JSON.
"""

import contextlib
import io
import json
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from murmur.learner_service.checkpoint.contents import saved_policy, saved_spec
from murmur.learner_service.device.precision import Precision
from murmur.learner_service.layers.building import observed_image, resolve_network
from murmur.learner_service.learning.base import Policy, algorithm_config
from murmur.learner_service.learning.options import TeamsConfig
from murmur.learner_service.learning.team_specs import agents_of_teams, network_of_team
from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.process.errors import ConfigError, ResourceError
from murmur.shared.process.files import write_output
from murmur.shared.wire.spec import (
    ACTION_MASK,
    AGENT_CELL,
    TURN_MASK,
    ActionSpec,
    EnvSpec,
    action_factors,
    factor_starts,
    without_expert,
)
from murmur.shared.wire.timestep import Array

Format = Literal["onnx", "torch-export", "safetensors"]
Arrays: TypeAlias = Mapping[str, Array]
SUFFIX: dict[Format, str] = {
    "onnx": ".onnx",
    "torch-export": ".pt2",
    "safetensors": ".safetensors",  # the weights alone
}
# Key of the metadata of ONNX and safetensors; <METADATA>.json is the extra file of a .pt2.
METADATA = "murmur"
MEMORY = "memory"
NEXT_MEMORY = "next_memory"
_OUTPUTS = ("action", "logits", "mean", NEXT_MEMORY)
FORMAT_VERSION = 1
_CPU = torch.device("cpu")
_EXAMPLE_ROWS = 3  # neither 0 nor 1, which tracing would take for constants
_CHECKED = (1, 64)  # rows
_TOLERANCE = 1e-4


class GreedyPolicy(nn.Module):
    """Policy in operation, as a module: observations by name -> outputs by name."""

    def __init__(self, policy: Policy, factors: tuple[int, ...], *, marks: bool = True) -> None:
        """Take over the policy's networks; it must be on the CPU and in fp32.

        Args:
            policy: the policy.
            factors: number of alternatives of each choice of an action.
            marks: mark the actions of rows with impossible inputs.
        """
        super().__init__()
        self._policy = policy
        self._marks, self._factors = marks, factors
        for name, part in vars(policy).items():
            if isinstance(part, nn.Module):  # registered, so that tracing finds its parameters
                self.add_module(name, part)

    def forward(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        """One step of every row; `observation` holds "memory" too if the policy remembers."""
        given = dict(observation)
        memory = given.pop(MEMORY, None)
        acted = self._policy.act(given, None, memory)
        if self._marks:
            marked = _marked(acted["action"], observation, self._factors)
            acted = {**acted, "action": marked}
        if MEMORY in acted:
            acted[NEXT_MEMORY] = acted[MEMORY]
        return {name: acted[name] for name in _OUTPUTS if name in acted}


def _marked(action: Tensor, observation: Mapping[str, Tensor], factors: tuple[int, ...]) -> Tensor:
    """Actions [B, A, ...], -1 or NaN in rows with NaN, infinity or an agent without an action."""
    possible = [x.isfinite() for x in observation.values() if x.is_floating_point()]
    if (mask := observation.get(ACTION_MASK)) is not None:
        for start, count in zip(factor_starts(factors), factors, strict=True):
            possible.append((mask[..., start : start + count] != 0).any(-1))
    if not possible:
        return action
    rows = torch.stack([p.flatten(1).all(1) for p in possible]).all(0)
    rows = rows.view(-1, *(1,) * (action.dim() - 1))
    return action.where(rows, float("nan") if action.is_floating_point() else -1)


@dataclass(frozen=True)
class Exported:
    """An exported policy.

    Attributes:
        path: the file.
        about: description of the policy in the file.
        difference: largest difference of an output between the file, read and run again, and the
            policy on random observations; of discrete actions, that of their logits.
    """

    path: Path
    about: dict[str, Any]
    difference: float


class Check(NamedTuple):
    """Comparison of a file with the module that it was exported from.

    Attributes:
        samples: inputs by name.
        pairs: function of the module's outputs and the file's that returns what must be equal.
        tolerance: relative and absolute, between PyTorch and ONNX Runtime in fp32.
    """

    samples: Iterable[dict[str, Tensor]]
    pairs: Callable[[Arrays, Arrays], dict[str, tuple[Array, Array]]]
    tolerance: float

    def difference(self, module: nn.Module, path: Path) -> float:
        """Read the file, run it and the module on the samples; return the largest difference.

        Raises:
            ResourceError: if they differ by more than rounding.
        """
        run, difference = load_exported(path), 0.0
        for given in self.samples:
            with torch.no_grad():
                ours = {name: x.numpy() for name, x in module(given).items()}
            theirs = run({name: x.numpy() for name, x in given.items()})
            for name, (wanted, got) in self.pairs(ours, theirs).items():
                if not np.allclose(wanted, got, rtol=self.tolerance, atol=self.tolerance):
                    raise ResourceError(
                        f"{path} gives other values of '{name}' than what was exported: PyTorch "
                        f"{torch.__version__} and the format's tools do not fit each other; see "
                        "docs/export.md for versions"
                    )
                apart = np.abs(np.nan_to_num(wanted) - np.nan_to_num(got))
                difference = max(difference, float(apart.max()))
        return difference


def load_policy(
    state: Mapping[str, Any], source: str = "given"
) -> tuple[Policy, EnvSpec, ExperimentConfig]:
    """The policy of a checkpoint, on the CPU in fp32; its spec; its run's configuration.

    Raises:
        MurmurError: if the checkpoint is not one of this version's algorithms.
    """
    policy, config = saved_policy(source, state, Precision("fp32", _CPU), _CPU)
    return policy, without_expert(saved_spec(state)), config


def execution(config: ExperimentConfig, spec: EnvSpec) -> Literal["centralized", "decentralized"]:
    """Return "centralized" if an agent's action may depend on what other agents observe.

    Args:
        config: configuration of the run.
        spec: spec of its environment.
    """
    options, image = algorithm_config(config.algorithm), observed_image(spec)
    networks = [(config.network, spec.num_agents)]
    if isinstance(options, TeamsConfig) and options.teams:
        networks = [
            (network_of_team(config.network, options.of_team(team).network, image, team), len(own))
            for team, own in agents_of_teams(options, spec).items()
        ]
    mixes = any(resolve_network(network, image).mixes and size > 1 for network, size in networks)
    return "centralized" if mixes else "decentralized"


def export_policy(state: Mapping[str, Any], kind: Format, path: Path, source: str) -> Exported:
    """Write a checkpoint's policy, read the file back, and compare what both do.

    Args:
        state: the checkpoint.
        kind: the format.
        path: the file to write.
        source: name of the checkpoint, for the file's description.

    Raises:
        MurmurError: if the checkpoint cannot be used, the format cannot hold what the policy does,
            the file cannot be written, or does not do what the policy does.
    """
    policy, spec, config = load_policy(state, source)
    memory_size, factors = getattr(policy, "memory_size", 0), action_factors(spec.action)
    unmarked, module = (GreedyPolicy(policy, factors, marks=marks) for marks in (False, True))
    rows = {0: torch.export.Dim("rows", min=1)}
    example = random_observations(spec, _EXAMPLE_ROWS, 0, memory_size)
    program = trace(unmarked, example, dict.fromkeys(example, rows))
    unused = _unused_inputs(program, tuple(example))
    # Such as the global state, which only critics see.
    example = {name: value for name, value in example.items() if name not in unused}
    about = {
        "format": FORMAT_VERSION,
        "algorithm": config.algorithm.name,
        "checkpoint": source,
        "updates": state["progress"]["updates"],
        "execution": execution(config, spec),
        "spec": {
            **asdict(spec),
            "action": _described(spec.action),
        },
        "inputs": [
            {"name": name, "dtype": str(x.dtype).removeprefix("torch."), "shape": [*x.shape[1:]]}
            for name, x in example.items()
        ],
        "outputs": list(module(example)),
    }  # shapes without the leading rows

    every = (random_observations(spec, n, seed, memory_size) for seed, n in enumerate(_CHECKED, 1))
    samples = ({name: given[name] for name in example} for given in every)
    check = Check(samples, partial(_pairs, factors), _TOLERANCE)
    sizes = dict.fromkeys(example, rows)
    return write_exported(module, example, sizes, kind, path, about, check)


def write_exported(
    module: nn.Module,
    example: dict[str, Tensor],
    sizes: dict[str, dict[int, Any]],
    kind: Format,
    path: Path,
    about: dict[str, Any],
    check: Check,
) -> Exported:
    """Write a module or its weights with `about`, read the file back, and compare what both do.

    Args:
        module: module to export.
        example: inputs by name.
        sizes: dimensions that may change, by name of an input.
        kind: the format.
        path: the file to write.
        about: description of the file, which names its outputs.
        check: comparison of the file with the module.

    Raises:
        ConfigError: if the format cannot hold it, or the file cannot be written.
        ResourceError: if the file does not do what the module does.
    """
    if kind == "safetensors":
        _write_weights(module, path, about)
        return Exported(path, about, 0.0)
    program, onnx = trace(module, example, sizes), kind == "onnx"
    data = _onnx_bytes(program, example, about) if onnx else _program_bytes(program, about)
    write_output(path, data)
    return Exported(path, about, check.difference(module, path))


def _write_weights(module: nn.Module, path: Path, about: dict[str, Any]) -> None:
    """Write a module's weights by name, with `about`, and compare them with what is read back.

    Raises:
        ConfigError: if the file cannot be written.
        ResourceError: if it holds other weights.
    """
    from safetensors.torch import load_file, save

    # Two names may share memory, which the format refuses.
    weights = {name: x.detach().clone().contiguous() for name, x in module.state_dict().items()}
    write_output(path, save(weights, {METADATA: json.dumps(about)}))
    read = load_file(path)
    if read.keys() != weights.keys() or any(not read[k].equal(x) for k, x in weights.items()):
        raise ResourceError(f"{path} holds other weights than the policy")


def _described(action: ActionSpec) -> dict[str, Any]:
    """Describe an action spec for JSON, which has no infinity: a bound that is none is null."""

    def finite(value: Any) -> Any:  # noqa: ANN401 - whatever a spec holds
        if isinstance(value, tuple):
            return [finite(x) for x in value]
        return None if isinstance(value, float) and math.isinf(value) else value

    found = {name: finite(value) for name, value in asdict(action).items()}
    return {"kind": type(action).__name__.lower(), **found}


def random_observations(
    spec: EnvSpec, rows: int, seed: int, memory_size: int = 0
) -> dict[str, Tensor]:
    """Rows of random numbers as an environment of this spec might give them, by name."""
    random = np.random.default_rng(seed)
    maps = next(iter(spec.own_images), None)
    found: dict[str, Array] = {}
    for o in spec.observations:
        shape = (rows, *((spec.num_agents,) * o.per_agent), *o.shape)
        if o.name == ACTION_MASK:
            mask = random.random(shape) < 0.6
            factors = action_factors(spec.action)
            for start, count in zip(factor_starts(factors), factors, strict=True):
                mask[..., start] |= ~mask[..., start : start + count].any(-1)
            found[o.name] = mask.astype(o.dtype)
        elif o.name == TURN_MASK:
            turn = random.integers(spec.num_agents, size=(rows, 1))
            found[o.name] = (turn == np.arange(spec.num_agents)).astype(o.dtype)
        elif o.name == AGENT_CELL:
            high = maps.shape[1:] if maps else (1, 1)
            found[o.name] = random.integers(high, size=shape).astype(o.dtype)
        elif o.dtype.startswith("float"):
            found[o.name] = random.normal(size=shape).astype(o.dtype)
        else:
            found[o.name] = random.integers(0, 256, shape).astype(o.dtype)
    if memory_size:
        found[MEMORY] = random.normal(size=(rows, spec.num_agents, memory_size)).astype("float32")
    return {name: torch.from_numpy(array) for name, array in found.items()}


def trace(
    module: nn.Module, example: dict[str, Tensor], sizes: dict[str, dict[int, Any]]
) -> torch.export.ExportedProgram:
    """A module's computation; `sizes`: by name of an input, the dimensions that may change."""
    with quiet():
        return torch.export.export(module.eval(), (example,), dynamic_shapes=(sizes,), strict=False)


def _unused_inputs(program: torch.export.ExportedProgram, names: tuple[str, ...]) -> set[str]:
    """Inputs that no output depends on, but for their number of rows."""
    used: set[torch.fx.Node] = set()
    for node in reversed(program.graph.nodes):
        if node.op == "output" or (node in used and "sym_size" not in str(node.target)):
            used.update(node.all_input_nodes)
    known = {node.name for node in used}
    inputs = program.graph_signature.user_inputs
    return {name for name, node in zip(names, inputs, strict=True) if str(node) not in known}


def _program_bytes(program: torch.export.ExportedProgram, about: dict[str, Any]) -> bytes:
    """A .pt2 file."""
    buffer = io.BytesIO()
    with quiet():
        torch.export.save(program, buffer, extra_files={f"{METADATA}.json": json.dumps(about)})
    return buffer.getvalue()


def _onnx_bytes(
    program: torch.export.ExportedProgram, example: dict[str, Tensor], about: dict[str, Any]
) -> bytes:
    """An .onnx file."""
    import onnxscript  # noqa: F401 - torch needs it, and says less clearly that it is missing

    with quiet():
        try:
            translated = torch.onnx.export(
                program,
                (example,),
                input_names=list(example),
                output_names=about["outputs"],
                dynamo=True,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ConfigError(
                f"ONNX cannot hold this policy: {_innermost(error)}; change the network, or use "
                "--format torch-export"
            ) from error
        assert translated is not None
        graph = translated.model.graph
        for node in graph:
            for value in node.outputs:
                if value not in graph.outputs:  # an observation may be called as an operation is
                    value.name = f"_{value.name}"
        translated.model.metadata_props[METADATA] = json.dumps(about)
        return translated.model_proto.SerializeToString()


def _innermost(error: BaseException) -> str:
    """The first line of the error that others were raised from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().partition("\n")[0][:300]


def _pairs(
    factors: tuple[int, ...], ours: Arrays, theirs: Arrays
) -> dict[str, tuple[Array, Array]]:
    """Return outputs by name that must be equal, actions [B, A, ...] by the logits of choices.

    Of two equally good actions either will do.
    """
    found = {name: (array, theirs[name]) for name, array in ours.items()}
    if "logits" not in ours:
        return found
    logits, starts = ours["logits"], np.array(factor_starts(factors))

    def with_logits(action: Array) -> Array:
        entries = action if action.ndim == logits.ndim else action[..., None]
        chosen = starts + entries[..., : len(factors)].astype(np.int64)
        numbers = entries[..., len(factors) :]
        return np.concatenate([np.take_along_axis(logits, chosen, -1), numbers], -1)

    return found | {"action": (with_logits(ours["action"]), with_logits(theirs["action"]))}


def load_exported(path: Path) -> Callable[[dict[str, Array]], dict[str, Array]]:
    """An exported file as a function of arrays by name -> arrays by name."""
    if path.suffix == SUFFIX["onnx"]:
        import onnxruntime

        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        return lambda given: dict(zip(names, session.run(names, given), strict=True))
    with quiet():
        module = torch.export.load(path).module()

    def run(given: dict[str, Array]) -> dict[str, Array]:
        out = module({name: torch.from_numpy(array) for name, array in given.items()})
        return {name: value.numpy() for name, value in out.items()}

    return run


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the tools' own remarks, which are about themselves."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
