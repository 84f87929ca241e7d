"""Stores: where records go to stay, checked back to their work items, committed whole."""

from tensorrt_llm_ext.store.disk import disk_errors
from tensorrt_llm_ext.store.fence import Fence
from tensorrt_llm_ext.store.header import Column, Header, columns_of
from tensorrt_llm_ext.store.lineage import check_lineage
from tensorrt_llm_ext.store.reading import Neighbour, Vectors, open_vectors
from tensorrt_llm_ext.store.vectors import DATASET_NAME, VectorStore, holds_dataset

__all__ = [
    "DATASET_NAME",
    "Column",
    "Fence",
    "Header",
    "Neighbour",
    "VectorStore",
    "Vectors",
    "check_lineage",
    "columns_of",
    "disk_errors",
    "holds_dataset",
    "open_vectors",
]
