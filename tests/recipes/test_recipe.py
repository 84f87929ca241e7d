"""Recipes and cards are data that is checked: what is not known, or out of range, is refused with its place."""

import pytest

from tensorrt_llm_ext.errors import RecipeError
from tensorrt_llm_ext.recipes import Recipe, load_card, load_recipe
from tensorrt_llm_ext.recipes.toml_file import DATA

CARD = 'name = "c"\ntitle = "a card"\nbackend = "ort"\nprecisions = ["float32"]\nopt_num_tokens = 8\nmax_batch_size = 2\n'


@pytest.fixture
def toml(tmp_path):
    def written(text: str):
        path = tmp_path / "some.toml"
        path.write_text(text)
        return path

    return written


def refusal(load, path) -> RecipeError:
    with pytest.raises(RecipeError) as error:
        load(path)
    return error.value


def test_every_recipe_and_card_of_the_repository_is_read():
    recipes, cards = sorted(DATA.glob("*.toml")), sorted((DATA / "cards").glob("*.toml"))
    assert recipes and cards
    assert {load_recipe(path).name for path in recipes} == {path.stem for path in recipes}
    assert {load_card(path).name for path in cards} == {path.stem for path in cards}


def test_a_recipe_is_found_by_name_and_by_path():
    assert load_recipe("smollm2-135m") == load_recipe(DATA / "smollm2-135m.toml")
    assert load_card("cpu").precisions[0] == "float32"


def test_what_a_recipe_leaves_out_is_the_default(toml):
    assert load_recipe(toml("")) == Recipe()


def test_a_name_that_does_not_exist_is_refused_with_the_nearest():
    assert "did you mean 'smollm2-135m'?" in refusal(load_recipe, "smolm2-135m").expected
    assert "did you mean 'cpu'?" in refusal(load_card, "cpus").expected


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    assert "No such file" in refusal(load_recipe, tmp_path / "absent.toml").found


@pytest.mark.parametrize(
    ("text", "key", "expected", "found"),
    [
        ("max_seq_length = 5", "'max_seq_length'", "did you mean 'max_seq_len'?", "'max_seq_length'"),
        ("[model]\nlayers = 5", "'model.layers'", "did you mean 'num_layers'?", "'model.layers'"),
        ('max_seq_len = "5"', "'max_seq_len'", "a whole number", "'5'"),
        ("max_seq_len = true", "'max_seq_len'", "a whole number", "True"),
        ("max_seq_len = 5.5", "'max_seq_len'", "a whole number", "5.5"),
        ("max_seq_len = 0", "'max_seq_len'", "a number of at least 1", "0"),
        ("[model]\nnum_heads = -1", "'model.num_heads'", "a number of at least 1", "-1"),
        ("taps = 3", "'taps'", "a text", "3"),
        ("model = 3", "'model'", "a table", "3"),
        ('precision = "int3"', "'precision'", "'float32'", "'int3'"),
    ],
)
def test_a_wrong_entry_is_refused_with_file_and_key(text, key, expected, found, toml):
    error = refusal(load_recipe, toml(text))
    assert key in error.what and "some.toml" in error.what
    assert expected in error.expected and error.found == found


def test_a_missing_key_is_refused(toml):
    assert "lacks the key 'title'" in refusal(load_card, toml('name = "c"')).what


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [('["float32"]', '"float32"', "an array"), ('["float32"]', '["float99"]', "one of"), ('"ort"', '"ortx"', "one of")],
)
def test_a_wrong_card_is_refused(old, new, expected, toml):
    assert load_card(toml(CARD)).name == "c"
    assert expected in refusal(load_card, toml(CARD.replace(old, new))).expected


@pytest.mark.parametrize("text", [b"a = = 1", b"\xff\xfe"])
def test_what_is_not_toml_is_refused(text, tmp_path):
    path = tmp_path / "broken.toml"
    path.write_bytes(text)
    assert "is not TOML" in refusal(load_recipe, path).what


def test_a_number_given_in_python_has_the_same_range():
    with pytest.raises(RecipeError, match="'max_batch_size' in the recipe"):
        Recipe(max_batch_size=0)
