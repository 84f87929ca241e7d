"""The patch set for upstream TensorRT-LLM: our outputs in its decoder definition, and its PyTorch backend's twin.

It holds no text of upstream's. See README.md beside this file.
"""

from model_patches.capture import Capture, capture
from model_patches.captured import captured_contract, captured_origin
from model_patches.patch import FileStatus, apply, revert, status
from model_patches.site import Site, find_site

__all__ = [
    "Capture",
    "FileStatus",
    "Site",
    "apply",
    "capture",
    "captured_contract",
    "captured_origin",
    "find_site",
    "revert",
    "status",
]
