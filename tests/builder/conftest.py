"""Tiny checkpoints of every family, written once."""

import pytest
import tiny


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder of each family."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {family: tiny.tiny_checkpoint(root / family, family) for family in tiny.FAMILIES}
