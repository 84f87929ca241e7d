"""The fence: a lease's number, checked where the data lies, in the same hold of the lock as the change."""

import threading
import time

import pytest

from tensorrt_llm_ext.errors import LeaseLost, StoreError
from tensorrt_llm_ext.store import Fence


def test_the_newest_lease_holds_again_and_again_and_older_ones_are_out(tmp_path):
    path = tmp_path / "new folder" / "part-0.fence"
    old, new = Fence(path, 7), Fence(path, 9)
    with old.held(), pytest.raises(StoreError, match="in the middle of a commit"), Fence(path, 9, patience_s=0.1).held():
        pass
    for _ in range(2):
        with new.held():
            pass
    with pytest.raises(LeaseLost, match="another writer has taken over") as caught, old.held():
        raise AssertionError("an older lease got in")
    assert (caught.value.expected, caught.value.found) == ("no lease newer than 7", "lease 9")
    assert int(path.read_text()) == 9


def test_a_newer_lease_waits_for_a_change_that_is_under_way(tmp_path):
    path, order = tmp_path / "fence", []

    def take_over():
        with Fence(path, 2).held():
            order.append("new")

    with Fence(path, 1).held():
        thread = threading.Thread(target=take_over)
        thread.start()
        time.sleep(0.2)
        order.append("old")
    thread.join(10)
    assert order == ["old", "new"]


def test_a_damaged_fence_is_an_error_and_an_empty_one_is_new(tmp_path):
    path = tmp_path / "fence"
    path.write_text("")
    with Fence(path, 1).held():
        pass
    path.write_text("not a number")
    with pytest.raises(StoreError, match="is damaged"), Fence(path, 2).held():
        pass
