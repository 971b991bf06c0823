"""The dashboard Overview: Is it learning, how fast, and what is it waiting for?"""

from monitoring.panel import (
    LEARNER,
    LEARNER_NAME,
    SERVER,
    Board,
    Panel,
    learner_gauge,
    per_second,
    rate,
)


def ledger(thread: str, title: str, description: str) -> Panel:
    """Return a panel of a learner thread's time by state; the states add up to the whole."""
    where = f'{LEARNER}, thread="{thread}"'
    seconds = rate("murmur_learner_state_seconds_total", where)
    share = f"sum by (state) ({seconds}) / scalar(sum({seconds}))"
    return Panel(title, description, [(share, "{{state}}")], "percentunit", "stack", 8)


LEARNER_TIME = ledger(
    "learner",
    "What the learner thread does",
    "Mostly wait_rows: more environment servers. Mostly forward, backward, optimize or "
    "synchronize: the update is the bottleneck, which is where it should be; a faster device, "
    "lower precision or fewer data_passes make it faster. Empty with pipeline=sync: then the "
    "inference thread learns, and has these states.",
)
INFERENCE_TIME = ledger(
    "inference",
    "What the inference thread does",
    "Mostly wait_environments: the environments are the bottleneck. Mostly wait_learning: acting "
    "is as far ahead of learning as it may be, so the update is. Mostly act or transfer: a "
    "smaller network, a faster device, larger batches.",
)
SERVER_TIME = Panel(
    "What the environment servers do",
    "Mostly step: the environments are the bottleneck, add workers while cores are free. Mostly "
    "wait: the learner is; more servers gain nothing. Much pack and unpack: messages are many and "
    "small, raise envs_per_worker.",
    [(f"avg by (state) (murmur:env_state:ratio{{{SERVER}}})", "{{state}}")],
    "percentunit",
    "stack",
    8,
)
RETURN = Panel(
    "Return",
    "Mean of recent episodes, summed over agents. Training explores, evaluation is greedy. Falls "
    "after it rose: lower learning rates or a smaller max_policy_lag.",
    [learner_gauge("murmur_learner_episode_return", f"{{{{mode}}}} {LEARNER_NAME}")],
)
RATE = Panel(
    "Agent steps a second",
    "Decisions of single agents that reach the learner. Flat although servers were added: look at "
    "what the learner thread does.",
    [learner_gauge("murmur:agent_steps:rate1m")],
    per_second("steps"),
)
_NOW = [
    Panel(
        "Waits for rows",
        "Share of the learner's time. High: more environment servers.",
        [(f"avg(murmur:learner_starved:ratio{{{LEARNER}}})", "")],
        "percentunit",
        "stat",
        4,
        warn=0.3,
        bad=0.5,
    ),
    Panel(
        "Rows it could use",
        "How many times as many rows as it gets the learner could learn from: "
        "multiply the environment servers by this to keep it busy.",
        [(f"avg(murmur:row_demand:ratio{{{LEARNER}}})", "")],
        "suffix:×",
        "stat",
        4,
        warn=1.5,
        bad=2,
    ),
    Panel(
        "Device busy",
        "Share of the last seconds in which it acted or learned. Low: see what the "
        "learner thread waits for.",
        [(f"avg(murmur_learner_device_busy_ratio{{{LEARNER}}})", "")],
        "percentunit",
        "stat",
        4,
        warn=0.7,
        bad=0.4,
    ),
    Panel(
        "Agent steps a second",
        "Over all selected learners.",
        [(f"sum(murmur:agent_steps:rate1m{{{LEARNER}}})", "")],
        per_second("steps"),
        "stat",
        4,
    ),
    Panel(
        "Training sessions",
        "None: environment servers cannot reach the learner or it refuses them.",
        [(f'sum(murmur_learner_sessions{{{LEARNER}, mode="train"}})', "")],
        "short",
        "stat",
        4,
        warn=1,
        bad=0.5,
    ),
    Panel(
        "Alerts firing",
        "Listed in Prometheus under Alerts; remedies: docs/reference/alerts.md.",
        [('count(ALERTS{alertstate="firing", alertname=~"Murmur.*"}) or vector(0)', "")],
        "short",
        "stat",
        4,
        warn=1,
        bad=2,
    ),
]
BOARD = Board(
    "murmur-overview",
    "Overview",
    "Is it learning, how fast, and what is it waiting for?",
    [
        ("Now", _NOW),
        ("Where the time goes", [LEARNER_TIME, INFERENCE_TIME, SERVER_TIME]),
        ("Progress", [RATE, RETURN]),
    ],
)
