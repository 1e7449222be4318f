"""Whether this machine, and the others of a job, are fit to train; nothing is changed by asking."""

from msllm.engine.doctor.examination import examine
from msllm.engine.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict", "examine"]
