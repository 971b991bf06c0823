"""The order of a run's agents, which the rows of every session take or the session is refused."""

from dataclasses import replace

from learner_service.learning.base import algorithm_config
from learner_service.learning.options import SharingConfig
from shared.config.experiment import ExperimentConfig
from shared.wire.spec import EnvSpec, agent_order


def in_order(spec: EnvSpec, known: EnvSpec | None, config: ExperimentConfig) -> EnvSpec:
    """The spec with the agents in the order of `known`, if its rows may be put in that order.

    They may where all agents share their networks, nothing is observed of all of them together and
    there is no league. An environment that lists the agents otherwise may list them otherwise in a
    state, too; and what is learned for one agent alone is safe only where its name is certain.

    Args:
        spec: spec of a session.
        known: spec of the run, or of the checkpoint that it comes from; None: there is none.
        config: configuration of the run.
    """
    if known is None or not agent_order(known, spec):
        return spec
    options = algorithm_config(config.algorithm)
    may_be_put = (
        isinstance(options, SharingConfig)
        and len(set(options.slices(spec.num_agents))) == 1
        and all(o.per_agent for o in spec.observations)
        and not config.league.on
    )
    return replace(spec, agents=known.agents) if may_be_put else spec
