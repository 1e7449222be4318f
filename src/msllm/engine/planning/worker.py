"""The process that traces: requests come in and answers go out as lines of JSON, see `tracer`."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from msllm.config import RunConfig
from msllm.engine.layout import Layout
from msllm.engine.planning.records import to_json
from msllm.models.resolve import resolve_model


def main(kind: str) -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the libraries print is no answer
    from msllm.engine.planning.trace import StageTracer

    tracer = StageTracer(kind)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        run = RunConfig.model_validate(request["run"])
        architecture = resolve_model(run.model).architecture
        assert architecture is not None
        layout = Layout.from_world(run.layout, run.launch.world_size)
        found = tracer.trace(architecture, layout, run, request["stage"], request["imbalance"])
        print(json.dumps(to_json(found)), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
