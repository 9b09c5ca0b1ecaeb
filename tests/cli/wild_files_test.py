#!/usr/bin/python3
"""Files as they are found: tensors at any byte, caches of gigabytes, files that change under the program, interrupts.

usage: wild_files_test.py CHIASMA
"""
import json
import os
import resource
import signal
import struct
import subprocess
import time
import unittest

from program import BAD_INPUT, CHIASMA, DONE, UNAVAILABLE, ProgramTestCase, np, st, valid_input

GIB = 1 << 30


def write_sparse(path, tensors, offset_of=None, metadata=None):
    """tensors: {name: (dtype name, shape, bytes or an array)}; a number of bytes stands for zeros that take no space.
    offset_of = (name, n): that tensor begins n bytes behind a multiple of 16 in the file."""
    header, offset = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape, content) in tensors.items():
        size = content if isinstance(content, int) else content.nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header)
    if offset_of is not None:
        name, wanted = offset_of
        text += " " * ((wanted - 8 - len(text) - header[name]["data_offsets"][0]) % 16)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode())
        for _, _, content in tensors.values():
            if isinstance(content, int):
                file.truncate(file.seek(content, os.SEEK_CUR))
            else:
                file.write(np.ascontiguousarray(content).tobytes())


class WildFilesTest(ProgramTestCase):
    def measured(self, *arguments):
        """Exit code, stderr, seconds and peak memory in MB of a run."""
        begin = time.monotonic()
        process = subprocess.Popen([CHIASMA, *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        stderr = process.stderr.read().decode()
        process.stderr.close()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        return process.returncode, stderr, time.monotonic() - begin, usage.ru_maxrss / 1024

    def decode_arguments(self):
        return "decode", "--input", self.input, "--output", self.output, "--device", "cpu"

    def test_a_cache_of_4_gib_at_every_offset(self):
        """Time and memory go with what is selected. The first slots hold numbers, and every offset gives their bits."""
        small = valid_input()
        rows = small["kv_cache"][1].reshape(-1)
        pages = 4 * GIB // 2624
        begin = {"q": ("BF16", small["q"][1].shape, small["q"][1]),
                 "indices": ("I32", small["indices"][1].shape, small["indices"][1])}
        st.write(self.input, small, {"sm_scale": "0.05"})
        self.expect(self.decode("--device", "cpu"), DONE)
        expected = {name: array.tobytes() for name, (_, array) in st.read(self.output)[0].items()}
        start = time.monotonic()
        for offset in range(16):
            write_sparse(self.input, begin | {"kv_cache": ("U8", (pages, 4, 656), pages * 2624)}, ("kv_cache", offset),
                         {"sm_scale": "0.05"})
            size = os.path.getsize(self.input)
            self.assertEqual((size - pages * 2624) % 16, offset)
            with open(self.input, "r+b") as file:
                file.seek(size - pages * 2624)
                file.write(rows.tobytes())
            code, stderr, seconds, megabytes = self.measured(*self.decode_arguments())
            self.assertEqual((code, stderr), (DONE, ""))
            self.assertLess(megabytes, 300)
            self.assertLess(seconds, 10, "a copy of the cache takes longer; usual are some hundredths")
            results = st.read(self.output)[0]
            self.assertEqual({name: array.tobytes() for name, (_, array) in results.items()}, expected)
        self.assertLess(time.monotonic() - start, 30)

    def test_a_cache_at_an_odd_byte_goes_to_a_gpu(self):
        """In pieces, to where the GPU can read it; decode there and on the CPU agree."""
        if "cuda:0" not in self.chiasma("info").stdout:
            self.skipTest("no CUDA device: nothing of this was run on a GPU")
        pages = GIB // 2624
        small = valid_input()
        write_sparse(self.input, {"q": ("BF16", small["q"][1].shape, small["q"][1]),
                                  "indices": ("I32", small["indices"][1].shape, small["indices"][1]),
                                  "kv_cache": ("U8", (pages, 4, 656), pages * 2624)}, ("kv_cache", 5), {"sm_scale": "0.05"})
        with open(self.input, "r+b") as file:
            file.seek(os.path.getsize(self.input) - pages * 2624)
            file.write(small["kv_cache"][1].tobytes())
        results = []
        for device in "cpu", "cuda":
            self.expect(self.decode("--device", device), DONE)
            tensors = st.read(self.output)[0]
            results.append((st.bf16_values(tensors["out"][1]), tensors["lse"][1]))
        for of_cpu, of_gpu in zip(*results):
            np.testing.assert_allclose(of_gpu, of_cpu, rtol=2**-7, atol=1e-4)
            self.assertGreater(np.abs(of_cpu).max(), 0.01)

    def test_quantize_and_dequantize_in_bounded_memory(self):
        pages = 6000  # 442 MB of kv, from which 252 MB of cache, from which 885 MB
        write_sparse(self.input, {"other": ("U8", (3,), 3), "kv": ("BF16", (pages, 64, 576), pages * 64 * 1152),
                                  "rest": ("U8", (400 << 20,), 400 << 20)}, ("kv", 3))
        cache, back = self.path("cache"), self.path("back")
        for arguments in ("quantize", "--input", self.input, "--output", cache), ("dequantize", "--input", cache, "--output", back):
            code, stderr, _, megabytes = self.measured(*arguments)
            self.assertEqual(code, DONE, stderr)
            self.assertLess(megabytes, 150)
            os.remove(arguments[2])

    def test_pages_at_distances_that_are_no_multiples_of_16(self):
        """Only v4 and v41plane have such pages; the result is that of the same pages with padding."""
        rng = np.random.default_rng(3)
        kv = st.bf16_bits(rng.normal(size=(3, 5, 512)))
        q = st.bf16_bits(rng.normal(size=(2, 1, 4, 512)))
        indices = rng.integers(-1, 15, (2, 1, 9)).astype(np.int32)
        st.write(self.input, {"kv": ("BF16", kv), "q": ("BF16", q), "indices": ("I32", indices)}, {"sm_scale": "0.05"})
        outputs = []
        cache = self.path("cache")
        self.expect(self.chiasma("quantize", "--input", self.input, "--output", cache, "--format", "v4"), DONE)
        tensors, metadata = st.read(cache)
        for page_bytes in 3456, 2920, 2923:
            pages = np.full((3, page_bytes), 0xFF, np.uint8)
            pages[:, :2920] = tensors["kv_cache"][1][:, :2920]
            st.write(self.input, tensors | {"kv_cache": ("U8", pages)}, metadata)
            self.expect(self.decode("--strict"), DONE)
            outputs.append(st.read(self.output)[0]["out"][1].tobytes())
        self.assertEqual(len(set(outputs)), 1)

    def start_on_a_large_file(self, command, pages=60000):
        """The process, when it has begun to write; with that many pages it would go on for seconds."""
        if command == "quantize":
            write_sparse(self.input, {"kv": ("BF16", (pages, 64, 576), pages * 64 * 1152)})
        else:
            write_sparse(self.input, {"kv_cache": ("U8", (pages, 64, 656), pages * 64 * 656)})
        process = subprocess.Popen([CHIASMA, command, "--input", self.input, "--output", self.output],
                                   stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        while len(os.listdir(self.directory)) == 1:
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        return process

    def test_an_interrupt_leaves_nothing(self):
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT:
            process = self.start_on_a_large_file("quantize" if number % 2 == 0 else "dequantize")
            process.send_signal(number)
            self.assertEqual(process.wait(), -number)
            self.assertEqual(os.listdir(self.directory), ["in.safetensors"])

    def start_a_large_decode(self, requests=4000):
        q = (requests, 1, 128, 576)
        write_sparse(self.input, {"q": ("BF16", q, int(np.prod(q)) * 2), "indices": ("I32", (requests, 1, 2048), requests * 8192),
                                  "kv_cache": ("U8", (64, 64, 656), 64 * 64 * 656)}, metadata={"sm_scale": "1"})
        process = subprocess.Popen([CHIASMA, *self.decode_arguments()], stderr=subprocess.PIPE, text=True)
        self.addCleanup(process.stderr.close)
        while len(os.listdir(self.directory)) == 1:
            self.assertIsNone(process.poll())
            time.sleep(0.01)
        return process

    def test_an_interrupted_decode_leaves_nothing(self):
        for number in signal.SIGINT, signal.SIGTERM:
            process = self.start_a_large_decode()
            process.send_signal(number)
            self.assertEqual(process.wait(), -number)
            self.assertEqual(os.listdir(self.directory), ["in.safetensors"])

    def test_a_file_that_shrinks_while_it_is_read(self):
        for command in "quantize", "dequantize", "decode":
            process = self.start_a_large_decode() if command == "decode" else self.start_on_a_large_file(command)
            os.truncate(self.input, 100000)
            self.assertEqual(process.wait(), BAD_INPUT)
            self.assertIn(f"{self.input}: the file became shorter while it was read", process.stderr.read())
            self.assertEqual(os.listdir(self.directory), ["in.safetensors"])

    def test_a_file_that_shrinks_by_less_than_a_page(self):
        """What is gone then reads as zeros, and only the length tells."""
        for command in "quantize", "dequantize", "decode":
            process = self.start_a_large_decode(60) if command == "decode" else self.start_on_a_large_file(command, 3000)
            os.truncate(self.input, os.path.getsize(self.input) - 1)
            self.assertEqual(process.wait(), BAD_INPUT)
            self.assertIn(f"{self.input}: the file became shorter while it was read", process.stderr.read())
            self.assertEqual(os.listdir(self.directory), ["in.safetensors"])

    def test_no_memory_to_map_a_file(self):
        st.write(self.input, valid_input())
        os.truncate(self.input, 8 * GIB)
        limit = lambda: resource.setrlimit(resource.RLIMIT_AS, (4 * GIB, 4 * GIB))
        if self.chiasma("--version", preexec_fn=limit).returncode != DONE:
            self.skipTest("the program itself does not start within 4 GiB, as with address sanitizer")
        self.expect(self.decode("--device", "cpu", preexec_fn=limit), UNAVAILABLE, self.input, "Cannot allocate memory")


if __name__ == "__main__":
    import sys

    unittest.main(argv=sys.argv[:1])
