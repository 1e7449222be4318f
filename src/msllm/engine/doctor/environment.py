"""Environment variables that slow training down or break it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from msllm.engine.device import Device
from msllm.engine.doctor.finding import Finding, Verdict


@dataclass(frozen=True, slots=True)
class Rule:
    """A variable that hurts with some values."""

    name: str
    hurts: Callable[[str], bool]
    why: str


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().lower() in values


def _below(limit: int) -> Callable[[str], bool]:
    return lambda value: value.strip().isdecimal() and int(value) < limit


def _no_list_of_numbers(value: str) -> bool:
    parts = value.replace("-", ",").split(",")
    return any(not part.strip().isdecimal() for part in parts)


RULES = (
    Rule("ASCEND_LAUNCH_BLOCKING", _is("1"), "each kernel is waited for: for debugging only"),
    Rule("TASK_QUEUE_ENABLE", _is("0"), "kernels are launched from Python's own thread: slow"),
    Rule("ASCEND_GLOBAL_LOG_LEVEL", _is("0", "1"), "CANN writes a log line for every launch"),
    Rule("ASCEND_SLOG_PRINT_TO_STDOUT", _is("1"), "CANN's log goes into the run's own"),
    Rule("HCCL_CONNECT_TIMEOUT", _below(120), "slow ranks are given up before they are there"),
    Rule("HCCL_EXEC_TIMEOUT", _below(600), "a save of a large checkpoint is taken for a hang"),
    Rule("HCCL_DETERMINISTIC", _is("true", "strict"), "sums over ranks are ordered: slower"),
    Rule("ASCEND_RT_VISIBLE_DEVICES", _no_list_of_numbers, "it is no list of numbers such as 0,1"),
    Rule("CUDA_LAUNCH_BLOCKING", _is("1"), "each kernel is waited for: for debugging only"),
    Rule("TORCH_DISTRIBUTED_DEBUG", _is("detail"), "every collective is checked over all ranks"),
    Rule("RANK", lambda _: True, "a launcher's variable is left over: msllm sets its own"),
    Rule("WORLD_SIZE", lambda _: True, "a launcher's variable is left over: msllm sets its own"),
)
"""What torch_npu's and CANN's references of environment variables say of them."""


def findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Tell variables that hurt, and those that win over msllm's own settings."""
    hurting = [rule for rule in RULES if rule.name in env and rule.hurts(env[rule.name])]
    for rule in hurting:
        mend = f"{rule.why}; `unset {rule.name}`"
        yield Finding(rule.name, Verdict.WARNING, repr(env[rule.name]), mend)
    told = {rule.name for rule in hurting}
    for name, (value, why) in Device("npu").environment().items():
        if name in env and env[name] != value and name not in told:
            said = f"{env[name]!r}, where msllm would set {value!r} ({why})"
            yield Finding(name, Verdict.NOTE, said)
    if not hurting:
        yield Finding("variables", Verdict.OK, "none that are known to hurt")
