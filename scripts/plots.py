#!/usr/bin/python3
"""Plots of docs/results.md, docs/plots/*.svg, from bench/results/*.json.

usage: plots.py [--check]

Without --check it draws all of them and needs matplotlib. With it, it draws nothing and names each plot whose figures are
no longer those of the result files: a plot carries a digest of its figures.
"""

import hashlib
import json
import pathlib
import sys

from result_tables import FORMATS, ROOT, fields, find, load

PLACE = ROOT / "docs/plots"
# Seen well on white and on black.
GREY, COLOURS = "#808080", ("#2f81f7", "#e8590c", "#2b9348", "#a371f7", "#d4a017")
DIGEST = "<!-- figures "


def peers(kernel, heads):
    for result in load("peers_h200")["results"]:
        if result["kernel"].startswith(kernel) and result["heads"] == heads:
            return {int(b): us for b, us in result["loop_us"].items()}
    raise KeyError(kernel)


def times_over_batch(heads, fmt="v32"):
    times = {}
    for name in ("h200_bf16",) if fmt == "bf16" else ("h200_sm90_sparse_fp8_direct", "h200_sm90_sparse_fp8"):
        for result in load(name)["results"]:
            of_case = fields(result["case"])
            wanted = {"h": str(heads), "sq": "1", "topk": "2048", "fmt": fmt}
            is_default = name == "h200_bf16" or result["kernel"] == "sm90_sparse_fp8_direct"
            if is_default and all(of_case[key] == value for key, value in wanted.items()):
                times[int(of_case["b"])] = round(result["loop_us"]["median"], 1)
    return dict(sorted(times.items()))


def time_over_batch():
    """Figures, and how they are drawn."""
    figures = {
        "Chiasma, 128 heads": times_over_batch(128),
        "FlashMLA, 128 heads": peers("FlashMLA", 128),
        "FlashInfer bf16, 128 heads": peers("FlashInfer", 128),
        "Chiasma, 16 heads": times_over_batch(16),
        "FlashMLA, 16 heads (as 64)": peers("FlashMLA", 64),
    }

    def draw(axes):
        marks = ("o-", "s--", "^:", "o-", "s--")
        for (name, times), colour, mark in zip(figures.items(), COLOURS, marks):
            axes.plot(list(times), list(times.values()), mark, color=colour, label=name, markersize=4)
        axes.set(xscale="log", yscale="log", xlabel="requests", ylabel="us a call")
        axes.set_xticks([1, 4, 16, 64, 256], ["1", "4", "16", "64", "256"])
        axes.set_yticks([10, 20, 50, 100, 200, 400], ["10", "20", "50", "100", "200", "400"])
        axes.legend()

    return figures, draw


def energy_of_formats():
    figures = {}
    for fmt in FORMATS:
        result = find("h200_formats", b=128, sq=2, fmt=fmt, layout="packed")["endurance"]
        figures[fmt] = {"J a call": round(result["joules_a_call"], 3), "us": round(result["sustained_us"])}

    def draw(axes):
        names = list(figures)[::-1]
        joules = [figures[name]["J a call"] for name in names]
        axes.barh(names, joules, color=COLOURS[0])
        for name, joule in zip(names, joules):
            axes.text(joule, name, f" {joule:.2f} J, {figures[name]['us']} us", va="center", fontsize=8)
        axes.set(xlabel="joules a call, sustained", xlim=(0, max(joules) * 1.35))

    return figures, draw


def error_over_deviation():
    figures = {}
    for kernel in ("direct", "crossover"):
        for result in load(f"h200_accuracy_sm90_sparse_fp8_{kernel}")["results"]:
            if "case" not in result:
                continue
            scale = "amax" if "scale=amax" in result["case"] else "pow2"
            error = result["error"]
            point = (round(error["score_deviation_max"], 2), round(error["out_relative_l2_max"], 6))
            figures.setdefault(f"{kernel}, {scale} scales", []).append(point)

    def draw(axes):
        for (name, points), colour, mark in zip(figures.items(), COLOURS, "o^s*"):
            axes.plot(*zip(*points), mark, color=colour, label=name, markersize=6, fillstyle="none")
        axes.axhline(2.2e-3, color=GREY, linewidth=1)
        axes.text(1.2, 2.21e-3, "allowed", fontsize=8, va="bottom")
        axes.set(xlabel="standard deviation of scores", ylabel="relative L2 error of a row, largest", ylim=(1.6e-3, 2.3e-3))
        axes.ticklabel_format(axis="y", scilimits=(0, 0))
        axes.legend(loc="lower right")

    return figures, draw


def cycles_of_a_block():
    figures = {}
    for kernel in load("h200_budget")["kernels"]:
        needs = {need: round(clk) for need, clk in kernel["clk_by_resource"].items()}
        figures[kernel["kernel"].removeprefix("sm90_sparse_fp8_")] = needs | {"measured": round(kernel["measured_clk_per_block"])}

    def draw(axes):
        resources = list(next(iter(figures.values())))
        height = 0.8 / len(figures)
        for n, (name, needs) in enumerate(figures.items()):
            places = [place - n * height for place in range(len(resources))[::-1]]
            axes.barh(places, [needs[resource] for resource in resources], height, color=COLOURS[n], label=name)
        axes.set_yticks([place - height for place in range(len(resources))[::-1]], resources)
        axes.set(xlabel="clk for 64 tokens and 64 heads: what each unit needs, and what a block takes")
        axes.legend()

    return figures, draw


PLOTS = {
    "time_over_batch": time_over_batch,
    "energy_of_formats": energy_of_formats,
    "error_over_deviation": error_over_deviation,
    "cycles_of_a_block": cycles_of_a_block,
}


def digest_of(figures):
    return hashlib.sha256(json.dumps(figures).encode()).hexdigest()[:16]


def check():
    stale = []
    for name, plot in PLOTS.items():
        path = PLACE / f"{name}.svg"
        if not path.is_file() or f"{DIGEST}{digest_of(plot()[0])} -->" not in path.read_text():
            stale.append(path.relative_to(ROOT))
    for path in stale:
        print(f"{path}: the plot is out of date; scripts/plots.py draws it")
    return 1 if stale else 0


def draw_all():
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "chiasma", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
    plt.rcParams |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY)
    plt.rcParams |= {"legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False}
    PLACE.mkdir(parents=True, exist_ok=True)
    for name, plot in PLOTS.items():
        figures, draw = plot()
        picture, axes = plt.subplots(figsize=(6.4, 3.6))
        draw(axes)
        path = PLACE / f"{name}.svg"
        picture.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None, "Creator": None})
        plt.close(picture)
        lines = [line.rstrip() for line in path.read_text().splitlines()]
        path.write_text("\n".join([*lines, f"{DIGEST}{digest_of(figures)} -->", ""]))


def main():
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    if sys.argv[1:]:
        sys.exit(check())
    try:
        draw_all()
    except ModuleNotFoundError as error:
        sys.exit(f"plots.py: {error}; python3 -m pip install matplotlib")


if __name__ == "__main__":
    main()
