#!/usr/bin/env python3
"""Draws TFLOP/s by length from a result file: python benchmarks/plot.py RESULTS.json [PICTURE.png]

One panel per mask and head dim of the forward group, one line per candidate, the bars from the 10th to the 90th
percentile of the launches; below them the documents, one group of bars per draw, and the other masks, one group per
mask, where they were measured.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from benchmarks.report import read_json

ORDER = ("flashmsa", "cudnn", "flash", "fa4", "flex")  # fixes each candidate's colour across pictures
MASKS = ("dense", "causal")


def colour(name: str, others: list[str]) -> str:
    names = [*ORDER, *sorted(set(others) - set(ORDER))]
    return f"C{names.index(name) % 10}"


def curves(units: list[dict[str, Any]], mask: str, head_dim: int) -> dict[str, list[tuple[int, float, float, float]]]:
    """Per candidate: (length, TFLOP/s, its 10th and 90th percentile), by length."""
    found: dict[str, list[tuple[int, float, float, float]]] = {}
    for unit in units:
        for lane in unit["lanes"].values():
            case = lane["case"]
            if unit["group"] == "forward" and case["mask"] == mask and case["head_dim"] == head_dim:
                point = (case["length"], lane["tflops"], lane["tflops_p10"], lane["tflops_p90"])
                found.setdefault(lane["candidate"], []).append(point)
    return {name: sorted(points) for name, points in found.items()}


def draw_lengths(axis: Any, units: list[dict[str, Any]], mask: str, head_dim: int, ceiling: float | None) -> None:
    lines = curves(units, mask, head_dim)
    for name, points in lines.items():
        lengths, rates, low, high = zip(*points, strict=True)
        below = [rate - bottom for rate, bottom in zip(rates, low, strict=True)]
        above = [top - rate for rate, top in zip(rates, high, strict=True)]
        width = 2.2 if name == "flashmsa" else 1.2
        axis.errorbar(lengths, rates, [below, above], label=name, marker="o", markersize=3, capsize=2, linewidth=width,
                      color=colour(name, list(lines)))  # fmt: skip
    if ceiling:
        axis.axhline(ceiling, color="grey", linestyle=":", linewidth=1)
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_title(f"{mask}, head_dim {head_dim}", fontsize=10)
    axis.grid(alpha=0.3)


def draw_documents(axis: Any, units: list[dict[str, Any]]) -> None:
    labels = list(dict.fromkeys(label for unit in units for label in unit["lanes"]))
    width = 0.8 / max(1, len(labels))
    for index, label in enumerate(labels):
        rates = [unit["lanes"].get(label, {}).get("tflops", 0.0) for unit in units]
        axis.bar([i + index * width for i in range(len(units))], rates, width, label=label)
    targets = [(i, unit["derived"].get("target_tflops")) for i, unit in enumerate(units)]
    for i, target in targets:
        if target:
            axis.hlines(target, i - width / 2, i + 0.8 - width / 2, color="black", linewidth=1)
    names = [unit["name"].replace("d128-1x16384-", "") for unit in units]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(units))], names, rotation=20, ha="right", fontsize=7)
    axis.set_title("documents over allowed pairs; black: our dense rate times tile efficiency", fontsize=10)
    axis.legend(fontsize=7)


def draw_masks(axis: Any, units: list[dict[str, Any]]) -> None:
    """Bars of ours and of the peers on each mask; a black line for what ours reaches where no tile is cut."""
    own = [
        {label: lane for label, lane in unit["lanes"].items() if lane["case"]["name"] == unit["derived"]["case"]}
        for unit in units
    ]
    labels = list(dict.fromkeys(label for lanes in own for label in lanes))
    width = 0.8 / max(1, len(labels))
    for index, label in enumerate(labels):
        rates = [lanes.get(label, {}).get("tflops", 0.0) for lanes in own]
        axis.bar([i + index * width for i in range(len(units))], rates, width, label=label)
    for i, unit in enumerate(units):
        if unit["derived"]["whole"] is not None:
            rate = unit["lanes"][unit["derived"]["whole"]]["tflops"]
            axis.hlines(rate, i - width / 2, i + 0.8 - width / 2, color="black", linewidth=1)
    names = [unit["name"].removeprefix("d128-1x") for unit in units]
    axis.set_xticks([i + 0.4 - width / 2 for i in range(len(units))], names, rotation=25, ha="right", fontsize=7)
    axis.set_title("masks over allowed pairs; black: ours where no tile is cut or skipped", fontsize=10)
    axis.legend(fontsize=7)


def plot(data: dict[str, Any], path: Path) -> None:
    """Writes the picture of a result file (see report.check_results) to `path`."""
    forward = [unit for unit in data["units"] if unit["group"] == "forward"]
    documents = [unit for unit in data["units"] if unit["group"] == "documents" and unit["lanes"]]
    masks = [unit for unit in data["units"] if unit["group"] == "masks" and unit["lanes"]]
    dims = sorted({lane["case"]["head_dim"] for unit in forward for lane in unit["lanes"].values()})
    if not dims and not documents and not masks:
        raise ValueError("results: neither forward nor documents nor masks were measured; there is nothing to draw")
    rows = (len(MASKS) if dims else 0) + bool(documents) + bool(masks)
    columns = max(1, len(dims))
    figure = plt.figure(figsize=(4.2 * max(columns, 2), 3.2 * rows), layout="constrained")
    grid = figure.add_gridspec(rows, columns)
    for row, mask in enumerate(MASKS if dims else ()):
        for column, head_dim in enumerate(dims):
            axis = figure.add_subplot(grid[row, column])
            draw_lengths(axis, forward, mask, head_dim, data["ceiling"]["tflops"])
            axis.set_ylabel("TFLOP/s" if column == 0 else "")
            axis.set_xlabel("length (16384 tokens in all)" if row == len(MASKS) - 1 else "")
            if row == column == 0:
                axis.legend(fontsize=7)
    if documents:
        draw_documents(figure.add_subplot(grid[rows - 1 - bool(masks), :]), documents)
    if masks:
        draw_masks(figure.add_subplot(grid[rows - 1, :]), masks)
    machine = data["environment"]
    figure.suptitle(f"{machine['gpu']}, torch {machine['torch']}, {data['date']}; dotted: bf16 matmul", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(argv: list[str]) -> int:
    if len(argv) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    source = Path(argv[0])
    picture = Path(argv[1]) if len(argv) == 2 else source.with_suffix(".png")
    plot(read_json(source), picture)
    print(f"written: {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
