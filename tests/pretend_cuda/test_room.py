"""What graphs will take is asked for before a run begins."""

import threading
from pathlib import Path

import pytest

from murmur.learner_service.context import RunContext
from murmur.learner_service.run import Run
from murmur.shared.process.errors import SpecError
from tests.pretend_cuda import pretend_cuda
from tests.pretend_cuda.cases import Case, make_spec
from tests.pretend_cuda.known import ALLOWED

_GIB = 2**30


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_count_against_the_limit_of_memory(graphs: bool, tmp_path: Path) -> None:
    case, spec = Case("coma", "discrete", "shared", False, "fp32"), make_spec("discrete")
    learner = {"device": "cuda", "precision": "fp32", "pipeline": "async", "port": 0}
    learner |= {"metrics_port": 0, "cuda_graph": graphs, "memory_limit_gib": 32 * 1024 / _GIB}
    config = case.config(learner=learner)
    with pretend_cuda(ALLOWED):
        run = Run(RunContext(config, tmp_path, None, False, threading.Event()))
        try:
            if graphs:
                told = r"CUDA graphs of updates of \d+ .*learner\.cuda_graph=false"
                with pytest.raises(SpecError, match=told):
                    run.open(spec)
            else:
                run.open(spec)
                assert run.context.learner is not None
                run.context.learner.finished.set()
        finally:
            run.end_input()
            run.context.close()
