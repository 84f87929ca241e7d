"""The fabric worker: work items from a broker, results to a broker, and the store that reads them."""

from tensorrt_llm_ext.worker.broker import Broker, Counts, Delivery, Message, NotPublished, Published
from tensorrt_llm_ext.worker.connection import Access
from tensorrt_llm_ext.worker.in_process import InProcessBroker
from tensorrt_llm_ext.worker.jetstream import JetStreamBroker
from tensorrt_llm_ext.worker.metrics import Metrics, MetricsServer
from tensorrt_llm_ext.worker.storing import StoreSettings, StoreWriter
from tensorrt_llm_ext.worker.wanted import Difference, StreamSettings, Wanted, differences
from tensorrt_llm_ext.worker.worker import Worker, WorkerSettings, WorkReport

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
    "StoreSettings",
    "StoreWriter",
    "StreamSettings",
    "Wanted",
    "WorkReport",
    "Worker",
    "WorkerSettings",
    "differences",
]
