"""Starts one run as `msllm pretrain` does, from settings in a JSON file; exits with its status.

Usage: run_case.py SETTINGS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from msllm.config import RunConfig, write_run
from msllm.engine.launch import launch
from msllm.engine.training.run_folder import RunFolder
from msllm.errors import MsllmError


def main() -> int:
    run = RunConfig.model_validate(json.loads(Path(sys.argv[1]).read_text()))
    assert run.out is not None
    folder = RunFolder(run.out).create()
    write_run(run, folder.config)
    try:
        launch("msllm.engine.training.worker", [str(run.out)], run.launch, folder.logs)
    except MsllmError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
