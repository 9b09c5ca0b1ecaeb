#!/usr/bin/python3
"""`chiasma merge` against a decode that was never divided, and `chiasma inspect` against what was put into a file.

usage: merge_inspect_test.py CHIASMA
"""
import os
import sys
import unittest

from program import BAD_INPUT, DONE, ProgramTestCase, np, st, valid_input

STATED = {"sm_scale": "0.05"}


class MergeTest(ProgramTestCase):
    def decoded(self, tensors, name, metadata=STATED):
        st.write(self.input, tensors, metadata)
        path = self.path(name)
        self.expect(self.chiasma("decode", "--input", self.input, "--output", path, "--device", "cpu"), DONE)
        return path

    def merge(self, *parts, flags=()):
        return self.chiasma("merge", "--input", *parts, "--output", self.output, *flags)

    def test_parts_of_a_selection_make_the_whole(self):
        rng = np.random.default_rng(8)
        for flat in False, True:
            tensors = valid_input() | {"indices": ("I32", rng.integers(-1, 8, (2, 1, 30)).astype(np.int32))}
            if flat:
                tensors["q"] = "BF16", tensors["q"][1].reshape(2, 8, 576)
            whole = st.read(self.decoded(tensors, "whole"))[0]
            parts = []
            for number, (begin, end) in enumerate(((0, 3), (3, 17), (17, 17), (17, 30))):  # one is empty
                part = np.ascontiguousarray(tensors["indices"][1][..., begin:end])
                parts.append(self.decoded(tensors | {"indices": ("I32", part)}, f"part{number}"))
            self.expect(self.merge(*parts), DONE)
            merged, metadata = st.read(self.output)
            self.assertEqual((metadata["parts"], metadata["sm_scale"]), ("4", "0.05"))
            for name in "out", "lse":
                self.assertEqual(merged[name][0], whole[name][0])
                self.assertEqual(merged[name][1].shape, whole[name][1].shape)
            self.assertTrue(np.allclose(merged["lse"][1], whole["lse"][1], rtol=1e-5))
            difference = st.bf16_values(merged["out"][1]) - st.bf16_values(whole["out"][1])
            self.assertLess(np.abs(difference).max(), 0.02 * np.abs(st.bf16_values(whole["out"][1])).max())
            # A single part passes through, bit by bit.
            self.expect(self.merge(self.path("whole")), DONE)
            merged, _ = st.read(self.output)
            for name in "out", "lse":
                self.assertEqual(merged[name][1].tobytes(), whole[name][1].tobytes())

    def part(self, name, out, lse, metadata=None):
        st.write(self.path(name), {"out": ("F32", np.asarray(out, np.float32)), "lse": ("F32", np.asarray(lse, np.float32))},
                 metadata)  # fmt: skip
        return self.path(name)

    def test_values_in_pieces(self):
        """More rows than are merged at once; Z = {2, 8} and outputs {0, 10 + row} make 0.8 (10 + row)."""
        rows = 9001
        numbers = 10 + np.arange(rows, dtype=np.float32)
        a = self.part("a", np.zeros((rows, 1, 512)), np.full((rows, 1), np.log(2)))
        b = self.part("b", np.broadcast_to(numbers[:, None, None], (rows, 1, 512)), np.full((rows, 1), np.log(8)))
        self.expect(self.merge(a, b), DONE)
        merged, _ = st.read(self.output)
        self.assertTrue(np.allclose(merged["out"][1], 0.8 * numbers[:, None, None], rtol=1e-6))
        self.assertTrue(np.allclose(merged["lse"][1], np.log(10), rtol=1e-6))

    def test_plus_infinity(self):
        a = self.part("a", np.full((1, 1, 1, 512), 3), [[[np.inf]]])
        b = self.part("b", np.full((1, 1, 1, 512), 5), [[[0.25]]])
        self.expect(self.merge(b, a), BAD_INPUT, a, "lse is +inf in row 0", "--plus-infinity-is-empty")
        self.assertFalse(os.path.exists(self.output))
        self.expect(self.merge(a, b, flags=["--plus-infinity-is-empty"]), DONE)
        merged, _ = st.read(self.output)
        self.assertEqual((merged["out"][1].min(), merged["lse"][1].item()), (5, 0.25))

    def test_nan_is_told(self):
        a = self.part("a", np.ones((2, 1, 512)), [[np.nan], [1]])
        b = self.part("b", np.ones((2, 1, 512)), [[1], [1]])
        self.expect(self.merge(a, b), DONE, "1 of 2 rows are NaN")
        self.assertEqual(np.isnan(st.read(self.output)[0]["lse"][1]).tolist(), [[True], [False]])

    def test_one_file_twice(self):
        a = self.part("a", np.ones((2, 1, 512)), np.ones((2, 1)))
        os.symlink(a, self.path("b"))
        for again in a, self.path("b"):
            self.expect(self.merge(a, again), BAD_INPUT, "are one file, whose tokens would count twice")
        self.assertFalse(os.path.exists(self.output))

    def test_no_rows(self):
        a = self.part("a", np.zeros((0, 1, 8, 512)), np.zeros((0, 1, 8)))
        b = self.part("b", np.zeros((0, 1, 8, 512)), np.zeros((0, 1, 8)))
        self.expect(self.merge(a, b), DONE)
        self.assertEqual(st.read(self.output)[0]["out"][1].shape, (0, 1, 8, 512))

    def test_refusals(self):
        good = self.part("good", np.zeros((2, 1, 8, 512)), np.zeros((2, 1, 8)), STATED)
        for name, out, lse, metadata, fragments in (
            ("heads", (2, 1, 4, 512), (2, 1, 4), {}, ["out is F32 [2, 1, 4, 512]", "good is F32 [2, 1, 8, 512]"]),
            ("width", (2, 1, 8, 576), (2, 1, 8), {}, ["out is F32 [2, 1, 8, 576]", "512"]),
            ("lse", (2, 1, 8, 512), (2, 8), {}, ["lse is F32 [2, 8]"]),
            ("scale", (2, 1, 8, 512), (2, 1, 8), {"sm_scale": "0.06"}, ['"sm_scale" is "0.06"', '"0.05"']),
        ):
            other = self.part(name, np.zeros(out), np.zeros(lse), metadata)
            self.expect(self.merge(good, other), BAD_INPUT, other, *fragments)
        tensors = valid_input()
        sinks = self.decoded(tensors | {"attn_sink": ("F32", np.zeros(8, np.float32))}, "sinks")
        self.expect(self.merge(sinks), BAD_INPUT, sinks, "a sink has been applied")
        plain = self.decoded(tensors, "plain")
        self.expect(self.merge(good, plain), BAD_INPUT, plain, "out is BF16")
        self.expect(self.merge(self.input), BAD_INPUT, self.input, "there is no tensor out")
        self.expect(self.merge(), BAD_INPUT)
        self.assertFalse(os.path.exists(self.output))


class InspectTest(ProgramTestCase):
    def inspect(self, tensors, metadata=None, *flags):
        st.write(self.input, tensors, metadata)
        result = self.chiasma("inspect", self.input, *flags)
        self.assertEqual((result.returncode, result.stderr), (DONE, ""))
        return result.stdout

    def expect_text(self, text, *fragments):
        for fragment in fragments:
            self.assertIn(fragment, text)

    def test_what_is_in_the_file(self):
        tensors = valid_input()
        pool = tensors["kv_cache"][1]
        pool[0, 1, 5] = pool[1, 3, 9] = 0x7F
        pool[1, 2, 7] = 0xFF
        pool[0, 0, 512:516] = np.array([-1.0], np.float32).view(np.uint8)
        tensors["q"][1][0, 0, 3, 4] = 0x7F80
        tensors["q"][1][0, 0, 3, 5] = 0x7FC1
        tensors["indices"] = "I64", np.array([[[0, 7, -1, 8, -5]], [[-1, -1, 1 << 40, 9, -2]]])
        text = self.inspect(tensors, STATED)
        header_bytes = os.path.getsize(self.input) - sum(array.nbytes for _, array in tensors.values())
        self.expect_text(text, f"begins at byte {header_bytes}", "metadata sm_scale: 0.05", "q: BF16 [2, 1, 8, 576], 18432 bytes",
                         f"from byte {header_bytes + 18432} (a multiple of ", "1 NaN, 1 infinite",
                         "format v32: 2 pages of 4 tokens, 2624 bytes apart, 8 slots", "3 codes are NaN\n",
                         "0 bf16 numbers are NaN or infinite", "any numbers, as amax", "1 negative, NaN or infinite",
                         "2 of 10 entries are slots of kv_cache, 0 to 7", "3 are -1, 2 other negative numbers, 3 beyond",
                         "1 of 2 rows have no slot at all", "sm_scale: 0.05", "kernel: cpu_simd" if "cuda:0" not in text else "kernel: ")  # fmt: skip

    def test_alignment(self):
        tensors = {"odd": ("U8", np.zeros(3, np.uint8)), "x": ("F32", np.array([1, -2, 0.5], np.float32))}
        st.write(self.input, tensors)
        begin = os.path.getsize(self.input) - 15 + 3
        text = self.inspect(tensors)
        self.expect_text(text, f"x: F32 [3], 12 bytes from byte {begin} (a multiple of {begin & -begin})", "-2 to 1; 0 NaN, 0 infinite",
                         "refused: ", "there is no tensor kv_cache")  # fmt: skip

    def test_scale_conventions(self):
        rng = np.random.default_rng(9)
        st.write(self.input, {"kv": ("BF16", st.bf16_bits(rng.normal(size=(3, 8, 576)))), "page": ("U8", np.zeros(0, np.uint8))})
        cache = self.path("cache")
        for scale, words in ("pow2", "powers of two, as pow2"), ("amax", "any numbers, as amax"):
            self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--scale", scale), DONE)
            self.expect_text(self.chiasma("inspect", cache).stdout, words, "0 codes are NaN")
        st.write(self.input, {"kv": ("BF16", st.bf16_bits(rng.normal(size=(3, 8, 512))))})
        for name in "v4", "v41", "v41plane", "v32nope", "v32nope_compact", "fp8nope":
            flags = ["--kv-scale", "0.5"] if name == "fp8nope" else []
            self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--format", name, *flags), DONE)
            text = self.chiasma("inspect", cache).stdout
            self.expect_text(text, f"format {name}: 3 pages of 8 tokens", "0 codes are NaN")
            self.assertEqual("powers of two" in text, name != "fp8nope")

    def test_large_files_are_looked_at_in_places(self):
        pool = np.zeros((3000, 64, 656), np.uint8)
        pool[0, 0, 0] = 0x7F
        pool[0, 20, 3] = 0x7F  # of each 3000 slots the first 1024 are looked at
        tensors = valid_input() | {"kv_cache": ("U8", pool)}
        self.expect_text(self.inspect(tensors), "2 codes are NaN (of 65536 looked at, evenly spaced")
        pool[46, 40, 455] = 0x7F  # slot 2984
        self.expect_text(self.inspect(tensors), "2 codes are NaN (of 65536 looked at, evenly spaced")
        self.expect_text(self.inspect(tensors, None, "--all"), "3 codes are NaN\n")

    def test_files_that_decode_refuses(self):
        tensors = valid_input()
        text = self.inspect(tensors | {"kv_cache": ("U8", np.zeros((2, 4, 600), np.uint8))}, {"format": "v32"})
        self.expect_text(text, "a v32 cache must be [num_pages, page, 656]", "refused: ", "kv_cache has shape [2, 4, 600]")
        text = self.inspect(tensors | {"q": ("F16", tensors["q"][1])}, STATED)
        self.expect_text(text, "with --cast: ", "converted to BF16", "kernel: ")
        text = self.inspect(tensors | {"sinks": ("F32", np.zeros(8, np.float32))})
        self.expect_text(text, "note: ", "did you mean attn_sink?", "no sm_scale")
        self.expect(self.chiasma("inspect", self.path("missing")), BAD_INPUT, "No such file")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
