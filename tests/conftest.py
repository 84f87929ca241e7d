"""Fixtures that every room shares."""

import gc
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # tests import tiny.py by name


def pytest_collection_finish():
    """Set aside what the tests' imports have made: half a million objects, once torch is among them, which every collection of
    garbage would go through, hundreds of times in the rooms that count what is held."""
    gc.collect()
    gc.freeze()
