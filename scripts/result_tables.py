#!/usr/bin/python3
"""Tables of measured figures in the documents, from bench/results/*.json.

A table stands between two lines of its document:

    <!-- table NAME: scripts/result_tables.py -->
    <!-- end of table -->

usage: result_tables.py [--check]

Without --check it rewrites what is between them; with it, it changes nothing and names each table that is out of date.
"""

import difflib
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench/results"
DOCUMENTS = ("README.md", "docs", "src")
TABLE = re.compile(r"(<!-- table (\S+): scripts/result_tables\.py -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def load(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def fields(case):
    """'decode b=128 fmt=v4' as {'b': '128', 'fmt': 'v4'}, with the defaults that tables ask for."""
    return {"b": "1", "h": "128", "sq": "1", "topk": "2048", "fmt": "v32", "layout": "packed"} | dict(
        pair.split("=", 1) for pair in case.split()[1:]
    )


def find(name, kernel=None, **wanted):
    """The result of a file whose case has these values; None if there is none."""
    for result in load(name)["results"]:
        of_case = fields(result["case"])
        if all(of_case[key] == str(value) for key, value in wanted.items()) and kernel in (None, result["kernel"]):
            return result
    return None


def us(value):
    return f"{value:,.0f} us" if value >= 100 else f"{value:.1f} us"


def loop(result):
    return "" if result is None else us(result["loop_us"]["median"])


def endurance(result, key, text=us):
    return "" if result is None or "endurance" not in result else text(result["endurance"][key])


def rows(header, lines):
    def row(cells):
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    yield row(header)
    yield "|" + "---|" * len(header)
    yield from map(row, lines)


def sparse():
    beside, alone = "h200_sm90_sparse_fp8", "h200_sm90_sparse_fp8_direct"
    shapes = ((128, 2, 128, 2048), (148, 2, 128, 16384), (64, 1, 128, 2048), (128, 2, 64, 2048), (128, 1, 32, 2048),
              (128, 1, 16, 2048), (16, 1, 128, 2048), (4, 1, 128, 2048), (1, 1, 128, 2048), (1, 1, 16, 2048))  # fmt: skip
    lines = []
    for b, sq, h, topk in shapes:
        shape = {"b": b, "sq": sq, "h": h, "topk": topk}
        direct = find(beside, "sm90_sparse_fp8_direct", **shape) or find(alone, **shape)
        crossover = find(beside, "sm90_sparse_fp8_crossover", **shape)
        lines.append((f"{b} x {sq}", str(h), str(topk), loop(direct), f"{direct['loop_tflops']:.0f}", loop(crossover)))
    return rows(("requests x query tokens", "heads", "topk", "direct", "TFLOPS", "crossover"), lines)


FORMATS = ("v32", "v32nope", "v32nope_compact", "fp8", "fp8nope", "v41", "v41plane", "v4")


def formats():
    lines = []
    for fmt in FORMATS:
        many = find("h200_formats", b=128, sq=2, fmt=fmt, layout="packed")
        few_heads = find("h200_formats", b=128, h=16, fmt=fmt)
        lines.append((f"`{fmt}`", loop(many), endurance(many, "burst_us"), endurance(many, "sustained_us"),
                      endurance(many, "joules_a_call", "{:.2f}".format), loop(few_heads)))  # fmt: skip
    return rows(("format", "128 heads", "burst", "sustained", "J a call", "16 heads"), lines)


def formats_with_rates():
    def cell(result, with_rate=True):
        value = result["loop_us"]["median"]
        text = f"{value:.0f}" if value >= 100 else f"{value:.1f}"
        return f"{text} ({result['loop_tflops']:.0f})" if with_rate else text

    lines = [
        (
            f"`{fmt}`",
            cell(find("h200_formats", b=128, sq=2, fmt=fmt, layout="packed")),
            cell(find("h200_formats", b=128, h=16, fmt=fmt)),
            cell(find("h200_formats", b=4, fmt=fmt), with_rate=False),
        )
        for fmt in FORMATS
    ]
    return rows(("format", "b=128 h=128 s_q=2", "b=128 h=16", "b=4 h=128"), lines)


def unquantised():
    lines = []
    for b, h in ((128, 128), (128, 64), (16, 128), (16, 16)):
        result = find("h200_bf16", "sm90_sparse_bf16", b=b, h=h, fmt="bf16")
        nope = find("h200_bf16", "sm90_sparse_bf16", b=b, h=h, fmt="bf16nope")
        lines.append((str(b), str(h), loop(result), endurance(result, "burst_us"), endurance(result, "sustained_us"),
                      loop(nope)))  # fmt: skip
    return rows(("requests", "heads", "`bf16`", "burst", "sustained", "`bf16nope`"), lines)


def cache_operations():
    lines = []
    for result in load("h200_cache_ops")["results"]:
        if result["case"].endswith("once more"):
            continue
        time = result["us"]
        lines.append((result["case"], f"{time['median']:.0f} [{time['p10']:.0f} .. {time['p90']:.0f}]",
                      f"{result['gb_per_s'] / 1e3:.2f}", f"{result['percent_of_copy']:.0f} %",
                      f"{result['joules_a_call']:.2f}"))  # fmt: skip
    return rows(("case", "us", "TB/s", "", "J a call"), lines)


def python_overhead():
    result = load("python_call_overhead_h200")
    names = {
        "out, lse and workspace given": "out, lse and workspace given",
        "out and lse given": "out and lse given",
        "nothing given": "nothing given",
        "nothing given, int64 indices": "nothing given, int64 indices",
        "`torch.ops.chiasma.decode`": "nothing given, torch.ops.chiasma.decode",
    }
    lines = [(label, f"{result['us'][key]:.1f}", f"{result['us'][key] - result['c_call_us']:.1f}")
             for label, key in names.items()]  # fmt: skip
    alone = result["us"]["two new tensors by PyTorch"]
    lines.append(("for comparison: the two outputs by PyTorch alone", f"{alone:.1f}", ""))
    return rows(("call", "us", "above the C call"), lines)


TABLES = {
    "sparse": sparse,
    "formats": formats,
    "formats_with_rates": formats_with_rates,
    "unquantised": unquantised,
    "cache_operations": cache_operations,
    "python_overhead": python_overhead,
}


def documents():
    for place in DOCUMENTS:
        path = ROOT / place
        yield from [path] if path.is_file() else sorted(path.rglob("*.md"))


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit(__doc__)
    seen, stale = set(), 0
    for path in documents():
        text = path.read_text()

        def fill(match):
            name = match.group(2)
            if name not in TABLES:
                sys.exit(f"{path.relative_to(ROOT)}: there is no table {name}; there are {', '.join(TABLES)}")
            seen.add(name)
            return match.group(1) + "\n".join(TABLES[name]()) + "\n" + match.group(4)

        filled = TABLE.sub(fill, text)
        if filled == text:
            continue
        stale += 1
        if check:
            print(f"{path.relative_to(ROOT)}: a table is out of date; scripts/result_tables.py rewrites it")
            difference = difflib.unified_diff(text.splitlines(), filled.splitlines(), "as it is", "from results", "", "", 0)
            print("\n".join(list(difference)[2:]))
        else:
            path.write_text(filled)
    missing = set(TABLES) - seen
    if missing:
        sys.exit(f"in no document: {', '.join(sorted(missing))}")
    sys.exit(1 if check and stale else 0)


if __name__ == "__main__":
    main()
