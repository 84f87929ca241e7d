"""Stores: where records go to stay, checked back to their work items, committed whole."""

from tensorrt_llm_ext.store.disk import disk_errors
from tensorrt_llm_ext.store.fence import Fence
from tensorrt_llm_ext.store.folder import STATES_NAME, VECTORS_NAME, check_new, holds_dataset
from tensorrt_llm_ext.store.header import Column, Header, columns_of
from tensorrt_llm_ext.store.lineage import check_lineage
from tensorrt_llm_ext.store.manifest import read_states_header, states_folder
from tensorrt_llm_ext.store.reading import Neighbour, Vectors, open_vectors
from tensorrt_llm_ext.store.shard_size import DEFAULT_SHARD_BYTES, SHARD_BYTES
from tensorrt_llm_ext.store.states import StatesStore
from tensorrt_llm_ext.store.states_reading import States, TrainingSequence, open_states
from tensorrt_llm_ext.store.vectors import VectorStore

Store = VectorStore | StatesStore

__all__ = [
    "DEFAULT_SHARD_BYTES",
    "SHARD_BYTES",
    "STATES_NAME",
    "VECTORS_NAME",
    "Column",
    "Fence",
    "Header",
    "Neighbour",
    "States",
    "StatesStore",
    "Store",
    "TrainingSequence",
    "VectorStore",
    "Vectors",
    "check_lineage",
    "check_new",
    "columns_of",
    "disk_errors",
    "holds_dataset",
    "open_states",
    "open_vectors",
    "read_states_header",
    "states_folder",
]
