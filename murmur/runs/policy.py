"""A trained policy in this process: observations in, actions out, without a server."""

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from murmur.learner_service.checkpoint.contents import saved_policy, saved_spec
from murmur.learner_service.checkpoint.folder import CheckpointFolder
from murmur.learner_service.checkpoint.resize import with_agents
from murmur.learner_service.device.precision import Precision
from murmur.runs.run_folder import RunFolder
from murmur.shared.config.section import known_names
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.codec import RowCheck
from murmur.shared.wire.spec import EXPERT_ACTION, STATE, ArraySpec, shown_agents, without_expert
from murmur.shared.wire.timestep import Array, StepType, TimeStep

_FIRST = int(StepType.FIRST)
_NUMBERS = "biuf"  # kinds of NumPy's dtypes
Observation = TimeStep | Mapping[str, ArrayLike] | ArrayLike


class Policy:
    """A trained policy that acts in this process, in fp32, like the learner that serves it.

    A recurrent policy keeps the recurrent state of each environment between calls. Not
    thread-safe.

    Attributes:
        spec: spec of its observations and actions; in a league those of one team.
        agents: [A] names of the agents, in the order of their rows.
        config: configuration of its run.
        updates: number of updates of its training.
        recurrent: True if it has recurrent state.
    """

    def __init__(self, checkpoint: Path, device: str = "cpu", num_agents: int = 0) -> None:
        """Load a checkpoint.

        Args:
            checkpoint: file of the checkpoint.
            device: device to act on, by torch's name.
            num_agents: number of agents to act for; 0: as trained.

        Raises:
            CheckpointError: if the file cannot be read, holds no policy, or none for this number.
            ConfigError: if the device cannot be used.
        """
        self._device = _device(device)
        state = CheckpointFolder(checkpoint.parent, 1).load(checkpoint)
        state = with_agents(state, checkpoint.name, num_agents)
        precision = Precision("fp32", self._device)
        self.spec = without_expert(saved_spec(state))
        self.agents = self.spec.agent_names
        self._policy, self.config = saved_policy(checkpoint.name, state, precision, self._device)
        self.updates = int(state["progress"]["updates"])
        self.recurrent = self._policy.memory_size > 0
        self._checkpoint = checkpoint
        self._generator = torch.Generator(self._device).manual_seed(self.config.run.seed)
        self._memory: Tensor | None = None  # [N, A, H]
        self._row_check: tuple[int, RowCheck] | None = None  # of N

    def __repr__(self) -> str:
        return f"Policy({str(self._checkpoint)!r}, updates={self.updates})"

    def act(self, observation: Observation, *, sample: bool = False) -> Array:
        """Choose actions for one or for N environments.

        Args:
            observation: a TimeStep of N environments; or arrays by name, [A, ...] of one or
                [N, A, ...] of N environments; or a single array if the spec has one observation.
                `state`, which only critics see, may be left out.
            sample: flag to draw the actions from the policy, as in training; else take the
                likeliest.

        Returns:
            actions for `step`, [N, A] int32 or [N, A, U] float32; without N for one environment.

        Raises:
            ConfigError: if the arrays do not match the spec, or hold a number that no environment
                may give (docs/wire.md), such as NaN.
        """
        starts: Array | None = None
        if isinstance(observation, TimeStep):
            starts = observation.step_type == _FIRST
            observation = observation.observation
        arrays, one = self._checked(observation)
        rows = len(next(iter(arrays.values())))
        self._require_possible(arrays, rows, one)
        # Copies: results must not depend on the alignment of the caller's arrays.
        tensors = {name: torch.tensor(a, device=self._device) for name, a in arrays.items()}
        memory = self._load_memory(rows, starts) if self.recurrent else None
        with torch.inference_mode():
            acted = self._policy.act(tensors, self._generator if sample else None, memory)
        self._memory = acted.get("memory")
        action: Array = acted["action"].cpu().numpy()
        return action[0] if one else action

    def reset(self, environments: ArrayLike | None = None) -> None:
        """Reset the recurrent state; call it where episodes begin, unless `act` gets a TimeStep.

        Args:
            environments: [N] bool, or indices of environments; None: all, and N may change.

        Raises:
            ConfigError: if there are no such environments.
        """
        if environments is None:
            self._memory = None
        elif self._memory is not None:
            which = np.asarray(environments)
            which = which.astype(np.int64) if which.size == 0 else which
            over = np.zeros(len(self._memory), np.bool_)
            try:
                over[which] = True
            except IndexError as error:
                raise ConfigError(
                    f"policy.reset: {error}; the recurrent state is of {len(over)} environments: "
                    f"give a bool for each, or indices up to {len(over) - 1}"
                ) from None
            self._memory = self._memory.clone()
            self._memory[torch.from_numpy(over).to(self._device)] = 0

    def seed(self, seed: int) -> None:
        """Seed the generator of sampled actions; it begins with the seed of the run."""
        self._generator.manual_seed(seed)

    def _load_memory(self, rows: int, starts: Array | None) -> Tensor:
        """Return the recurrent state, [rows, A, H]; zero at the beginning of an episode.

        Raises:
            ConfigError: if the number of environments changed within an episode.
        """
        memory = self._memory
        if memory is None or (starts is not None and starts.all()):
            shape = rows, self.spec.num_agents, self._policy.memory_size
            return torch.zeros(shape, device=self._device)
        if len(memory) != rows:
            raise ConfigError(
                f"the recurrent state is of {len(memory)} environments, the observation of {rows}; "
                "call policy.reset() before other episodes begin"
            )
        if starts is None:
            return memory
        return memory.masked_fill(torch.tensor(starts, device=self._device).view(-1, 1, 1), 0)

    def _require_possible(self, arrays: Mapping[str, Array], rows: int, one: bool) -> None:
        """Check numbers by the rules that hold for what environments send.

        Raises:
            ConfigError: naming the first that breaks one.
        """
        if not rows:
            raise ConfigError("observations of no environment: N is 0")
        agents = self.spec.num_agents
        if self._row_check is None or self._row_check[0] != rows:
            self._row_check = rows, RowCheck(self.spec, rows)
        timestep = TimeStep(
            np.ones(rows, np.uint8),  # MID
            np.zeros((rows, agents), np.float32),
            np.ones(rows, np.float32),
            arrays,
            {},
        )
        check = self._row_check[1]
        for env, what in {} if check.passes(timestep) else check.broken(timestep).items():
            where = "" if one else f" of environment {env}"
            raise ConfigError(f"the observation{where} has {what}")

    def _checked(
        self, observation: Mapping[str, ArrayLike] | ArrayLike
    ) -> tuple[dict[str, Array], bool]:
        """Return the arrays by name, [N, ...], and whether they were given without N.

        Raises:
            ConfigError: if they do not match the spec.
        """
        wanted = {o.name: o for o in self.spec.observations}
        if not isinstance(observation, Mapping):
            if len(wanted) > 1:
                raise ConfigError(
                    f"'{self.spec.name}' has several observations; give them by name: "
                    + ", ".join(wanted)
                )
            observation = {name: observation for name in wanted}
        for name in observation:
            if name not in wanted and name not in (EXPERT_ACTION, STATE):
                names = known_names(str(name), wanted)
                raise ConfigError(f"'{self.spec.name}' has no observation '{name}'; {names}")
        missing = [name for name in wanted if name not in observation and name != STATE]
        if missing:
            raise ConfigError(f"observation without {', '.join(missing)} of '{self.spec.name}'")
        given = {name: x for name, x in observation.items() if name in wanted}
        arrays = {name: self._array(wanted[name], value) for name, value in given.items()}
        leading = {
            a.shape[: a.ndim - len(wanted[name].shape) - wanted[name].per_agent]
            for name, a in arrays.items()
        }
        if len(leading) > 1:
            shapes = ", ".join(f"{name} {a.shape}" for name, a in arrays.items())
            raise ConfigError(f"observations of different numbers of environments: {shapes}")
        one = leading == {()}
        return {name: a[None] if one else a for name, a in arrays.items()}, one

    def _array(self, spec: ArraySpec, value: ArrayLike) -> Array:
        """Convert the value to an array of the spec's dtype.

        Raises:
            ConfigError: if its shape or its values do not fit the spec.
        """
        given = np.asarray(value)
        shape = (*((self.spec.num_agents,) * spec.per_agent), *spec.shape)
        extra = given.ndim - len(shape)
        if extra not in (0, 1) or given.shape[extra:] != shape:
            hint = "; a league's policy acts for one team" if self.config.league.on else ""
            if self.spec.agents and spec.per_agent:
                hint += f"; its agents are {shown_agents(self.spec.agents)}"
            raise ConfigError(
                f"observation '{spec.name}' has shape {given.shape}; the policy takes {shape} of "
                f"one environment, or (N, {', '.join(map(str, shape))}) of N{hint}"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # said below
            array: Array = given if given.dtype.kind not in _NUMBERS else given.astype(spec.dtype)
        if array.dtype != spec.dtype or (array.dtype.kind in "iu" and (array != given).any()):
            raise ConfigError(
                f"observation '{spec.name}' has dtype {given.dtype}; its values do not fit in the "
                f"policy's {spec.dtype}"
            )
        if array.dtype.kind == "f" and given.dtype != array.dtype:
            over = np.isinf(array) & np.isfinite(given)
            if over.any():
                env, *index = np.argwhere(over if extra else over[None])[0].tolist()
                where = f" of environment {env}" if extra else ""
                of = f" of agent {index.pop(0)}" if spec.per_agent else ""
                raise ConfigError(
                    f"the observation{where} has {given[over][0]:g} in observation '{spec.name}'"
                    f"{of} at index {index}, which {spec.dtype} cannot hold"
                )
        return array


def load(
    run: str | PathLike[str],
    checkpoint: str | PathLike[str] = "best",
    *,
    device: str = "cpu",
    num_agents: int = 0,
) -> Policy:
    """Load the trained policy of a run or a checkpoint.

    Args:
        run: a run, its folder, or the file of a checkpoint.
        checkpoint: checkpoint of the run: "best" (the latest if there was no evaluation), "latest"
            or a file.
        device: device to act on, by torch's name.
        num_agents: number of agents to act for, if nothing that the policy is fed depends on it;
            0: as trained.

    Raises:
        MurmurError: if there is no such run or checkpoint, it holds no policy, or none for this
            number of agents.
    """
    path = Path(fspath(run))
    if path.is_file():
        return Policy(path, device, num_agents)
    folder = RunFolder.open(path)
    if folder.config().supervised:
        raise ConfigError(
            f"run '{path}' learned from a source and has no policy; `murmur evaluate {path} "
            "--folder PICTURES` predicts masks"
        )
    return Policy(folder.checkpoint(fspath(checkpoint)), device, num_agents)


def _device(name: str) -> torch.device:
    """Return the torch device of a name.

    Raises:
        ConfigError: if it cannot be used here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"device '{name}' cannot be used here: {reason}; give cpu") from None
    return device
