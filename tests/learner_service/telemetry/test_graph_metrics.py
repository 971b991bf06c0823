"""What /metrics says of CUDA graphs: the sum over the threads that use them."""

import torch
from prometheus_client import generate_latest

from murmur.learner_service.device.cuda_graph import Captured, Graphs
from murmur.learner_service.telemetry.metrics import LearnerMetrics
from tests.learner_service.toys import CPU


def test_calls_and_fallbacks_are_summed_over_threads() -> None:
    metrics = LearnerMetrics()
    for _ in range(2):
        graphs = Graphs(CPU)
        metrics.watch(graphs)
        Captured("act", lambda rows: dict(rows), graphs)({"x": torch.ones(1)})
    graphs.fallbacks["act", "memory"] += 1
    graphs.retry_calls["act"] = 255
    text = generate_latest(metrics.registry).decode()
    assert 'murmur_learner_eager_calls_total{graph="act"} 2.0' in text
    assert 'murmur_learner_graph_fallbacks_total{graph="act",reason="memory"} 1.0' in text
    assert 'murmur_learner_graph_retry_calls{graph="act"} 255.0' in text
    assert 'murmur_learner_eager_seconds_total{graph="act"}' in text
    assert "murmur_learner_graph_replays_total{" not in text
