"""The job: from an input to a dataset, in windows, with every row accounted for."""

from tensorrt_llm_ext.job.job import Job, with_taps
from tensorrt_llm_ext.job.report import Progress, Report
from tensorrt_llm_ext.job.run import INTERRUPTED, run_job
from tensorrt_llm_ext.job.windows import WindowLimits, window_limits

__all__ = ["INTERRUPTED", "Job", "Progress", "Report", "WindowLimits", "run_job", "window_limits", "with_taps"]
