#!/usr/bin/python3
"""Holds `chiasma decode` against attention computed here in float64 by numpy, from the stored bytes.

usage: independent_decode.py CHIASMA

Everything is this file's own: the caches' layout, the number formats, the formula. Inputs are unkind: scales of any
value, masked entries anywhere (-1 and garbage), lengths, sinks, odd pages, NaN in every byte that must not matter.
"""
import os
import subprocess
import sys
import tempfile

try:
    import numpy as np
except ImportError:
    print("SKIPPED: numpy is missing (Debian: python3-numpy)")
    sys.exit(77)

import safetensors_io as st

# Allowed errors of the CPU: relative L2 of a row, each element, lse.
MAX_RELATIVE_L2 = 2.2e-3
ELEMENT_OF_RMS, ELEMENT_OF_VALUE = 1e-2, 2.0**-8
MAX_LSE_ERROR = 2e-5


def e4m3_table():
    table = np.empty(256)
    for code in range(256):
        exponent, mantissa = (code >> 3) & 15, code & 7
        if exponent == 15 and mantissa == 7:
            magnitude = np.nan
        elif exponent == 0:
            magnitude = mantissa * 2.0**-9
        else:
            magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table[code] = -magnitude if code & 128 else magnitude
    return table


E4M3 = e4m3_table()


def random_codes(rng, shape):
    """Any code but the two NaN."""
    codes = rng.integers(0, 256, shape, np.uint8)
    return np.where((codes & 0x7F) == 0x7F, codes ^ 1, codes)


class V32:
    key_dim = 576

    def make(rng, num_pages, page):
        pool = np.empty((num_pages, page, 656), np.uint8)
        pool[..., :512] = random_codes(rng, (num_pages, page, 512))
        scales = np.exp(rng.uniform(-9, -4, (num_pages, page, 4))).astype(np.float32)
        pool[..., 512:528] = scales.view(np.uint8)
        pool[..., 528:] = st.bf16_bits(rng.normal(size=(num_pages, page, 64))).view(np.uint8)
        return pool

    def poison(pool, page, selected):
        pool.reshape(-1, 656)[~selected] = 0xFF

    def rows(pool, page, slots):
        raw = pool.reshape(-1, 656)[slots]
        scales = np.ascontiguousarray(raw[:, 512:528]).view(np.float32).astype(np.float64)
        nope = E4M3[raw[:, :512]] * np.repeat(scales, 128, axis=1)
        rope = st.bf16_values(np.ascontiguousarray(raw[:, 528:]).view(np.uint16))
        return np.concatenate([nope, rope], axis=1), nope


class V4:
    """[num_pages, bytes per page]; values are both keys and values."""

    key_dim = 512

    def make(rng, num_pages, page):
        stride = -(-page * 584 // 576) * 576
        pool = np.full((num_pages, stride), 0xFF, np.uint8)
        for data in pool:
            rows, scales = V4.parts(data, page)
            rows[:, :448] = random_codes(rng, (page, 448))
            rows[:, 448:] = st.bf16_bits(rng.normal(size=(page, 64))).view(np.uint8)
            scales[:, :7] = rng.integers(115, 122, (page, 7))
        return pool

    def parts(data, page):
        return data[: page * 576].reshape(page, 576), data[page * 576 : page * 584].reshape(page, 8)

    def poison(pool, page, selected):
        for slot in np.flatnonzero(~selected):
            rows, scales = V4.parts(pool[slot // page], page)
            rows[slot % page] = 0xFF
            scales[slot % page] = 0xFF

    def rows(pool, page, slots):
        keys = np.empty((len(slots), 512))
        for n, slot in enumerate(slots):
            rows, scales = V4.parts(pool[slot // page], page)
            row, scale = rows[slot % page], scales[slot % page, :7].astype(np.int64)
            keys[n, :448] = E4M3[row[:448]] * np.repeat(2.0 ** (scale - 127), 64)
            keys[n, 448:] = st.bf16_values(row[448:].copy().view(np.uint16))
        return keys, keys


class Bf16:
    key_dim = 576

    def make(rng, num_pages, page):
        return st.bf16_bits(rng.normal(size=(num_pages, page, 576)))

    def poison(pool, page, selected):
        pool.reshape(-1, 576)[~selected] = 0x7FC0

    def rows(pool, page, slots):
        keys = st.bf16_values(pool.reshape(-1, 576)[slots])
        return keys, keys[:, :512]


def make_indices(rng, shape, num_slots, dtype):
    """Valid slots with -1 and garbage scattered among them, and some slots twice."""
    indices = rng.integers(0, num_slots, shape).astype(np.int64)
    kind = rng.random(shape)
    limits = np.iinfo(dtype)
    garbage = rng.integers(limits.min, limits.max, shape, dtype=np.int64)
    garbage = np.where((garbage >= 0) & (garbage < num_slots), -7, garbage)
    indices = np.where(kind < 0.2, -1, np.where(kind < 0.3, garbage, indices))
    indices[..., :1] = num_slots  # one behind the last
    return indices.astype(dtype)


def valid_slots(row, length, num_slots):
    row = row[: max(0, int(length))]
    return row[(row >= 0) & (row < num_slots)]


def attend(q, keys, values, sm_scale, sink):
    """q [h, d], keys [n, d] -> out [h, 512], lse [h]."""
    if len(keys) == 0:
        return np.zeros((len(q), 512)), np.full(len(q), -np.inf)
    scores = q @ keys.T * sm_scale
    top = scores.max(axis=1)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=1)
    lse = top + np.log(total)
    out = weights @ values / total[:, None]
    if sink is not None:
        out /= (1 + np.exp(np.minimum(sink - lse, 700)))[:, None]
        out[np.isposinf(sink)] = 0
    return out, lse


def check(name, out, lse, want_out, want_lse):
    assert np.array_equal(np.isfinite(lse), np.isfinite(want_lse)), f"{name}: lse is finite elsewhere"
    assert np.all(np.isfinite(out)), f"{name}: out is not finite"
    assert np.all(lse[~np.isfinite(want_lse)] == -np.inf), f"{name}: empty rows must have lse -inf"
    rms = np.sqrt((want_out**2).mean(axis=-1, keepdims=True))
    error = np.abs(out - want_out)
    zero = rms[..., 0] == 0
    assert np.all(out[zero] == 0), f"{name}: rows that must be 0 are not"
    relative = np.sqrt((error**2).mean(axis=-1))[~zero] / rms[..., 0][~zero]
    element = (error / (ELEMENT_OF_RMS * rms + ELEMENT_OF_VALUE * np.abs(want_out) + 1e-300)).max(initial=0)
    finite = np.isfinite(want_lse)
    lse_error = (np.abs(lse[finite] - want_lse[finite]) / np.maximum(1, np.abs(want_lse[finite]))).max(initial=0)
    print(f"{name}: relative L2 {relative.max(initial=0):.2e}, worst element {element:.2f} of its bound, "
          f"lse {lse_error:.1e}, {int(zero.sum())} of {zero.size} rows zero")
    assert relative.max(initial=0) <= MAX_RELATIVE_L2, f"{name}: relative L2"
    assert element <= 1, f"{name}: element"
    assert lse_error <= MAX_LSE_ERROR, f"{name}: lse"


def run_case(chiasma, directory, name, fmt, b=2, s_q=1, h=16, pages=5, page=64, topk=130, q_std=0.3, dtype=np.int32,
             cache_dtype=None, four_d=False, lengths=None, sink=None, sm_scale_in="default", extra=None, odd_start=False,
             seed=1):
    rng = np.random.default_rng(seed)
    num_slots = pages * page
    pool = fmt.make(rng, pages, page)
    q_bits = st.bf16_bits(rng.normal(size=(b, s_q, h, fmt.key_dim)) * q_std)
    indices = make_indices(rng, (b, s_q, topk), num_slots, dtype)
    index_dtype = "I64" if dtype == np.int64 else "I32"
    tensors, metadata, arguments = {}, {}, []
    if odd_start:  # the tensors behind start at odd addresses
        tensors["odd"] = ("U8", np.zeros(3, np.uint8))
    tensors["q"] = ("BF16", q_bits)

    used = np.full((b,), topk) if lengths is None else np.clip(lengths, 0, topk)
    selected = np.zeros(num_slots, bool)
    for request in range(b):
        for token in range(s_q):
            selected[valid_slots(indices[request, token], used[request], num_slots)] = True
    fmt.poison(pool, page, selected)
    stored = pool.reshape(pages, page, 1, -1) if four_d else pool
    tensors["kv_cache"] = (cache_dtype or ("BF16" if fmt is Bf16 else "U8"), stored)
    tensors["indices"] = (index_dtype, indices)
    if lengths is not None:
        tensors["topk_length"] = (index_dtype, np.array(lengths, dtype))
    if sink is not None:
        sink = np.resize(np.array(sink, np.float32), h)
        tensors["attn_sink"] = ("F32", sink)
    if fmt is V4:
        metadata = {"format": "v4", "page": str(page)}
    if extra is not None:
        extra_pages, extra_page, extra_topk, extra_lengths = extra
        extra_pool = V4.make(rng, extra_pages, extra_page)
        extra_indices = make_indices(rng, (b, s_q, extra_topk), extra_pages * extra_page, np.int32)
        tensors["extra_kv_cache"] = ("U8", extra_pool)
        tensors["extra_indices"] = ("I32", extra_indices)
        tensors["extra_topk_length"] = ("I32", np.array(extra_lengths, np.int32))
        metadata["extra_page"] = str(extra_page)
    sm_scale = fmt.key_dim**-0.5
    if sm_scale_in == "metadata":
        sm_scale = 0.0625
        metadata["sm_scale"] = str(sm_scale)
    if sm_scale_in == "flag":
        sm_scale = -0.03
        metadata["sm_scale"] = "123"
        arguments = ["--sm-scale", str(sm_scale)]

    source, target = os.path.join(directory, "in.safetensors"), os.path.join(directory, "out.safetensors")
    st.write(source, tensors, metadata)
    subprocess.run([chiasma, "decode", "--input", source, "--output", target, "--device", "cpu", *arguments], check=True)
    results, result_metadata = st.read(target)
    assert abs(float(result_metadata["sm_scale"]) - sm_scale) < 1e-15, name
    assert result_metadata["kernel"] and result_metadata["version"], name
    assert results["out"][0] == "BF16" and results["lse"][0] == "F32", name
    out, lse = st.bf16_values(results["out"][1]), results["lse"][1].astype(np.float64)
    assert out.shape == (b, s_q, h, 512) and lse.shape == (b, s_q, h), name

    want_out, want_lse = np.empty(out.shape), np.empty(lse.shape)
    for request in range(b):
        for token in range(s_q):
            keys, values = fmt.rows(pool, page, valid_slots(indices[request, token], used[request], num_slots))
            if extra is not None:
                slots = valid_slots(extra_indices[request, token], extra_lengths[request], extra_pages * extra_page)
                more_keys, more_values = V4.rows(extra_pool, extra_page, slots)
                keys, values = np.concatenate([keys, more_keys]), np.concatenate([values, more_values])
            want_out[request, token], want_lse[request, token] = attend(
                st.bf16_values(q_bits[request, token]), keys, values, sm_scale, sink)
    check(name, out, lse, want_out, want_lse)


def main():
    chiasma = sys.argv[1]
    sinks = [0.0, 1.5, -2.0, np.inf, -np.inf]
    with tempfile.TemporaryDirectory() as directory:
        def case(name, fmt, **options):
            run_case(chiasma, directory, name, fmt, **options)

        case("v32", V32, b=3, s_q=2, page=61, topk=131)
        case("v32, 128 heads, lengths, sink", V32, h=128, lengths=[77, 500], sink=sinks, topk=300, seed=2)
        case("v32, one head, page 1, empty request", V32, h=1, pages=40, page=1, topk=65, lengths=[0, 64], sink=[0.5], seed=3)
        case("v32, int64 indices", V32, dtype=np.int64, lengths=[-3, 2**40], seed=4)
        case("v32, F8_E4M3 [.., 1, 656], odd addresses", V32, cache_dtype="F8_E4M3", four_d=True, odd_start=True, seed=5)
        case("v32, sm_scale in the metadata", V32, sm_scale_in="metadata", seed=6)
        case("v32, sm_scale by flag", V32, sm_scale_in="flag", seed=7)
        case("v32, topk 0", V32, topk=0, seed=8)
        case("v4, page 3", V4, pages=40, page=3, topk=70, h=8, seed=9)
        case("v4, extra cache, lengths, sink", V4, page=64, h=64, lengths=[100, 3], sink=sinks, extra=(7, 2, 33, [33, 0]), seed=10)
        case("bf16", Bf16, b=1, s_q=3, page=16, topk=63, q_std=0.5, seed=11)


if __name__ == "__main__":
    main()
