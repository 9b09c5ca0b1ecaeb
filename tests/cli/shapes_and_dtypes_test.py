#!/usr/bin/python3
"""Shapes and dtypes that people have: each way to write a call has the bits of the one that the help describes.

usage: shapes_and_dtypes_test.py CHIASMA
"""
import sys
import unittest

from program import BAD_INPUT, DONE, ProgramTestCase, np, st, valid_input

STATED = {"sm_scale": "0.05"}


def reshaped(tensors, **shapes):
    """A copy with other shapes of some tensors, over the same bytes."""
    return tensors | {name: (tensors[name][0], tensors[name][1].reshape(shape)) for name, shape in shapes.items()}


class ShapesAndDtypesTest(ProgramTestCase):
    def results(self, tensors, *arguments, metadata=STATED):
        st.write(self.input, tensors, metadata)
        result = self.decode("--strict", "--device", "cpu", *arguments)
        self.expect(result, DONE)
        return st.read(self.output)[0], result.stderr

    def expect_same(self, tensors, expected, **options):
        got, stderr = self.results(tensors, **options)
        self.assertEqual(stderr, "")
        for name in "out", "lse":
            self.assertEqual(got[name][1].tobytes(), expected[name][1].tobytes(), name)
        return got

    def test_one_query_token_a_request(self):
        tensors = valid_input()
        expected, _ = self.results(tensors)
        self.assertEqual(expected["out"][1].shape, (2, 1, 8, 512))
        for shapes, flat in (
            ({"q": (2, 8, 576), "indices": (2, 5)}, True),
            ({"q": (2, 8, 576)}, True),
            ({"indices": (2, 5)}, False),
        ):
            got = self.expect_same(reshaped(tensors, **shapes), expected)
            self.assertEqual(got["out"][1].shape, (2, 8, 512) if flat else (2, 1, 8, 512))
            self.assertEqual(got["lse"][1].shape, (2, 8) if flat else (2, 1, 8))
        split = {"q": ("BF16", np.ascontiguousarray(tensors["q"][1][..., :512])),
                 "q_rope": ("BF16", np.ascontiguousarray(tensors["q"][1][..., 512:]))}  # fmt: skip
        self.expect_same(tensors | split, expected)
        self.expect_same(reshaped(tensors | split, q=(2, 8, 512), q_rope=(2, 8, 64), indices=(2, 5)), expected)

    def test_lengths(self):
        rng = np.random.default_rng(4)
        tensors = valid_input() | {"q": ("BF16", st.bf16_bits(rng.normal(size=(2, 3, 8, 576)))),
                                   "indices": ("I32", rng.integers(0, 8, (2, 3, 5)).astype(np.int32)),
                                   "topk_length": ("I32", np.array([2, 4], np.int32))}  # fmt: skip
        expected, _ = self.results(tensors)
        self.expect_same(reshaped(tensors, topk_length=(2, 1)), expected)
        self.expect_same(tensors | {"topk_length": ("I64", np.array([[2], [4]]))}, expected)
        each = ("I32", np.array([[2] * 3, [4] * 3], np.int32))
        self.expect_same(tensors | {"topk_length": each}, expected)

    def test_caches(self):
        tensors = valid_input()
        expected, _ = self.results(tensors)
        paged = STATED | {"page": "4"}
        for shape, metadata in (
            ((8, 656), STATED),
            ((8, 656), paged),
            ((8, 1, 656), STATED),
            ((2, 4, 1, 656), STATED),
            ((2, 4 * 656), paged),
            ((2, 4 * 656), paged | {"format": "v32"}),
        ):
            self.expect_same(reshaped(tensors, kv_cache=shape), expected, metadata=metadata)
        pool = tensors["kv_cache"][1]
        for cache in ("I8", pool.view(np.int8)), ("F8_E4M3", pool):
            self.expect_same(tensors | {"kv_cache": cache}, expected)

    def test_bf16_caches_by_rows(self):
        rng = np.random.default_rng(5)
        tensors = valid_input() | {"kv_cache": ("BF16", st.bf16_bits(rng.normal(size=(2, 4, 576))))}
        expected, _ = self.results(tensors)
        self.expect_same(reshaped(tensors, kv_cache=(8, 576)), expected)
        metadata = STATED | {"page": "4", "format": "bf16"}
        self.expect_same(reshaped(tensors, kv_cache=(2, 4 * 576)), expected, metadata=metadata)

    def test_v4_caches_without_a_format(self):
        rng = np.random.default_rng(6)
        kv = st.bf16_bits(rng.normal(size=(3, 8, 512)))
        st.write(self.input, {"kv": ("BF16", kv), "q": ("BF16", st.bf16_bits(rng.normal(size=(2, 1, 8, 512)))),
                              "indices": ("I32", rng.integers(-1, 24, (2, 1, 5)).astype(np.int32))}, STATED)  # fmt: skip
        cache = self.path("cache")
        self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--format", "v4"), DONE)
        tensors, metadata = st.read(cache)
        expected, _ = self.results(tensors, metadata=metadata)
        padded = tensors["kv_cache"][1]
        self.assertEqual(padded.shape, (3, 5184))
        self.expect_same(tensors, expected, metadata=STATED | {"page": "8"})
        packed = tensors | {"kv_cache": ("U8", np.ascontiguousarray(padded[:, : 8 * 584]))}
        self.expect_same(packed, expected, metadata=STATED | {"page": "8"})
        # Without padding a page's bytes are those of 8 "rows" of the average width.
        self.expect_same(reshaped(packed, kv_cache=(24, 584)), expected, metadata=metadata)
        self.expect_same(reshaped(packed, kv_cache=(3, 8, 584)), expected)
        self.expect_refused(lambda t: t.update(reshaped(packed, kv_cache=(24, 584))), "kv_cache is U8 [24, 584]", "v4 584 wide")

    def test_casts(self):
        rng = np.random.default_rng(7)
        tensors = valid_input()
        values = st.bf16_values(tensors["q"][1])
        sinks = st.bf16_bits(rng.normal(size=8))
        tensors["attn_sink"] = "F32", st.bf16_values(sinks).astype(np.float32)
        expected, _ = self.results(tensors)
        for dtype, q in ("F32", values.astype(np.float32)), ("F16", values.astype(np.float16).view(np.uint16)):
            given = tensors | {"q": (dtype, q), "attn_sink": ("BF16", sinks)}
            got, stderr = self.results(given, "--cast")
            self.assertIn(f"q is {dtype} [2, 1, 8, 576]; converted to BF16", stderr)
            self.assertIn("attn_sink is BF16 [8]; converted to F32", stderr)
            if dtype == "F32":  # F16 has fewer exponents than BF16, so that small numbers lose digits
                self.assertEqual(got["out"][1].tobytes(), expected["out"][1].tobytes())
            else:
                difference = st.bf16_values(got["out"][1]) - st.bf16_values(expected["out"][1])
                self.assertLess(np.abs(difference).max(), 0.02 * np.abs(st.bf16_values(expected["out"][1])).max())
            self.expect_refused(lambda t: t.update(q=(dtype, q)), f"q is {dtype}", "must be BF16", "--cast", ".bfloat16()\n")
        # Numbers that lie between two of BF16 go to the nearest, as PyTorch rounds them.
        wide = rng.normal(size=(2, 1, 8, 576)).astype(np.float32)
        expected, _ = self.results(tensors | {"q": ("BF16", st.bf16_bits(wide))})
        got, _ = self.results(tensors | {"q": ("F32", wide)}, "--cast")
        self.assertEqual(got["out"][1].tobytes(), expected["out"][1].tobytes())

    def test_every_f16_number(self):
        """As queries of a cache whose scores then are those numbers: lse tells what each became."""
        halves = np.array([0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0x1234, 0x9999, 0x7C00], np.uint16)
        q = np.zeros((len(halves), 1, 1, 576), np.uint16)
        q[:, 0, 0, 575] = halves
        cache = np.zeros((1, 1, 576), np.uint16)
        cache[0, 0, 575] = 0x3F80
        tensors = {"q": ("F16", q), "kv_cache": ("BF16", cache), "indices": ("I32", np.zeros((len(halves), 1, 1), np.int32))}
        got, _ = self.results(tensors, "--cast", metadata={"sm_scale": "1"})
        values = halves.view(np.float16).astype(np.float32)
        wanted = st.bf16_values(st.bf16_bits(values[:-1]))
        self.assertTrue(np.allclose(got["lse"][1][:-1, 0, 0], wanted, rtol=1e-6, atol=0), got["lse"][1][:, 0, 0])
        self.assertFalse(np.isfinite(got["lse"][1][-1, 0, 0]))

    def test_refusals_say_what_to_do(self):
        put = lambda name, dtype, array: lambda t: t.update({name: (dtype, array)})
        self.expect_refused(put("kv_cache", "F32", np.zeros((2, 4, 576), np.float32)), "chiasma quantize", ".bfloat16()\n")
        self.expect_refused(put("indices", "F32", np.zeros((2, 1, 5), np.float32)), "must be I32 or I64", ".int()\n")
        self.expect_refused(put("attn_sink", "F64", np.zeros(8)), "must be F32", ".float()\n")
        self.expect_refused(put("kv_cache", "U8", np.zeros((2, 4, 512), np.uint8)), "Formats: v32 656 wide", "fp8nope 512 wide")
        self.expect_refused(put("q", "BF16", np.zeros((2, 1, 8, 512), np.uint16)), "queries of a v32 cache are 576 wide",
                            "v4, v41, v41plane, v32nope, v32nope_compact, fp8nope, bf16nope")  # fmt: skip
        self.expect_refused(put("q", "BF16", np.zeros((2, 1, 8, 500), np.uint16)), "no format has this width")
        self.expect_refused(lambda t: t.update(reshaped(t, q=(16, 576))), "q has rank 2")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
