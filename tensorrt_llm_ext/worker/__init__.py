"""The fabric worker: work items from a broker, results to a broker, and the store that reads them."""

from tensorrt_llm_ext.worker.access import Access
from tensorrt_llm_ext.worker.broker import Broker, Counts, Delivery, Message, NotPublished, Published
from tensorrt_llm_ext.worker.in_process import InProcessBroker
from tensorrt_llm_ext.worker.jetstream import JetStreamBroker
from tensorrt_llm_ext.worker.metrics import Metrics, MetricsServer
from tensorrt_llm_ext.worker.report import WorkReport
from tensorrt_llm_ext.worker.status import Status, status_of
from tensorrt_llm_ext.worker.storing import StoreSettings, StoreWriter
from tensorrt_llm_ext.worker.submitting import SubmitReport, make_stream, submit
from tensorrt_llm_ext.worker.wanted import Difference, StreamSettings, Wanted, differences
from tensorrt_llm_ext.worker.worker import Worker, WorkerSettings

__all__ = [
    "Access",
    "Broker",
    "Counts",
    "Delivery",
    "Difference",
    "InProcessBroker",
    "JetStreamBroker",
    "Message",
    "Metrics",
    "MetricsServer",
    "NotPublished",
    "Published",
    "Status",
    "StoreSettings",
    "StoreWriter",
    "StreamSettings",
    "SubmitReport",
    "Wanted",
    "WorkReport",
    "Worker",
    "WorkerSettings",
    "differences",
    "make_stream",
    "status_of",
    "submit",
]
