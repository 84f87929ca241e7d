"""Runtime: the main path, from work items to records: packing, one stream, the measured convention, Session."""

from tensorrt_llm_ext.runtime.canaries import CanaryDistance, CanaryTicket
from tensorrt_llm_ext.runtime.convention import ConventionEvidence, OutputEvidence, measure_convention
from tensorrt_llm_ext.runtime.door import check_files
from tensorrt_llm_ext.runtime.packing import batches, batches_of_windows
from tensorrt_llm_ext.runtime.session import Session, Ticket

__all__ = [
    "CanaryDistance",
    "CanaryTicket",
    "ConventionEvidence",
    "OutputEvidence",
    "Session",
    "Ticket",
    "batches",
    "batches_of_windows",
    "check_files",
    "measure_convention",
]
