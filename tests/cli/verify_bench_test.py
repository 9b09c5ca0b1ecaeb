#!/usr/bin/python3
"""verify and bench from outside: what they print, their exit codes, and the result file.

usage: verify_bench_test.py CHIASMA CASES_DIRECTORY
"""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest

CHIASMA, CASES = (os.path.abspath(argument) for argument in sys.argv[1:3])
DONE, BAD_INPUT, UNAVAILABLE = 0, 2, 3
SMALL = "decode b=1 h=4 pool=100 topk=33 scale=amax poison=nan"


def chiasma(*arguments):
    return subprocess.run([CHIASMA, *arguments], capture_output=True, text=True)


class VerifyTest(unittest.TestCase):
    def test_built_in_cases_pass_line_by_line(self):
        result = chiasma("verify", "--device", "cpu")
        lines = result.stdout.splitlines()
        with open(os.path.join(CASES, "smoke.cases")) as file:
            count = sum(line.startswith("decode") for line in file)
        self.assertEqual(result.returncode, DONE, result.stdout)
        self.assertEqual(lines[-1], f"{count} passed, 0 failed")
        self.assertEqual(len(lines), count + 1)

    def test_a_printed_line_can_be_pasted_back(self):
        first = chiasma("verify", "--device", "cpu", "--case", SMALL).stdout.splitlines()[0]
        line = first[first.index("decode"):]
        again = chiasma("verify", "--device", "cpu", "--case", line)
        self.assertEqual(again.stdout.splitlines()[0], first)

    def test_files_and_lines_add_up(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "two.cases")
            with open(path, "w") as file:
                file.write(f"# two\n{SMALL}\n\n{SMALL} seed=2 # the other\n")
            result = chiasma("verify", "--device", "cpu", "--cases", path, "--case", SMALL, "--case", SMALL + " seed=3")
        self.assertEqual(result.stdout.splitlines()[-1], "4 passed, 0 failed")

    def test_big_cases_are_sampled_unless_all_rows_are_asked_for(self):
        case = ["verify", "--device", "cpu", "--case", "decode b=9 h=128 pool=2048 topk=4096 scale=amax"]
        self.assertRegex(chiasma(*case).stdout, r" [2-8]/9 rows ")
        small = ["verify", "--device", "cpu", "--case", SMALL + " seed=4", "--all-rows"]
        self.assertRegex(chiasma(*small).stdout, r" 1/1 rows ")

    def test_bad_input_is_named(self):
        for arguments, fragment in [
            (["--case", "decode topk=x"], "topk is 'x'"),
            (["--cases", "/nonexistent.cases"], "/nonexistent.cases"),
            (["--device", "tpu"], "tpu"),
            (["--kernel", "none_such"], "none_such"),
            (["--unknown"], "--unknown"),
        ]:
            result = chiasma("verify", *arguments)
            self.assertEqual(result.returncode, BAD_INPUT, arguments)
            self.assertIn(fragment, result.stderr)
            self.assertEqual(result.stdout, "")

    def test_what_cannot_be_run_here_is_no_failure_and_no_success(self):
        result = chiasma("verify", "--device", "cpu", "--case", "decode b=1000000 sq=1000 pool=1 page=1")
        self.assertEqual(result.returncode, UNAVAILABLE)
        self.assertEqual(result.stdout.splitlines()[-1], "0 passed, 0 failed, 1 not run")

    def test_result_file_holds_errors_and_what_they_are_of(self):
        activations = os.path.join(CASES, "..", "examples", "real_activations.safetensors")
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "result.json")
            result = chiasma("verify", "--device", "cpu", "--kernel", "cpu_simd", "--case", SMALL, "--case", SMALL + " h=0",
                             "--json", path)
            self.assertEqual((result.returncode, os.listdir(directory)), (BAD_INPUT, []))
            result = chiasma("verify", "--device", "cpu", "--case", SMALL, "--activations", activations, "--json", path)
            self.assertEqual(result.returncode, DONE, result.stderr)
            with open(path) as file:
                written = json.load(file)
        self.assertEqual(result.stdout.splitlines()[-1], "3 passed, 0 failed")
        self.assertTrue(written["machine"]["cpu"])
        first, pow2, amax = written["results"]
        self.assertEqual(first["case"], SMALL)
        self.assertEqual([pow2["scale"], amax["scale"]], ["pow2", "amax"])
        for entry in written["results"]:
            self.assertEqual(entry["kernel"], "cpu_simd")
            error = entry["error"]
            self.assertTrue(error["passed"])
            self.assertLess(error["out_relative_l2_mean"], error["out_relative_l2_max"])
            self.assertGreater(error["out_relative_l2_mean"], 1e-3)
        self.assertGreater(amax["error"]["score_deviation_max"], 3)

    def test_activations_alone_and_those_that_are_none(self):
        activations = os.path.join(CASES, "..", "examples", "real_activations.safetensors")
        result = chiasma("verify", "--device", "cpu", "--activations", activations)
        self.assertEqual(result.stdout.splitlines()[-1], "2 passed, 0 failed")
        result = chiasma("verify", "--device", "cpu", "--activations", os.path.join(CASES, "smoke.cases"))
        self.assertEqual(result.returncode, BAD_INPUT)
        self.assertIn("smoke.cases", result.stderr)


class BenchTest(unittest.TestCase):
    def test_result_file_has_all_that_a_reader_needs(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "result.json")
            result = chiasma("bench", "--device", "cpu", "--seconds", "0", "--case", SMALL, "--case", SMALL + " fmt=bf16",
                             "--kernel", "cpu_simd", "--kernel", "cpu_simd", "--json", path)
            self.assertEqual(result.returncode, DONE, result.stderr)
            self.assertEqual(os.listdir(directory), ["result.json"])
            with open(path) as file:
                written = json.load(file)
        self.assertRegex(written["commit"], r"^([0-9a-f]{40}(-dirty)?|unknown)$")
        self.assertTrue(written["machine"]["cpu"])
        self.assertEqual(len(written["results"]), 4)
        for entry in written["results"]:
            self.assertTrue(entry["case"].startswith("decode "))
            self.assertEqual(entry["kernel"], "cpu_simd")
            self.assertTrue(entry["error"]["passed"])
            for figure in ("cold_us", "loop_us"):
                times = entry[figure]
                self.assertLessEqual(0, times["min"])
                self.assertLessEqual(times["min"], times["p10"])
                self.assertLessEqual(times["p10"], times["median"])
                self.assertLessEqual(times["median"], times["p90"])
                self.assertGreaterEqual(times["n"], 7)
            expected = 2 * 4 * 33 * (576 + 512)
            self.assertEqual(entry["flop"], expected)
            self.assertAlmostEqual(entry["loop_tflops"], expected / entry["loop_us"]["median"] * 1e-6)

    def test_only_selected_entries_count_as_work(self):
        with tempfile.TemporaryDirectory() as directory:
            path = os.path.join(directory, "result.json")
            chiasma("bench", "--device", "cpu", "--seconds", "0", "--case", SMALL + " len=zero", "--json", path)
            with open(path) as file:
                self.assertEqual(json.load(file)["results"][0]["flop"], 0)

    def test_the_table_names_case_and_both_times(self):
        result = chiasma("bench", "--device", "cpu", "--seconds", "0", "--case", SMALL)
        self.assertIn(SMALL, result.stdout)
        self.assertTrue(re.search(r"cpu_simd +cold [0-9.]+ us .* loop [0-9.]+ us .* GFLOPS", result.stdout), result.stdout)

    def test_a_bad_place_for_the_result_is_known_before_the_work(self):
        result = chiasma("bench", "--json", "/nonexistent/result.json", "--case", SMALL)
        self.assertEqual(result.returncode, BAD_INPUT)
        self.assertIn("/nonexistent", result.stderr)
        self.assertEqual(result.stdout, "")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
