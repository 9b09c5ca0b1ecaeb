#!/usr/bin/python3
"""The command line's manners: exit codes, messages, and files that are complete or absent.

usage: command_line_test.py CHIASMA REAL_ACTIVATIONS
"""
import os
import resource
import subprocess
import sys
import unittest

from program import BAD_INPUT, CHIASMA, DONE, UNAVAILABLE, ProgramTestCase, np, st, valid_input

REAL_ACTIVATIONS = os.path.abspath(sys.argv[2])


class CommandLineTest(ProgramTestCase):
    def test_the_input_is_valid(self):
        """Otherwise the refusals below would prove nothing."""
        st.write(self.input, valid_input())
        self.expect(self.decode(), DONE)
        self.assertEqual(sorted(os.listdir(self.directory)), ["in.safetensors", "out.safetensors"])

    def test_usage(self):
        self.assertEqual(self.chiasma("--version").stdout.split()[0], "chiasma")
        for arguments in ["--help"], ["decode", "--help"], ["quantize", "--help"], ["info"]:
            result = self.chiasma(*arguments)
            self.assertEqual((result.returncode, result.stderr), (DONE, ""))
            self.assertGreater(len(result.stdout), 100)
        for arguments in [], ["nonsense"], ["decode"], ["decode", "--nonsense"], ["decode", "--input", "x"]:
            self.expect(self.chiasma(*arguments), BAD_INPUT)
        self.expect(self.decode("--sm-scale", "much"), BAD_INPUT, "--sm-scale")
        self.expect(self.chiasma("quantize", "--input", "x", "--output", "y", "--scale", "max"), BAD_INPUT, "pow2")

    def test_standard_output_that_is_full(self):
        with open("/dev/full", "w") as full:
            result = subprocess.run([CHIASMA, "info"], stdout=full, stderr=subprocess.PIPE, text=True)
        self.assertEqual(result.returncode, BAD_INPUT)
        self.assertIn("standard output", result.stderr)

    def test_files_that_are_none(self):
        self.expect(self.decode(), BAD_INPUT, self.input, "No such file")
        with open(self.input, "w") as file:
            file.write("not a safetensors file at all")
        self.expect(self.decode(), BAD_INPUT, self.input, "header length")
        st.write(self.input, valid_input())
        os.truncate(self.input, os.path.getsize(self.input) - 1)
        self.expect(self.decode(), BAD_INPUT, self.input, "data_offsets")

    def test_files_of_other_kinds(self):
        for content, kind in (
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
            (b"<!DOCTYPE html><html></html>", "HTML page"),
            (b"PK\x03\x04" + bytes(40), "zip archive"),
            (b"\x80\x04\x95" + b"\x10\x00\x00\x00\x00\x00\x00\x00" + bytes(16), "Python pickle"),
            (b"\x93NUMPY\x01\x00v\x00", "NumPy array"),
            (b"\x1f\x8b\x08" + bytes(5), "gzip"),
            (b"PK\x03\x04", "zip archive"),
        ):
            with open(self.input, "wb") as file:
                file.write(content)
            self.expect(self.decode(), BAD_INPUT, self.input, "not a safetensors file but", kind)

    def test_files_cut_short(self):
        st.write(self.input, valid_input())
        whole = os.path.getsize(self.input)
        os.truncate(self.input, whole - 30)
        self.expect(self.decode(), BAD_INPUT, "cut short", "at least 30 bytes are missing")
        os.truncate(self.input, 20)
        self.expect(self.decode(), BAD_INPUT, "cut short", "are missing")

    def test_missing_tensors(self):
        self.expect_refused(lambda t: t.pop("q"), "no tensor q")
        self.expect_refused(lambda t: t.pop("indices"), "no tensor indices")
        self.expect_refused(lambda t: t.pop("kv_cache"), "no tensor kv_cache")

    def test_bad_dtypes(self):
        self.expect_refused(lambda t: t.update(q=("F16", t["q"][1])), "q is F16 [2, 1, 8, 576]", "must be BF16")
        self.expect_refused(lambda t: t.update(indices=("F32", t["indices"][1].astype(np.float32))), "indices is F32")
        self.expect_refused(lambda t: t.update(kv_cache=("F32", np.zeros((2, 4, 656), np.float32))), "kv_cache is F32")
        self.expect_refused(lambda t: t.update(attn_sink=("BF16", np.zeros(8, np.uint16))), "attn_sink is BF16")
        self.expect_refused(lambda t: t.update(topk_length=("F32", np.zeros(2, np.float32))), "topk_length is F32")

    def test_bad_shapes(self):
        self.expect_refused(lambda t: t.update(kv_cache=("U8", np.zeros((2, 4, 655), np.uint8))), "kv_cache is U8 [2, 4, 655]")
        self.expect_refused(lambda t: t.update(kv_cache=("U8", np.zeros((2, 655), np.uint8))), "kv_cache is U8 [2, 655]")
        self.expect_refused(lambda t: t.update(q=("BF16", np.zeros((2, 1, 8, 512), np.uint16))), "q ")
        self.expect_refused(lambda t: t.update(q=("BF16", np.zeros((2, 1, 129, 576), np.uint16))), "129")
        self.expect_refused(lambda t: t.update(q=("BF16", np.zeros((), np.uint16))), "q is BF16 []")
        self.expect_refused(lambda t: t.update(q=("BF16", np.zeros((1,) * 7, np.uint16))), "q is BF16 [1, 1")
        self.expect_refused(lambda t: t.update(indices=("I32", np.zeros((3, 1, 5), np.int32))), "indices")
        self.expect_refused(lambda t: t.update(topk_length=("I32", np.zeros(3, np.int32))), "topk_length")
        self.expect_refused(lambda t: t.update(attn_sink=("F32", np.zeros(9, np.float32))), "attn_sink")

    def test_bad_metadata(self):
        unchanged = lambda t: None
        self.expect_refused(unchanged, '"sm_scale" is "big"', metadata={"sm_scale": "big"})
        self.expect_refused(unchanged, "sm_scale", metadata={"sm_scale": "nan"})
        self.expect_refused(unchanged, '"format" says bf16', metadata={"format": "bf16"})
        pages = lambda t: t.update(kv_cache=("U8", np.zeros((2, 2880), np.uint8)), q=("BF16", np.zeros((2, 1, 8, 512), np.uint16)))
        self.expect_refused(pages, '"page" must say', metadata={"format": "v4"})
        for page in "0", "-1", "4.5", "99999999999":
            self.expect_refused(pages, f'"page" is "{page}"', metadata={"format": "v4", "page": page})
        self.expect_refused(pages, "at least 2920 bytes", metadata={"format": "v4", "page": "5"})

    def test_softmax_scale(self):
        """Given in any of four ways it is the same; not given, that is said; nearly given, it is refused."""
        outputs = []
        scalar = lambda dtype, kind: (dtype, np.array([0.07], kind))
        for change, metadata, arguments in (
            ({}, {"sm_scale": "0.07"}, []),
            ({}, {"sm_scale": " +0.07\n"}, []),
            ({"sm_scale": scalar("F64", np.float64)}, None, []),
            ({}, None, ["--sm-scale", "0.07"]),
        ):
            st.write(self.input, valid_input() | change, metadata)
            result = self.decode("--strict", *arguments)
            self.expect(result, DONE)
            self.assertEqual(result.stderr, "")
            with open(self.output, "rb") as file:
                outputs.append(file.read())
        self.assertEqual(len(set(outputs)), 1)
        os.remove(self.output)
        st.write(self.input, valid_input())
        self.expect(self.decode("--strict"), BAD_INPUT, "no sm_scale", "0.0416667", "--strict")
        self.expect(self.decode(), DONE, "no sm_scale", "0.0416667", "--sm-scale")
        os.remove(self.output)
        for key in "softmax_scale", "scale", "sm_scal", "smscale":
            self.expect_refused(lambda t: None, f'"{key}" is not read', '"sm_scale"', metadata={key: "0.07"})
        self.expect_refused(lambda t: t.update(sm_scale=("F32", np.ones(2, np.float32))), "sm_scale is F32 [2]", "one number")
        self.expect_refused(lambda t: None, '"sm_scale" is "+-1"', metadata={"sm_scale": "+-1"})

    def test_tensors_that_nobody_reads(self):
        extra = {name: ("F32", np.zeros(8, np.float32)) for name in ("sinks", "attn_snk", "topk_lengths", "weights")}
        st.write(self.input, valid_input() | extra, {"sm_scale": "0.07"})
        notes = ("tensor sinks; did you mean attn_sink?", "tensor attn_snk; did you mean attn_sink?",
                 "tensor topk_lengths; did you mean topk_length?", "tensor weights\n")  # fmt: skip
        self.expect(self.decode("--strict"), BAD_INPUT, *(note.rstrip() for note in notes))
        self.assertEqual(os.listdir(self.directory), ["in.safetensors"])
        self.expect(self.decode(), DONE, *notes)

    def test_metadata_of_other_programs(self):
        st.write(self.input, valid_input(), {"format": "pt"})
        self.expect(self.decode(), DONE)

    def test_devices_and_kernels(self):
        st.write(self.input, valid_input())
        self.expect(self.decode("--device", "tpu"), BAD_INPUT, "--device tpu")
        self.expect(self.decode("--device", "cuda:x"), BAD_INPUT, "--device cuda:x")
        self.expect(self.decode("--kernel", "nonsense"), BAD_INPUT, "nonsense", "cpu_simd")
        self.expect(self.decode("--device", "cpu", "--kernel", "cpu_simd", "--batch-invariant"), DONE)
        self.expect(self.decode("--device", "cuda:77"), UNAVAILABLE, "cuda")
        if "cuda:0" not in self.chiasma("info").stdout:
            self.expect(self.decode("--device", "cuda"), UNAVAILABLE, "CUDA")

    def test_outputs_that_cannot_be_written(self):
        st.write(self.input, valid_input())
        for place in self.path("missing/out"), self.directory, "/dev/null", self.path(""), "/proc/out":
            result = self.chiasma("decode", "--input", self.input, "--output", place)
            self.expect(result, BAD_INPUT, place)
        self.assertEqual(os.listdir(self.directory), ["in.safetensors"])

    def test_a_disk_that_fills_up_leaves_the_old_file(self):
        st.write(self.input, valid_input())
        with open(self.output, "w") as file:
            file.write("old")

        def limit_file_size():
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

        result = self.decode(preexec_fn=limit_file_size)
        self.expect(result, BAD_INPUT, self.output, "File too large")
        self.assertEqual(sorted(os.listdir(self.directory)), ["in.safetensors", "out.safetensors"])
        with open(self.output) as file:
            self.assertEqual(file.read(), "old")

    def test_repeated_runs_write_the_same_bytes(self):
        st.write(self.input, valid_input())
        contents = []
        for _ in range(2):
            self.expect(self.decode(), DONE)
            with open(self.output, "rb") as file:
                contents.append(file.read())
        self.assertEqual(*contents)

    def test_output_may_replace_the_input(self):
        st.write(self.input, valid_input())
        self.expect(self.chiasma("decode", "--input", self.input, "--output", self.input), DONE)
        self.assertEqual(sorted(st.read(self.input)[0]), ["lse", "out"])

    def test_quantize_feeds_decode_and_dequantize(self):
        real, real_metadata = st.read(REAL_ACTIVATIONS)
        kv = st.bf16_values(real["kv"][1])
        cache, back = self.path("cache"), self.path("back")
        for scale in "pow2", "amax":
            result = self.chiasma("quantize", "--input", REAL_ACTIVATIONS, "--output", cache, "--scale", scale)
            self.expect(result, DONE, "8 pages of 64 tokens", "0 values were NaN or infinite")
            tensors, metadata = st.read(cache)
            self.assertEqual(metadata["sm_scale"], real_metadata["sm_scale"])
            self.assertEqual(tensors["kv_cache"][1].shape, (8, 64, 656))
            self.assertTrue(np.array_equal(tensors["q"][1], real["q"][1]))
            self.assertTrue(np.array_equal(tensors["indices"][1], real["indices"][1]))
            self.assertNotIn("kv", tensors)
            self.expect(self.chiasma("decode", "--input", cache, "--output", self.output), DONE)
            self.assertEqual(st.read(self.output)[1]["sm_scale"], real_metadata["sm_scale"])

            self.expect(self.chiasma("dequantize", "--input", cache, "--output", back), DONE)
            tensors, metadata = st.read(back)
            self.assertNotIn("format", metadata)
            dtype, values = tensors["kv"]
            self.assertEqual((dtype, values.shape), ("F32", (8, 64, 576)))
            self.assertTrue(np.array_equal(values[..., 512:], kv[..., 512:]), "RoPE is not quantised")
            # Half a step of 3 mantissa bits, or of the smallest code times the scale of the tile.
            tiles = kv[..., :512].reshape(8, 64, 4, 128)
            scale_bound = 2 * np.maximum(np.abs(tiles).max(axis=-1, keepdims=True) / 448, 1e-4)
            error = np.abs(values[..., :512].reshape(tiles.shape) - tiles)
            self.assertTrue(np.all(error <= np.maximum(np.abs(tiles) / 16, scale_bound * 2.0**-10)))

    def test_quantize_v4(self):
        rng = np.random.default_rng(2)
        kv = st.bf16_bits(rng.normal(size=(3, 5, 512)))
        st.write(self.input, {"kv": ("BF16", kv), "other": ("I64", np.arange(3))}, {"note": "kept"})
        cache, back = self.path("cache"), self.path("back")
        self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--format", "v4"), DONE)
        tensors, metadata = st.read(cache)
        self.assertEqual(metadata, {"format": "v4", "page": "5", "note": "kept"})
        self.assertEqual(tensors["kv_cache"][1].shape, (3, 3456))  # 5 * 584, padded to a multiple of 576
        self.assertTrue(np.array_equal(tensors["other"][1], np.arange(3)))
        self.expect(self.chiasma("dequantize", "--input", cache, "--output", back), DONE)
        tensors, metadata = st.read(back)
        self.assertEqual(metadata, {"note": "kept"})
        values, wanted = tensors["kv"][1], st.bf16_values(kv)
        self.assertTrue(np.array_equal(values[..., 448:], wanted[..., 448:]))
        self.assertLess(np.abs(values - wanted).max(), 0.26)  # 4 / 16: values below 4 lie in binades of step 1/4
        self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--format", "v4", "--scale", "amax"),
                    BAD_INPUT, self.input, "pow2")

    def test_quantize_reports_what_is_not_finite(self):
        kv = st.bf16_bits(np.ones((1, 2, 576)))
        kv[0, 0, 3], kv[0, 1, 500], kv[0, 1, 575] = 0x7F80, 0x7FC0, 0xFF80
        st.write(self.input, {"kv": ("BF16", kv)})
        self.expect(self.chiasma("quantize", "--input", self.input, "--output", self.output), DONE, "3 values were NaN or infinite")

    def test_quantize_of_nothing_and_of_nonsense(self):
        def quantize(tensors):
            st.write(self.input, tensors)
            return self.chiasma("quantize", "--input", self.input, "--output", self.output)

        self.expect(quantize({"kv": ("BF16", np.zeros((0, 64, 576), np.uint16))}), DONE)
        self.assertEqual(st.read(self.output)[0]["kv_cache"][1].shape, (0, 64, 656))
        os.remove(self.output)
        self.expect(quantize({"kv": ("BF16", np.zeros((4, 0, 576), np.uint16))}), BAD_INPUT, "kv is BF16 [4, 0, 576]")
        self.expect(quantize({"kv": ("BF16", np.zeros((4, 576), np.uint16))}), BAD_INPUT, "kv is BF16 [4, 576]")
        self.expect(quantize({"kv": ("F32", np.zeros((1, 4, 576), np.float32))}), BAD_INPUT, "kv is F32", ".bfloat16()")
        self.expect(quantize({"kv": ("BF16", np.zeros((1, 2, 576), np.uint16)), "slot_mapping": ("I64", np.arange(2))}),
                    DONE, "slot_mapping is copied, but not used")
        os.remove(self.output)
        self.expect(quantize({"q": ("F32", np.zeros(1, np.float32))}), BAD_INPUT, "no tensor kv")
        self.expect(quantize({"kv": ("BF16", np.zeros((1, 1, 576), np.uint16)), "kv_cache": ("U8", np.zeros(1, np.uint8))}),
                    BAD_INPUT, "kv_cache")
        for shape in (4, 0, 656), (4, 3, 650), (656,), (4, 2624):
            st.write(self.input, {"kv_cache": ("U8", np.zeros(shape, np.uint8))}, {"format": "v32"})
            self.expect(self.chiasma("dequantize", "--input", self.input, "--output", self.output), BAD_INPUT, "kv_cache")
        self.assertEqual(os.listdir(self.directory), ["in.safetensors"])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
