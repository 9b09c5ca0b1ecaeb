"""What the tests of the command line share: the program, a directory of their own, a valid input, judging a run."""
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import numpy as np
except ImportError:
    print("SKIPPED: numpy is missing (Debian: python3-numpy)")
    sys.exit(77)

import safetensors_io as st

CHIASMA = os.path.abspath(sys.argv[1])
DONE, BAD_INPUT, UNAVAILABLE = 0, 2, 3


def valid_input():
    """A small v32 decode call."""
    rng = np.random.default_rng(1)
    pool = rng.integers(0, 0x70, (2, 4, 656)).astype(np.uint8)
    pool[..., 512:528] = np.full((2, 4, 4), 0.01, np.float32).view(np.uint8)
    pool[..., 528:] = 0
    return {
        "q": ("BF16", st.bf16_bits(rng.normal(size=(2, 1, 8, 576)))),
        "kv_cache": ("U8", pool),
        "indices": ("I32", rng.integers(-1, 8, (2, 1, 5)).astype(np.int32)),
    }


class ProgramTestCase(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = directory.name
        self.input, self.output = self.path("in.safetensors"), self.path("out.safetensors")

    def path(self, name):
        return os.path.join(self.directory, name)

    def chiasma(self, *arguments, **options):
        return subprocess.run([CHIASMA, *arguments], capture_output=True, text=True, **options)

    def decode(self, *arguments, **options):
        return self.chiasma("decode", "--input", self.input, "--output", self.output, *arguments, **options)

    def expect(self, result, code, *fragments):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stdout, "")
        for fragment in fragments:
            self.assertIn(fragment, result.stderr)

    def expect_refused(self, change, *fragments, metadata=None):
        """decode refuses valid_input() after `change`, naming the file, and makes no file."""
        tensors = valid_input()
        change(tensors)
        st.write(self.input, tensors, metadata)
        before = sorted(os.listdir(self.directory))
        self.expect(self.decode(), BAD_INPUT, self.input, *fragments)
        self.assertEqual(sorted(os.listdir(self.directory)), before)
