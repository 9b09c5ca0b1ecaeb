#!/usr/bin/python3
"""`chiasma budget` from outside. With --gpu what it measures on a GPU, which must be there; else its manners without one.

usage: budget_command_test.py CHIASMA [--gpu]
"""
import json
import os
import subprocess
import sys
import tempfile
import unittest

CHIASMA, ON_GPU = os.path.abspath(sys.argv[1]), "--gpu" in sys.argv[2:]
DONE, BAD_INPUT, UNAVAILABLE = 0, 2, 3
SKIPPED = 77


def budget(*arguments, **environment):
    return subprocess.run([CHIASMA, "budget", *arguments], capture_output=True, text=True,
                          env={**os.environ, **environment})


class MannersTest(unittest.TestCase):
    def test_help_explains_the_command(self):
        result = budget("--help")
        self.assertEqual(result.returncode, DONE)
        for word in ("--json", "--case", "ceilings", "clk"):
            self.assertIn(word, result.stdout)

    def test_without_a_gpu_it_says_so_and_leaves_no_file(self):
        with tempfile.TemporaryDirectory() as directory:
            result = budget("--json", os.path.join(directory, "result.json"), CUDA_VISIBLE_DEVICES="")
            self.assertEqual(os.listdir(directory), [])
        self.assertEqual(result.returncode, UNAVAILABLE)
        self.assertRegex(result.stderr, "(?i)cuda")
        self.assertEqual(result.stdout, "")

    def test_bad_input_is_named(self):
        for arguments, fragment in [
            (["--case", "decode topk=x"], "topk is 'x'"),
            (["--case", "decode h=64"], "64 heads"),
            (["--case", "decode fmt=bf16"], "v32"),
            (["--device", "cpu"], "cpu"),
            (["--json", "/nonexistent/result.json"], "/nonexistent"),
            (["--unknown"], "--unknown"),
        ]:
            result = budget(*arguments)
            self.assertEqual(result.returncode, BAD_INPUT, arguments)
            self.assertIn(fragment, result.stderr)
            self.assertEqual(result.stdout, "")


class GpuTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "result.json")
            cls.result = budget("--case", "decode b=32 sq=2 pool=4096", "--json", path)
            if cls.result.returncode == UNAVAILABLE:
                print("NOT RUN:", cls.result.stderr)
                sys.exit(SKIPPED)
            with open(path) as file:
                cls.json = json.load(file)

    def test_exit_code_and_text(self):
        self.assertEqual(self.result.returncode, DONE, self.result.stderr)
        self.assertIn("bottleneck", self.result.stdout)

    def test_every_ceiling_is_a_positive_figure_with_its_spread(self):
        ids = [entry["id"] for entry in self.json["ceilings"]]
        self.assertEqual(len(ids), len(set(ids)))
        for entry in self.json["ceilings"]:
            value = entry["value"]
            self.assertLess(0, value["min"], entry)
            self.assertLessEqual(value["min"], value["median"], entry)
            self.assertLess(500, entry["sm_mhz"], entry)

    def test_ceilings_are_what_the_chip_can_be(self):
        value = {entry["id"]: entry["value"]["median"] for entry in self.json["ceilings"]}
        self.assertLess(3500, value["wgmma_f16_n64_wg2"])
        self.assertLess(value["wgmma_f16_n256_wg2"], 4150)
        self.assertLess(value["shared_load_w12"], 130)
        self.assertLess(value["exp2_w8"], 16.5)
        self.assertLess(value["gather_copy_half_t128_dram"], value["gather_copy_half_t128_l2"])

    def test_a_kernel_is_never_faster_than_its_bottleneck(self):
        self.assertLessEqual(2, len(self.json["kernels"]))
        for entry in self.json["kernels"]:
            self.assertTrue(entry["error"]["passed"])
            self.assertEqual(max(entry["clk_by_resource"].values()), entry["clk_by_resource"][entry["bottleneck"]])
            self.assertLess(max(entry["clk_by_resource"].values()), entry["measured_clk_per_block"])
            by_hand = entry["loop_us"]["median"] * entry["sm_mhz"] / entry["blocks_per_multiprocessor"]
            self.assertAlmostEqual(entry["measured_clk_per_block"], by_hand, places=3)


if __name__ == "__main__":
    suite = unittest.TestLoader().loadTestsFromTestCase(GpuTest if ON_GPU else MannersTest)
    sys.exit(not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful())
