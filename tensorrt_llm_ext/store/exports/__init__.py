"""Exports: a dataset of states in the files that trainers read."""

from tensorrt_llm_ext.store.exports.export import EXPORT_NAME, FORMATS, Exported, export
from tensorrt_llm_ext.store.exports.slots import FinalNorm

__all__ = ["EXPORT_NAME", "FORMATS", "Exported", "FinalNorm", "export"]
