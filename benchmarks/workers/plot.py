"""Draws one figure: run by the Python of the `plots` environment. On stdin {"title", "x", "y", "log", "lines": [{"name", "x", "y", "dashed"}]}; the
argument is the SVG file. The file depends on the data only."""

from __future__ import annotations

import json
import sys

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure

mpl.rcParams.update({"svg.hashsalt": "fastllm", "svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def main() -> None:
    """One figure, 5 × 3.2 inches."""
    data = json.load(sys.stdin)
    figure = Figure(figsize=(5, 3.2))
    axes = figure.subplots()
    for number, line in enumerate(data["lines"]):
        style = {"linestyle": "--", "color": "0.5"} if line.get("dashed") else {"marker": "o", "markersize": 3, "color": f"C{number}"}
        axes.plot(line["x"], line["y"], label=line["name"], **style)
    axes.set(title=data["title"], xlabel=data["x"], ylabel=data["y"])
    if data["log"]:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(sys.argv[1], format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
