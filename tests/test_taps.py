"""A tap is a triple; text is only a spelling, and a spelling that could mean two things is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorrt_llm_ext.errors import TapError
from tensorrt_llm_ext.taps import Tap, parse_taps


@pytest.mark.parametrize(
    ("spelling", "tap", "column"),
    [
        ("final@last", Tap(30, "post", "last"), "final_post_last"),
        ("final:pre@all", Tap(30, "pre", "all"), "final_pre_all"),
        ("layer:16@mean", Tap(16, "pre", "mean"), "layer_016_pre_mean"),
        ("layer:0@last", Tap(0, "pre", "last"), "layer_000_pre_last"),
    ],
)
def test_a_spelling_names_one_triple_and_one_column(spelling, tap, column):
    assert parse_taps(spelling, num_layers=30) == (tap,)
    assert tap.column(30) == column


def test_several_taps_keep_the_order_given():
    taps = parse_taps("layer:3@all, final@last", num_layers=30)
    assert [tap.layer for tap in taps] == [3, 30]


def test_eagle3_expands_to_three_layers_and_the_last_before_the_norm():
    assert parse_taps("eagle3", num_layers=32) == (
        Tap(2, "pre", "all"),
        Tap(16, "pre", "all"),
        Tap(29, "pre", "all"),
        Tap(32, "pre", "all"),
    )


@pytest.mark.parametrize("num_layers", [1, 5, 6])
def test_eagle3_is_refused_where_its_layers_would_coincide(num_layers):
    with pytest.raises(TapError, match="eagle3 preset needs three different layers"):
        parse_taps("eagle3", num_layers=num_layers)


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("layer:30@last", "before and after the final norm differ"),
        ("layer:31@last", "layer that the model does not have"),
        ("final@first", "is not a tap"),
        ("final", "is not a tap"),
        ("layer:-1@last", "is not a tap"),
        ("", "is not a tap"),
        ("final@last,final@last", "named twice"),
        ("eagle3,final:pre@all", "named twice"),
    ],
)
def test_a_wrong_spelling_is_refused_with_what_to_write(spelling, words):
    with pytest.raises(TapError, match=words) as error:
        parse_taps(spelling, num_layers=30)
    assert error.value.fix


@given(st.integers(1, 200), st.data())
def test_every_tap_survives_its_spelling_and_its_dictionary(num_layers, data):
    layer = data.draw(st.integers(0, num_layers))
    norm = data.draw(st.sampled_from(["pre", "post"] if layer == num_layers else ["pre"]))
    tap = Tap(layer, norm, data.draw(st.sampled_from(["last", "mean", "all"])))
    assert parse_taps(tap.spelling(num_layers), num_layers) == (tap,)
    assert Tap.from_dict(tap.to_dict()) == tap
