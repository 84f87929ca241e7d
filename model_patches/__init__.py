"""The patch set for upstream TensorRT-LLM: our outputs in its decoder definition, and its PyTorch backend's twin.

It holds no text of upstream's. See README.md beside this file.
"""

from model_patches.patch import FileStatus, apply, revert, status
from model_patches.site import Site, find_site

__all__ = ["FileStatus", "Site", "apply", "find_site", "revert", "status"]
