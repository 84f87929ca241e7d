"""Every kernel does what its plain twin promises: on a card, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1)."""

import os
from dataclasses import replace

import pytest
import torch

from tensorrt_llm_ext.backends.torch import plain
from tensorrt_llm_ext.backends.torch.sizes import TILE, num_tiles
from tensorrt_llm_ext.backends.torch.values import FP8, Batch, HeadNorms, Heads, Linear, Norm, Rope, Rows

triton = pytest.importorskip("triton", reason="Triton comes with torch for CUDA")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or IS_INTERPRETED):
    pytest.skip("no CUDA card, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from tensorrt_llm_ext.backends.torch import kernels  # noqa: E402  Triton decides how to run at import

DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPE = torch.float32 if IS_INTERPRETED else torch.bfloat16
CLOSE = {"atol": 1e-5, "rtol": 1e-5} if IS_INTERPRETED else {"atol": 2e-2, "rtol": 2e-2}  # bfloat16: 8 bits
SATURATING = [] if IS_INTERPRETED else [0.002]  # a fixed scale that cuts: the interpreter's cast to e4m3 does not
SIZE = 80  # not a power of two
LENGTHS = (5, 1, 130, 128, 257)  # short ones, one that fills a tile, and long ones


def random(*shape, dtype=None, seed=0):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPE if dtype is None else dtype).to(DEVICE)


def ids(*values):
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def rows_pair(num_rows, size, is_fp8, input_scale=None):
    """Two places for the same rows, poisoned."""

    def place():
        scales = torch.full((num_rows, 1), float("nan"), device=DEVICE) if is_fp8 else None
        values = torch.full((num_rows, size), float("nan"), device=DEVICE).to(FP8 if is_fp8 else DTYPE)
        return Rows(values, scales, None, input_scale)

    return place(), place()


def values_of(rows):
    return rows.values.float() * (1 if rows.scales is None else rows.scales)


def first_rows(rows, count):
    return replace(rows, values=rows.values[:count], scales=None if rows.scales is None else rows.scales[:count])


def assert_same_rows(found, expected):
    """FP8: the scales are close, and no value is more than one step of e4m3 (an eighth of its size) away."""
    assert torch.isfinite(values_of(found)).all()
    if found.scales is None:
        torch.testing.assert_close(found.values, expected.values, **CLOSE)
    else:
        torch.testing.assert_close(found.scales, expected.scales, rtol=2e-2, atol=0)
        close = torch.isclose(values_of(found), values_of(expected), rtol=1e-2, atol=1e-6)
        assert close.float().mean() > 0.95  # only a value on the border between two steps may fall on the other side
        if not IS_INTERPRETED:  # the interpreter loses the carry of a value that rounds up to a power of two
            torch.testing.assert_close(values_of(found), values_of(expected), rtol=0.13, atol=float(expected.scales.max()))


def test_embedding_rows_are_those_of_the_tokens_and_zero_past_them():
    table, x, expected = random(50, SIZE), random(8, SIZE), random(8, SIZE)
    for module, out in ((kernels, x), (plain, expected)):
        module.embed(ids(3, 49, 0, 3, 7, -1, -1, -1), table, out)
    torch.testing.assert_close(x, expected)
    assert not x[5:].any()


def laid_out(module, lengths, num_rows, last=None):
    batch = Batch(torch.arange(sum(lengths), dtype=torch.int32, device=DEVICE), ids(*lengths), last, max(lengths), {})
    places = torch.full((num_rows + 3000,), 7, dtype=torch.int32, device=DEVICE)
    return module.layout(batch, num_rows, places)


@pytest.mark.parametrize("lengths", [LENGTHS, (2000, 1, 1300), [1] * 130], ids=["mixed", "long", "many"])
@pytest.mark.parametrize("num_spare", [0, 11, 1500])
def test_a_batch_is_laid_out(lengths, num_spare):
    count, num_tokens = len(lengths), sum(lengths)
    last = ids(*range(num_tokens, num_tokens - count, -1))  # whatever it names
    expected = laid_out(plain, lengths, num_tokens + num_spare, last)
    assert expected.token_ids.tolist() == [*range(num_tokens), *[-1] * num_spare] and expected.last is last
    assert expected.starts.tolist() == [sum(lengths[:index]) for index in range(count)]
    for found in (laid_out(kernels, lengths, num_tokens + num_spare, last), laid_out(kernels, lengths, num_tokens + num_spare)):
        assert torch.equal(found.token_ids, expected.token_ids) and found.num_tokens == num_tokens
        assert torch.equal(found.starts[:count], expected.starts) and torch.equal(found.lengths[:count], expected.lengths)
        assert not found.lengths[count:].any()
        long = [(start, own) for start, own in zip(expected.starts.tolist(), lengths, strict=True) if own > TILE]
        tiles = [(start, begin, own) for start, own in long for begin in range(0, own, TILE)]
        assert sorted(tile for tile in map(tuple, found.tiles.tolist()) if tile[2]) == sorted(tiles)
        assert len(found.tiles) == (num_tiles(num_tokens + num_spare, len(found.lengths)) if max(lengths) > TILE else 0)
        if found.last is not None:
            assert torch.equal(found.last[:count], last) and set(found.last[count:].tolist()) <= {1}
            assert len(found.last) == len(found.lengths) == (256 if count > 64 else 64)
    assert found.last is None


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
def test_the_stream_is_added_to_and_normalised(is_fp8, has_delta):
    x, delta, norm = random(7, SIZE), random(7, SIZE, seed=1), Norm(random(SIZE, seed=2), 1e-5)
    expected_x = x.clone()
    found, expected = rows_pair(7, SIZE, is_fp8)
    kernels.add_norm(x, delta if has_delta else None, norm, found)
    plain.add_norm(expected_x, delta if has_delta else None, norm, expected)
    torch.testing.assert_close(x, expected_x)
    assert_same_rows(found, expected)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("size", [SIZE, 64, 96, 112, 1000])
def test_swiglu(is_fp8, size):
    found, expected = rows_pair(6, size, is_fp8)
    for module, out in ((kernels, found), (plain, expected)):
        module.swiglu(random(6, 2 * size), out)
    assert_same_rows(found, expected)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("is_one_pass", [False, True])
def test_swiglu_of_a_product(is_fp8, is_one_pass, monkeypatch):
    def multiply(rows, linear, out):
        plain.swiglu(rows.values @ linear.weight.T, Rows(out))

    monkeypatch.setattr(kernels.gated, "can_multiply", lambda linear: is_one_pass)
    monkeypatch.setattr(kernels.gated, "multiply", multiply)
    rows, linear = Rows(random(6, 48)), Linear(random(2 * SIZE, 48, seed=1) / 7)
    found, expected = rows_pair(6, SIZE, is_fp8)
    for module, out in ((kernels, found), (plain, expected)):
        module.multiply_swiglu(rows, linear, torch.full((6, 2 * SIZE), float("nan"), dtype=DTYPE, device=DEVICE), out)
    assert_same_rows(found, expected)


@pytest.mark.parametrize("operation", ["add_norm", "swiglu", "quantise"])
def test_a_fixed_scale_saturates_and_a_row_that_is_not_finite_stays_so(operation):
    rows = random(6, 2 * SIZE if operation == "swiglu" else SIZE)
    rows[3, 5], rows[4, 7] = float("nan"), float("inf")
    found, expected = rows_pair(6, SIZE, True, 1 / 512)  # saturates at 0.875
    for module, out in ((kernels, found), (plain, expected)):
        arguments = {"add_norm": (rows.clone(), None, Norm(random(SIZE, seed=2), 1e-5)), "swiglu": (rows,), "quantise": (rows,)}
        getattr(module, operation)(*arguments[operation], out)
    finite = [0, 1, 2, 5]
    assert torch.equal(found.scales[finite], expected.scales[finite]) and values_of(expected)[finite].abs().max() == 0.875
    assert_same_rows(Rows(found.values[finite], found.scales[finite]), Rows(expected.values[finite], expected.scales[finite]))
    assert found.scales[3:5].isnan().all() and expected.scales[3:5].isnan().all()


def test_a_row_of_zeros_stays_zero_in_fp8():
    found, _ = rows_pair(2, SIZE, True)
    kernels.swiglu(torch.zeros(2, 2 * SIZE, dtype=DTYPE, device=DEVICE), found)
    assert not values_of(found).any()


@pytest.mark.parametrize("is_fp8", [False, True])
def test_rows_are_quantised(is_fp8):
    found, expected = rows_pair(9, SIZE, is_fp8)
    for module, out in ((kernels, found), (plain, expected)):
        module.quantise(random(9, SIZE), out)
    assert_same_rows(found, expected)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize("last", [None, (1, 4, 9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tapped_rows_are_taken(has_norm, has_delta, last, dtype):
    num_rows = 9 if last is None else len(last)
    x, delta = random(9, SIZE), random(9, SIZE, seed=1) if has_delta else None
    norm = Norm(random(SIZE, seed=2), 1e-5) if has_norm else None
    found, expected = (torch.full((num_rows, SIZE), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2))
    for module, out in ((kernels, found), (plain, expected)):
        module.take(x, delta, None if last is None else ids(*last), norm, out)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)


def rope_and_norms(heads, has_norm):
    angles = torch.arange(max(LENGTHS))[:, None] * torch.logspace(0, -3, heads.head_dim // 2)[None, :]
    norms = HeadNorms(random(heads.head_dim, seed=3), random(heads.head_dim, seed=4), 1e-6) if has_norm else None
    return Rope(angles.cos().to(DEVICE), angles.sin().to(DEVICE)), norms


@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(3, 3, 16), Heads(6, 1, 20)], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("input_scale", [None, 0.05, *SATURATING], ids=str)
def test_attention_of_packed_sequences(heads, has_norm, input_scale):
    num_tokens = sum(LENGTHS)
    qkv = random(num_tokens + 11, heads.fused_size)
    qkv[num_tokens:] = float("nan")  # rows past the tokens reach no other row
    rope, norms = rope_and_norms(heads, has_norm)
    found, expected = rows_pair(len(qkv), heads.q_size, input_scale is not None, input_scale)
    for module, out in ((kernels, found), (plain, expected)):
        where = laid_out(module, LENGTHS, len(qkv))
        module.attention(qkv.clone(), heads, rope, norms, where, out)
    assert_same_rows(first_rows(found, num_tokens), first_rows(expected, num_tokens))
    assert input_scale not in SATURATING or values_of(expected)[:num_tokens].abs().max() == 448 * torch.tensor(input_scale)


@pytest.mark.parametrize("heads", [Heads(4, 2, 32), Heads(3, 3, 16), Heads(6, 1, 20)], ids=str)
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("input_scale", [None, 0.05, *SATURATING], ids=str)
def test_attention_of_last_rows_alone(heads, has_norm, input_scale):
    num_tokens = sum(LENGTHS)
    last = torch.tensor(LENGTHS).cumsum(0).tolist()
    ends = sorted({*last, *(end + 1 for end in last[:-1]), *range(1, num_tokens, 8)})  # last rows, first ones, and any others
    queries, keys_and_values = random(len(ends) + 2, heads.q_size), random(num_tokens + 11, 2 * heads.kv_size, seed=1)
    keys_and_values[num_tokens:] = float("nan")
    rope, norms = rope_and_norms(heads, has_norm)
    found, expected = rows_pair(len(queries), heads.q_size, input_scale is not None, input_scale)
    for module, out in ((kernels, found), (plain, expected)):
        where = replace(laid_out(module, LENGTHS, len(keys_and_values)), last=ids(*ends))
        module.last_attention(queries, keys_and_values, heads, rope, norms, where, out)
    assert_same_rows(first_rows(found, len(ends)), first_rows(expected, len(ends)))
    assert values_of(found)[len(ends) :].isnan().all()  # nothing else is written


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="too long for the interpreter")
def test_attention_of_the_longest_sequences_beside_float32():
    """Whose rows are means of many values and far smaller than their inputs; positions lie where float16's tables have them."""
    heads, lengths = Heads(4, 2, 64), (32768, 129, 1)
    num_tokens = sum(lengths)
    qkv = random(num_tokens, heads.fused_size)
    qkv[:, : heads.q_size] *= 3  # attention that prefers some keys
    angles = torch.arange(max(lengths))[:, None] * torch.logspace(0, -4, heads.head_dim // 2)[None, :]
    rope = Rope(angles.cos().to(DEVICE, torch.float16), angles.sin().to(DEVICE, torch.float16))
    found, few = (torch.full((rows, heads.q_size), float("nan"), dtype=DTYPE, device=DEVICE) for rows in (num_tokens, 64))
    expected = torch.empty(num_tokens, heads.q_size, device=DEVICE)
    plain.attention(qkv.float(), heads, rope, None, laid_out(plain, lengths, num_tokens), Rows(expected))
    where = laid_out(kernels, lengths, num_tokens, torch.tensor(lengths, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(DEVICE))
    q, kv = qkv.split([heads.q_size, 2 * heads.kv_size], dim=1)
    kernels.last_attention(q[where.last - 1].contiguous(), kv.contiguous(), heads, rope, None, where, Rows(few))
    kernels.attention(qkv, heads, rope, None, where, Rows(found))
    cosines = torch.cosine_similarity(found.float(), expected, dim=1)
    assert cosines.min() > 0.999, (cosines.min(), cosines.argmin())
    torch.testing.assert_close(found.float().norm(dim=1), expected.norm(dim=1), rtol=2e-2, atol=0)
    assert torch.cosine_similarity(few[:3].float(), expected[where.last[:3] - 1], dim=1).min() > 0.999


@pytest.mark.gpu
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter's cast to e4m3 loses a NaN")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_attended_rows_in_fp8_are_nan_where_they_are_not_finite(wrong):
    heads, lengths = Heads(2, 1, 16), (140, 6)
    qkv = random(sum(lengths), heads.fused_size)
    qkv[[139, 141], -1] = wrong  # a value of the last token of one sequence, of the second token of the other
    out, _ = rows_pair(len(qkv), heads.q_size, True, 0.05)
    rope = Rope(torch.ones(140, 8, device=DEVICE), torch.zeros(140, 8, device=DEVICE))
    where = laid_out(kernels, lengths, len(qkv))
    kernels.attention(qkv, heads, rope, None, where, out)
    assert values_of(out)[:64].isfinite().all() and values_of(out)[[139, *range(141, 146)]].isnan().any(1).all()


def test_a_nan_stays_in_its_own_sequence():
    heads, lengths = Heads(2, 1, 16), (4, 6, 3)
    qkv = random(13, heads.fused_size)
    qkv[4:10] = float("nan")
    out = torch.zeros(13, heads.q_size, dtype=DTYPE, device=DEVICE)
    rope = Rope(torch.ones(6, 8, device=DEVICE), torch.zeros(6, 8, device=DEVICE))
    where = laid_out(kernels, lengths, 13)
    kernels.attention(qkv, heads, rope, None, where, Rows(out))
    assert torch.isfinite(out[:4]).all() and torch.isfinite(out[10:]).all() and not torch.isfinite(out[4:10]).any()


def test_the_mean_of_each_sequence():
    rows = random(sum(LENGTHS), 150, dtype=torch.float32)
    found, expected = (torch.full((len(LENGTHS), 150), float("nan"), device=DEVICE) for _ in range(2))
    for module, out in ((kernels, found), (plain, expected)):
        module.mean(rows, laid_out(module, LENGTHS, len(rows)), out)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="products are the vendor's library's: no CUDA card")
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("step", [None, 16])
def test_products(is_fp8, has_bias, step):
    x, weight, bias = random(48, 64), random(96, 64, seed=1), random(96, seed=2) if has_bias else None
    if is_fp8:
        (values, scales), (quantised, weight_scales) = plain.quantised(x.float()), plain.quantised(weight.float())
        rows, linear = Rows(values, scales, step), Linear(quantised, weight_scales.T.contiguous(), bias)
    else:
        rows, linear = Rows(x, None, step), Linear(weight, None, bias)
    found, expected, stream = (random(48, 96, seed=5) for _ in range(3))
    kernels.multiply(rows, linear, found)
    plain.multiply(rows, linear, expected)
    torch.testing.assert_close(found, expected, atol=0.1, rtol=2e-2)
    before, delta = stream.clone(), torch.zeros_like(stream)
    kernels.multiply_add(rows, linear, stream, delta)
    total = stream if kernels.adds_itself(linear) else stream + delta
    assert not (kernels.adds_itself(linear) and delta.any())
    torch.testing.assert_close(total, before + expected, atol=0.15, rtol=2e-2)
