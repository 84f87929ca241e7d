"""The fabric worker: work items from a broker, results to a broker, and the store that reads them."""

from tensorrt_llm_ext.worker.broker import Broker, Counts, Delivery, Message, NotPublished, Published
from tensorrt_llm_ext.worker.connection import Access
from tensorrt_llm_ext.worker.in_process import InProcessBroker
from tensorrt_llm_ext.worker.jetstream import JetStreamBroker
from tensorrt_llm_ext.worker.wanted import Difference, StreamSettings, Wanted, differences

__all__ = [
    "Access",
    "Broker",
    "Counts",
    "Delivery",
    "Difference",
    "InProcessBroker",
    "JetStreamBroker",
    "Message",
    "NotPublished",
    "Published",
    "StreamSettings",
    "Wanted",
    "differences",
]
