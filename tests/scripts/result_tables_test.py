#!/usr/bin/python3
"""scripts/result_tables.py and plots.py on a copy of the documents and result files: what is stale is named, and tables
are put right."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class ResultTablesTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = pathlib.Path(directory.name)
        documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md")]
        programs = [ROOT / "scripts/result_tables.py", ROOT / "scripts/plots.py", *(ROOT / "docs/plots").glob("*.svg")]
        for path in [*programs, *(ROOT / "bench/results").glob("*.json"), *documents]:
            copy = self.root / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

    def run_script(self, *arguments, name="result_tables.py"):
        script = self.root / "scripts" / name
        return subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True)

    def change(self, name, old, new):
        path = self.root / name
        text = path.read_text()
        self.assertIn(old, text)
        path.write_text(text.replace(old, new, 1))

    def test_documents_are_as_the_results(self):
        result = self.run_script("--check")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))

    def test_a_changed_figure_is_named_and_put_right(self):
        before = (self.root / "README.md").read_text()
        self.change("README.md", "| 128 x 2 | 128 | 2048 | 309 us |", "| 128 x 2 | 128 | 2048 | 300 us |")
        result = self.run_script("--check")
        self.assertEqual(result.returncode, 1)
        self.assertIn("README.md: a table is out of date", result.stdout)
        self.assertIn("300 us", result.stdout)
        self.assertEqual(self.run_script().returncode, 0)
        self.assertEqual((self.root / "README.md").read_text(), before)

    def test_a_changed_result_makes_its_tables_stale(self):
        path = "bench/results/h200_cache_ops.json"
        self.change(path, '"percent_of_copy": 100.0', '"percent_of_copy": 90.0')
        self.assertIn("src/cuda/cache/README.md", self.run_script("--check").stdout)

    def test_unknown_and_lost_tables(self):
        self.change("README.md", "<!-- table formats:", "<!-- table format:")
        result = self.run_script("--check")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("README.md: there is no table format;", result.stderr)
        self.change("README.md", "<!-- table format:", "<!-- was table formats:")
        self.assertIn("in no document: formats", self.run_script("--check").stderr)

    def test_plots_are_of_the_results(self):
        result = self.run_script("--check", name="plots.py")
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, "", ""))
        self.change("bench/results/peers_h200.json", '"256": 361', '"256": 362')
        (self.root / "docs/plots/cycles_of_a_block.svg").unlink()
        result = self.run_script("--check", name="plots.py")
        self.assertEqual(result.returncode, 1)
        self.assertIn("docs/plots/time_over_batch.svg: the plot is out of date", result.stdout)
        self.assertIn("docs/plots/cycles_of_a_block.svg: the plot is out of date", result.stdout)
        self.assertNotIn("energy_of_formats", result.stdout)

    def test_unknown_arguments(self):
        for name in "result_tables.py", "plots.py":
            self.assertIn("usage:", self.run_script("--chek", name=name).stderr)


if __name__ == "__main__":
    unittest.main()
