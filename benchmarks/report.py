"""From measured times to figures: rates, ratios, means, the JSON file and the printed tables."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import Lane
from benchmarks.device import TENSOR_FLOPS_PER_CYCLE
from benchmarks.timing import Launches, Steady, spread

SCHEMA = 1
OURS = "flashmsa"
BASELINE = "cudnn"
PLAIN_READ = "plain read"

# Keys that every result file has, and what a lane may carry.
RESULT_KEYS = (
    "schema",
    "command",
    "date",
    "dry_run",
    "settings",
    "environment",
    "clocks",
    "ceiling",
    "units",
    "summary",
)
UNIT_KEYS = ("group", "name", "lanes", "skipped", "derived")


def mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def tensor_utilisation(flops: float, seconds: float, mhz: float | None, sm_count: int) -> float | None:
    """FLOPs / (SMs * 4096 * SM cycles), the figure that the card's clock does not move."""
    return None if mhz is None else flops / (sm_count * TENSOR_FLOPS_PER_CYCLE * mhz * 1e6 * seconds)


def lane_figures(lane: Lane, launches: Launches, sm_count: int) -> dict[str, Any]:
    """Time, rate and utilisation of one lane."""
    times = spread(launches.ms)
    rate = lane.flops / (times["median"] * 1e9)
    mhz = launches.median_mhz()
    return {
        "candidate": lane.candidate,
        "case": lane.case.as_dict(),
        "flops": lane.flops,
        "ms": times,
        "tflops": rate,
        "tflops_p10": lane.flops / (times["p90"] * 1e9),
        "tflops_p90": lane.flops / (times["p10"] * 1e9),
        "sm_mhz": mhz,
        "utilisation": tensor_utilisation(lane.flops, times["median"] / 1e3, mhz, sm_count),
    }


def steady_figures(lane: Lane, result: Steady, sm_count: int) -> dict[str, Any]:
    """The same under sustained load, with the energy of a TFLOP: joules = watts / (TFLOP/s)."""
    ms = result.ms_per_launch()
    rate = lane.flops / (ms * 1e9)
    power, mhz = mean(result.watts), mean(result.mhz)
    return {
        "launches": sum(part.launches for part in result.slices),
        "ms": ms,
        "tflops": rate,
        "tflops_slices": [lane.flops * part.launches / (part.ms * 1e9) for part in result.slices],
        "sm_mhz": mhz,
        "utilisation": tensor_utilisation(lane.flops, ms / 1e3, mhz, sm_count),
        "watts": power,
        "joules_per_tflop": None if power is None else power / rate,
    }


def add_steady_ratios(unit: dict[str, Any]) -> None:
    """Of our steady state: of_peer, its rate over the fastest peer's; energy_of_peer, its joules a TFLOP over those of
    the peer that needs least. Peers are lanes of the same case."""
    ours = unit["lanes"].get(OURS)
    if ours is None or "steady" not in ours:
        return
    own = ours["case"]["name"]
    peers = {
        label: lane["steady"]
        for label, lane in unit["lanes"].items()
        if "steady" in lane and is_own_case(lane, own) and not is_ours(lane)
    }
    best = max(peers, key=lambda label: peers[label]["tflops"], default=None)
    energies = [peer["joules_per_tflop"] for peer in peers.values() if peer["joules_per_tflop"]]
    figures, energy = ours["steady"], ours["steady"]["joules_per_tflop"]
    unit["derived"]["steady"] = {
        "best_peer": best,
        "of_peer": figures["tflops"] / peers[best]["tflops"] if best else None,
        "energy_of_peer": energy / min(energies) if energy and energies else None,
    }


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


# Derived figures of a unit


def add_ratios(unit: dict[str, Any]) -> None:
    """ratio: a lane's rate over cuDNN's on the same case in the same loop."""
    base = {lane["case"]["name"]: lane["tflops"] for lane in unit["lanes"].values() if lane["candidate"] == BASELINE}
    for lane in unit["lanes"].values():
        reference = base.get(lane["case"]["name"])
        lane["ratio"] = lane["tflops"] / reference if reference and "+" not in lane["candidate"] else None


def add_ceiling(units: list[dict], ceiling: float | None) -> None:
    """of_matmul: a lane's rate over the bf16 matrix product's in the same run. ceiling: TFLOP/s."""
    for unit in units:
        for lane in unit["lanes"].values():
            if "tflops" in lane:
                lane["of_matmul"] = lane["tflops"] / ceiling if ceiling else None


def add_document_target(unit: dict[str, Any], efficiency: float | None) -> None:
    """What tile efficiency allows: our dense rate * pairs / visited tile area, and the share of it that was reached."""
    ours, dense = unit["lanes"].get(OURS), unit["lanes"].get(f"{OURS} dense")
    derived = unit["derived"]
    derived["tile_efficiency"] = efficiency
    derived["target_tflops"] = dense["tflops"] * efficiency if dense and efficiency else None
    target = derived["target_tflops"]
    derived["of_target"] = ours["tflops"] / target if ours and target else None
    derived["of_dense"] = ours["tflops"] / dense["tflops"] if ours and dense else None


def add_document_cost(unit: dict[str, Any]) -> None:
    document, plain = unit["lanes"].get("one document"), unit["lanes"].get("plain")
    unit["derived"]["of_plain"] = document["tflops"] / plain["tflops"] if document and plain else None


def add_mask_figures(unit: dict[str, Any], own: str, whole: str) -> None:
    """of_peer: each of our lanes' rate over the fastest peer's on the same case; of_whole: over the whole mask's."""
    lanes = unit["lanes"]
    peers = {label: lane["tflops"] for label, lane in lanes.items() if is_own_case(lane, own) and not is_ours(lane)}
    best = max(peers, key=peers.__getitem__, default=None)
    unit["derived"] |= {"case": own, "whole": whole if whole in lanes else None, "best_peer": best}
    for lane in lanes.values():
        if is_own_case(lane, own) and is_ours(lane):
            lane["of_peer"] = lane["tflops"] / peers[best] if best else None
            lane["of_whole"] = lane["tflops"] / lanes[whole]["tflops"] if whole in lanes else None


def is_ours(lane: dict[str, Any]) -> bool:
    return lane["candidate"].startswith(OURS)


def is_own_case(lane: dict[str, Any], name: str) -> bool:
    return lane["case"]["name"] == name


def add_floors(units: list[dict], copy_gbs: float | None) -> None:
    """of_floor: the time in which q, k, v and the output cross the memory bus at a copy's speed, over a lane's time."""
    for unit in (unit for unit in units if unit["group"] == "masks"):
        for lane in unit["lanes"].values():
            gbs = lane["case"]["bytes"] / (lane["ms"]["median"] * 1e6)
            lane["of_floor"] = gbs / copy_gbs if copy_gbs else None


def add_option_costs(unit: dict[str, Any]) -> None:
    """slower: by how much more time a lane takes than the same candidate without the option; .05 is 5 % longer."""
    plain = {lane["candidate"]: lane for label, lane in unit["lanes"].items() if label == lane["candidate"]}
    for label, lane in unit["lanes"].items():
        base = plain.get(lane["candidate"])
        if base is not None and label != lane["candidate"]:
            lane["slower"] = lane["ms"]["median"] / base["ms"]["median"] - 1


def add_backward_figures(unit: dict[str, Any], own: str, whole: str) -> None:
    """of_peer and of_whole as for masks; slower: by how much more time than our first lane another of ours takes."""
    add_mask_figures(unit, own, whole)
    ours = [lane for lane in unit["lanes"].values() if is_own_case(lane, own) and is_ours(lane)]
    for lane in ours[1:]:
        lane["slower"] = lane["ms"]["median"] / ours[0]["ms"]["median"] - 1


def add_cache_figures(unit: dict[str, Any], lanes: Iterable[Lane], whole: str) -> None:
    """gbs: bytes that a lane has to move over its time; of_read: over the plain read's; of_base, time_of_base: rate and
    time over those of the lane called `whole`."""
    measured = unit["lanes"]
    for lane in lanes:
        if lane.label in measured:
            figures = measured[lane.label]
            figures["gbs"] = lane.case.bytes * lane.share / (figures["ms"]["median"] * 1e6)
    read, base = measured.get(PLAIN_READ), measured.get(whole)
    unit["derived"] |= {"case": unit["name"], "whole": whole if base else None}
    for figures in measured.values():
        figures["of_read"] = figures["gbs"] / read["gbs"] if read else None
        figures["of_base"] = figures["gbs"] / base["gbs"] if base else None
        figures["time_of_base"] = figures["ms"]["median"] / base["ms"]["median"] if base else None


def add_width_figures(unit: dict[str, Any], whole: str) -> None:
    """of_whole: our rate over that of the next wider kernel on head dims that fill it; of_padded: over that of the same
    call padded to the wider one."""
    lanes = unit["lanes"]
    ours = lanes.get(OURS)
    for key, label in (("of_whole", whole), ("of_padded", f"{OURS} padded")):
        unit["derived"][key] = ours["tflops"] / lanes[label]["tflops"] if ours and label in lanes else None


def add_host_ratio(unit: dict[str, Any]) -> None:
    ours, sdpa = unit["lanes"].get("flashmsa-eager"), unit["lanes"].get("sdpa")
    unit["derived"]["of_sdpa"] = ours["us"]["median"] / sdpa["us"]["median"] if ours and sdpa else None


def _ratios(units: list[dict], candidate: str, head_dim: int | None = None) -> dict[str, float]:
    return {
        unit["name"]: lane["ratio"]
        for unit in units
        if unit["group"] == "forward"
        for lane in unit["lanes"].values()
        if lane["candidate"] == candidate and lane["ratio"] and head_dim in (None, lane["case"]["head_dim"])
    }


def _forward_summary(units: list[dict]) -> dict[str, Any]:
    forward = [unit for unit in units if unit["group"] == "forward"]
    names = dict.fromkeys(lane["candidate"] for unit in forward for lane in unit["lanes"].values())
    dims = sorted({lane["case"]["head_dim"] for unit in forward for lane in unit["lanes"].values()})
    summary = {}
    for name in names:
        ratios = _ratios(units, name)
        if not ratios:
            continue
        worst = min(ratios, key=ratios.__getitem__)
        summary[name] = {
            "cases": len(ratios),
            "geometric_mean": geometric_mean(ratios.values()),
            "by_head_dim": {str(dim): geometric_mean(_ratios(units, name, dim).values()) for dim in dims},
            "minimum": ratios[worst],
            "minimum_case": worst,
        }
    return summary


def _derived_range(units: list[dict], group: str, key: str) -> dict[str, Any] | None:
    values = {u["name"]: u["derived"][key] for u in units if u["group"] == group and u["derived"].get(key)}
    if not values:
        return None
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    return {
        "geometric_mean": geometric_mean(values.values()),
        "minimum": values[low],
        "minimum_case": low,
        "maximum": values[high],
        "maximum_case": high,
    }


def _steady_summary(units: list[dict]) -> dict[str, Any] | None:
    """Geometric means over the fastest peer of each case, and over the one that needs the least energy."""
    known = [unit for unit in units if unit["group"] == "forward" and "steady" in unit["derived"]]
    rates = {unit["name"]: unit["derived"]["steady"]["of_peer"] for unit in known}
    rates = {name: ratio for name, ratio in rates.items() if ratio}
    if not rates:
        return None
    dim_of = {unit["name"]: unit["lanes"][OURS]["case"]["head_dim"] for unit in known}
    energies = {unit["name"]: unit["derived"]["steady"]["energy_of_peer"] for unit in known}
    energies = {name: ratio for name, ratio in energies.items() if ratio}
    worst, dearest = min(rates, key=rates.__getitem__), max(energies, key=energies.__getitem__, default=None)
    return {
        "cases": len(rates),
        "geometric_mean": geometric_mean(rates.values()),
        "by_head_dim": {
            str(dim): geometric_mean(rates[name] for name in rates if dim_of[name] == dim)
            for dim in sorted({dim_of[name] for name in rates})
        },
        "minimum": rates[worst],
        "minimum_case": worst,
        "energy": geometric_mean(energies.values()),
        "most_energy": energies.get(dearest),
        "most_energy_case": dearest,
    }


def _dispatch_summary(units: list[dict]) -> list[dict[str, Any]]:
    """For each short shape, how long ours takes beside the fastest SDPA backend (below 1: ours is faster)."""
    rows = []
    for unit in (unit for unit in units if unit["group"] == "small"):
        ours = unit["lanes"].get(OURS)
        others = {label: lane["ms"]["median"] for label, lane in unit["lanes"].items() if label != OURS}
        if not ours or not others:
            continue
        best = min(others, key=others.__getitem__)
        rows.append({"case": unit["name"], "best": best, "time_ratio": ours["ms"]["median"] / others[best]})
    return rows


def summarise(units: list[dict]) -> dict[str, Any]:
    """The figures that a change is judged by."""
    return {
        "forward": _forward_summary(units),
        "steady": _steady_summary(units),
        "documents_of_target": _derived_range(units, "documents", "of_target"),
        "dims_of_next_width": _derived_range(units, "dims", "of_whole"),
        "one_document_of_plain": _derived_range(units, "one-document", "of_plain"),
        "host_of_sdpa": _derived_range(units, "host", "of_sdpa"),
        "small": _dispatch_summary(units),
        "masks": {u["name"]: _mask_summary(u) for u in units if u["group"] == "masks"},
        "options": {
            u["name"]: {label: lane["slower"] for label, lane in u["lanes"].items() if "slower" in lane}
            for u in units
            if u["group"] == "options"
        },
        "backward": _backward_summary(units),
        "decode": {u["name"]: _cache_summary(u) for u in units if u["group"] == "decode"},
        "construction_us": {
            u["name"]: {label: lane["us"]["median"] for label, lane in u["lanes"].items()}
            for u in units
            if u["group"] == "construction"
        },
    }


def _backward_summary(units: list[dict]) -> dict[str, Any] | None:
    """Over the best peer, of dense and causal cases by head dim; d256 over d128; what else a unit is judged by."""
    units = [unit for unit in units if unit["group"] == "backward" and OURS in unit["lanes"]]
    if not units:
        return None
    grid = {unit["name"]: unit["lanes"][OURS] for unit in units if unit["derived"]["whole"] is None}
    of_peer = {name: lane["of_peer"] for name, lane in grid.items() if lane["of_peer"]}
    dims = sorted({lane["case"]["head_dim"] for lane in grid.values()})
    rates = {dim: {_shape_of(x): x["tflops"] for x in grid.values() if x["case"]["head_dim"] == dim} for dim in dims}
    wide = [rate / rates[128][shape] for shape, rate in rates.get(256, {}).items() if shape in rates.get(128, {})]
    slower = [lane["slower"] for u in units for label, lane in u["lanes"].items() if label.endswith("deterministic")]
    worst = min(of_peer, key=of_peer.__getitem__, default=None)
    return {
        "of_peer": {
            str(dim): geometric_mean(of_peer[name] for name in of_peer if grid[name]["case"]["head_dim"] == dim)
            for dim in dims
        },
        "minimum": of_peer.get(worst),
        "minimum_case": worst,
        "d256_of_d128": geometric_mean(wide),
        "deterministic_slower": max(slower, default=None),
        "others": {
            u["name"]: {key: u["lanes"][OURS].get(key) for key in ("of_peer", "of_whole", "slower")}
            for u in units
            if u["derived"]["whole"] is not None
        },
    }


def _shape_of(lane: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(lane["case"][key] for key in ("batch", "length", "mask"))


def _cache_summary(unit: dict[str, Any]) -> dict[str, Any]:
    figures = ("gbs", "of_read", "of_base", "time_of_base")
    return {
        label: {"us": lane["ms"]["median"] * 1e3, **{key: lane[key] for key in figures}}
        for label, lane in unit["lanes"].items()
    }


def _mask_summary(unit: dict[str, Any]) -> dict[str, Any]:
    figures = ("tflops", "of_whole", "of_peer", "of_floor")
    own = {label: lane for label, lane in unit["lanes"].items() if "of_peer" in lane}
    return {
        "best_peer": unit["derived"]["best_peer"],
        "lanes": {label: {key: lane.get(key) for key in figures} for label, lane in own.items()},
    }


# JSON


def check_results(data: dict[str, Any]) -> None:
    """Raises ValueError where a result file lacks what the tables and the plot read."""
    missing = [key for key in RESULT_KEYS if key not in data]
    if missing:
        raise ValueError(f"results: {', '.join(missing)} missing; schema {SCHEMA} has {', '.join(RESULT_KEYS)}")
    if data["schema"] != SCHEMA:
        raise ValueError(f"results: schema {data['schema']} is not {SCHEMA}")
    for unit in data["units"]:
        absent = [key for key in UNIT_KEYS if key not in unit]
        if absent:
            raise ValueError(f"results: unit {unit.get('name')} lacks {', '.join(absent)}")
        for label, lane in unit["lanes"].items():
            wanted = ("us",) if unit["group"] in ("host", "construction") else ("ms", "tflops", "flops")
            gone = [key for key in ("candidate", "case", *wanted) if key not in lane]
            if gone:
                raise ValueError(f"results: {unit['name']}, {label}: {', '.join(gone)} missing")


def write_json(data: dict[str, Any], path: Path) -> None:
    check_results(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    data = json.loads(path.read_text())
    check_results(data)
    return data


# Tables


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns as wide as they need, the first aligned left, the others right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def number(value: float | None, pattern: str = ".0f") -> str:
    return "-" if value is None else format(value, pattern)


def _labels(units: list[dict]) -> list[str]:
    return list(dict.fromkeys(label for unit in units for label in unit["lanes"]))


def _rate(lane: dict | None) -> str:
    """Rate and half the p10-p90 range in percent."""
    if lane is None:
        return "-"
    half = 50 * (lane["tflops_p90"] - lane["tflops_p10"]) / lane["tflops"]
    return f"{lane['tflops']:.0f} ±{half:.0f}%"


def _rate_table(units: list[dict], first: str = OURS) -> str:
    labels = _labels(units)
    header = ["case", *labels, "util", "of matmul", "MHz", "ratio"]
    rows = []
    for unit in units:
        lead = unit["lanes"].get(first, {})
        figures = [number(lead.get("utilisation"), ".3f"), number(lead.get("of_matmul"), ".2f")]
        figures += [number(lead.get("sm_mhz")), number(lead.get("ratio"), ".3f")]
        rows.append([unit["name"], *(_rate(unit["lanes"].get(label)) for label in labels), *figures])
    return table(header, rows)


def _width_table(units: list[dict]) -> str:
    labels = _labels(units)
    rows = []
    for unit in units:
        lead, derived = unit["lanes"].get(OURS, {}), unit["derived"]
        figures = [number(lead.get("utilisation"), ".3f"), number(derived["of_whole"], ".3f")]
        figures += [number(derived["of_padded"], ".3f"), number(lead.get("ratio"), ".3f")]
        rows.append([unit["name"], *(_rate(unit["lanes"].get(label)) for label in labels), *figures])
    return table(["case", *labels, "util", "of next width", "of padded", "ratio"], rows)


def _documents_table(units: list[dict]) -> str:
    labels = _labels(units)
    header = ["case", *labels, "tile eff.", "target", "of target", "of dense"]
    rows = []
    for unit in units:
        derived = unit["derived"]
        figures = [number(derived["tile_efficiency"], ".3f"), number(derived["target_tflops"])]
        figures += [number(derived["of_target"], ".3f"), number(derived["of_dense"], ".3f")]
        rows.append([unit["name"], *(_rate(unit["lanes"].get(label)) for label in labels), *figures])
    return table(header, rows)


def _one_document_table(units: list[dict]) -> str:
    rows = [
        [
            u["name"],
            *(_rate(u["lanes"].get(label)) for label in ("one document", "plain")),
            number(u["derived"]["of_plain"], ".3f"),
        ]
        for u in units
    ]
    return table(["case", "one document", "plain", "ratio"], rows)


def _host_table(units: list[dict]) -> str:
    labels = _labels(units)
    rows = []
    for unit in units:
        times = [unit["lanes"].get(label) for label in labels]
        cells = ["-" if t is None else f"{t['us']['median']:.1f} ({t['us']['p90']:.1f})" for t in times]
        derived = unit["derived"]
        rows.append([unit["name"], *cells, number(derived["of_sdpa"], ".2f"), derived["sdpa_backend"] or "-"])
    return table(["case", *labels, "of sdpa", "sdpa runs"], rows)


def _time_table(units: list[dict], pattern: str, factor: float) -> str:
    labels = _labels(units)
    rows = [
        [
            u["name"],
            *(number(u["lanes"][k]["ms"]["median"] * factor if k in u["lanes"] else None, pattern) for k in labels),
        ]
        for u in units
    ]
    return table(["case", *labels], rows)


MASK_PEERS = ("fa4", "flash", "flex", "flex-fa4")


def _mask_table(units: list[dict]) -> str:
    """A row for each of our lanes on a unit's own case."""
    peers = [name for name in MASK_PEERS if any(name in unit["lanes"] for unit in units)]
    header = ["case", "lane", "TFLOP/s", "us", "util", *peers, "of peer", "whole", "of whole", "tile eff.", "of floor"]
    rows = []
    for unit in units:
        lanes, derived = unit["lanes"], unit["derived"]
        whole = lanes.get(derived["whole"], {})
        rates = [number(lanes.get(name, {}).get("tflops"), ".1f") for name in peers]
        for label, lane in lanes.items():
            if not (is_ours(lane) and is_own_case(lane, derived["case"])):
                continue
            figures = [
                label,
                _rate(lane),
                number(lane["ms"]["median"] * 1e3, ".1f"),
                number(lane["utilisation"], ".3f"),
            ]
            figures += [*rates, number(lane["of_peer"], ".2f"), number(whole.get("tflops"))]
            figures += [number(lane["of_whole"], ".3f"), number(derived["tile_efficiency"], ".3f")]
            rows.append([unit["name"], *figures, number(lane.get("of_floor"), ".2f")])
    return table(header, rows)


def _option_table(units: list[dict]) -> str:
    rows = []
    for unit in units:
        for label, lane in unit["lanes"].items():
            slower = "-" if "slower" not in lane else f"{100 * lane['slower']:+.1f}%"
            rows.append([f"{unit['name']}  {label}", _rate(lane), number(lane["ms"]["median"], ".4f"), slower])
    return table(["case and candidate", "TFLOP/s", "ms", "slower"], rows)


def _backward_table(units: list[dict]) -> str:
    """A row for each of our lanes on a unit's own case."""
    peers = list(dict.fromkeys(x for u in units for x, lane in u["lanes"].items() if not is_ours(lane)))
    header = ["case", "lane", "TFLOP/s", "ms", "util", *peers, "of peer", "whole", "of whole", "slower"]
    rows = []
    for unit in units:
        lanes, derived = unit["lanes"], unit["derived"]
        whole = lanes.get(derived["whole"], {})
        rates = [number(lanes.get(name, {}).get("tflops")) for name in peers]
        for label, lane in lanes.items():
            if not (is_ours(lane) and is_own_case(lane, derived["case"])):
                continue
            slower = "-" if "slower" not in lane else f"{100 * lane['slower']:+.1f}%"
            figures = [label, _rate(lane), number(lane["ms"]["median"], ".3f"), number(lane["utilisation"], ".3f")]
            figures += [*rates, number(lane["of_peer"], ".2f"), number(whole.get("tflops"))]
            rows.append([unit["name"], *figures, number(lane["of_whole"], ".3f"), slower])
    return table(header, rows)


def _cache_table(units: list[dict]) -> str:
    rows = []
    for unit in units:
        for label, lane in unit["lanes"].items():
            ms, tflops = lane["ms"], number(lane["tflops"]) if lane["tflops"] > 100 else "-"
            half = 50 * (ms["p90"] - ms["p10"]) / ms["median"]
            figures = [f"{ms['median'] * 1e3:.1f} ±{half:.0f}%", number(lane["gbs"]), tflops]
            figures += [number(lane["of_read"], ".3f"), number(lane["of_base"], ".3f")]
            base = unit["derived"]["whole"] or "-"
            rows.append([f"{unit['name']}  {label}", *figures, number(lane["time_of_base"], ".3f"), base])
    return table(["case and candidate", "us", "GB/s", "TFLOP/s", "of read", "of base", "time of base", "base"], rows)


def _construction_table(units: list[dict]) -> str:
    labels = _labels(units)
    rows = []
    for unit in units:
        times = [unit["lanes"].get(label) for label in labels]
        rows.append(
            [unit["name"], *("-" if t is None else f"{t['us']['median']:.1f} ({t['us']['p90']:.1f})" for t in times)]
        )
    return table(["mask", *labels], rows)


def _steady_table(units: list[dict]) -> str:
    rows = []
    for unit in units:
        beside = unit["derived"].get("steady", {})
        for label, lane in unit["lanes"].items():
            figures = lane.get("steady")
            if figures is None:
                continue
            cells = [number(figures["tflops"]), number(figures["utilisation"], ".3f"), number(figures["sm_mhz"])]
            cells += [number(figures["watts"]), number(figures["joules_per_tflop"], ".3f"), str(figures["launches"])]
            ratios = [beside.get(key) if label == OURS else None for key in ("of_peer", "energy_of_peer")]
            rows.append([f"{unit['name']}  {label}", *cells, *(number(ratio, ".3f") for ratio in ratios)])
    heads = ["TFLOP/s", "util", "MHz", "W", "J/TFLOP", "launches", "of peer", "J of peer"]
    return table(["case and candidate", *heads], rows)


_TABLES: dict[str, tuple[str, Callable[[list[dict]], str]]] = {
    "forward": ("forward: TFLOP/s, L2 flushed, median; util, of matmul, MHz and ratio to cuDNN are ours", _rate_table),
    "documents": ("documents: TFLOP/s over allowed pairs; target = our dense rate * tile efficiency", _documents_table),
    "one-document": ("one document over everything, against no document mask: TFLOP/s", _one_document_table),
    "masks": (
        "masks: TFLOP/s over allowed pairs; of peer: over the fastest; whole: what ours reaches where no tile is cut; "
        "of floor: memory floor / time",
        _mask_table,
    ),
    "options": ("options: time beside the same call without", _option_table),
    "backward": (
        "backward: TFLOP/s over allowed pairs, of 2.5 times the forward pass's operations (both passes: 3.5 times); "
        "of peer: over the fastest; slower: than our first lane",
        _backward_table,
    ),
    "decode": ("caches: bytes of K and V once over the time; base: the lane that others are measured by", _cache_table),
    "construction": (
        "making a mask: microseconds, median (p90); made: events around the Python call on an idle device",
        _construction_table,
    ),
    "small": ("short sequences: microseconds a launch inside a graph", lambda units: _time_table(units, ".2f", 1e3)),
    "host": ("host time of an eager call: microseconds, median (p90)", _host_table),
    "dtype": ("fp16 beside bf16: TFLOP/s; figures at the end are our bf16's", lambda u: _rate_table(u, f"{OURS} bf16")),
    "dims": (
        "head dims between the widths of most kernels: TFLOP/s over useful operations; next width: the wider kernel on "
        "head dims that fill it",
        _width_table,
    ),
    "table": ("length 8192, head_dim 128, 32 heads: milliseconds", lambda units: _time_table(units, ".3f", 1.0)),
}


def _summary_lines(data: dict[str, Any]) -> list[str]:
    summary, lines = data["summary"], []
    for name, figures in summary["forward"].items():
        if name == BASELINE:
            continue
        dims = ", ".join(f"d{dim} {number(mean, '.3f')}" for dim, mean in figures["by_head_dim"].items())
        lines.append(
            f"forward {name} / {BASELINE}: geometric mean {figures['geometric_mean']:.3f} ({dims}) over "
            f"{figures['cases']} cases, minimum {figures['minimum']:.3f} at {figures['minimum_case']}"
        )
    if (steady := summary.get("steady")) is not None:
        dims = ", ".join(f"d{dim} {number(mean, '.3f')}" for dim, mean in steady["by_head_dim"].items())
        lines.append(
            f"steady state / best peer: geometric mean {steady['geometric_mean']:.3f} ({dims}) over "
            f"{steady['cases']} cases, minimum {steady['minimum']:.3f} at {steady['minimum_case']}; energy over the "
            f"least of a peer's: {number(steady['energy'], '.3f')}, at most {number(steady['most_energy'], '.3f')} at "
            f"{steady['most_energy_case']}"
        )
    ranges = {
        "documents_of_target": "documents, share of target",
        "one_document_of_plain": "one document / plain",
        "dims_of_next_width": "head dims between / next width, per useful operation",
        "host_of_sdpa": "host time / SDPA's",
    }
    for key, text in ranges.items():
        if (found := summary[key]) is not None:
            lines.append(
                f"{text}: {found['geometric_mean']:.3f}, from {found['minimum']:.3f} ({found['minimum_case']}) "
                f"to {found['maximum']:.3f} ({found['maximum_case']})"
            )
    if summary.get("backward"):
        lines += _backward_lines(summary["backward"])
    slower = [
        f"{row['case']} ({row['best']} {row['time_ratio']:.2f})" for row in summary["small"] if row["time_ratio"] > 1
    ]
    lines += [f"short, SDPA faster (time ratio): {', '.join(slower) or 'nowhere'}"] if summary["small"] else []
    return lines


def _backward_lines(summary: dict[str, Any]) -> list[str]:
    dims = ", ".join(f"d{dim} {number(mean, '.3f')}" for dim, mean in summary["of_peer"].items())
    slower = summary["deterministic_slower"]
    return [
        f"backward / best peer: geometric means {dims}; minimum {number(summary['minimum'], '.3f')} at "
        f"{summary['minimum_case']}; d256 / d128 {number(summary['d256_of_d128'], '.3f')}; deterministic at most "
        f"{'-' if slower is None else format(100 * slower, '.1f')} % slower"
    ]


def _skipped_lines(units: list[dict]) -> list[str]:
    reasons: dict[tuple[str, str], int] = {}
    for unit in units:
        for label, reason in unit["skipped"].items():
            reasons[label, reason] = reasons.get((label, reason), 0) + 1
    return [f"left out: {label} in {count} units: {reason}" for (label, reason), count in reasons.items()]


def text(data: dict[str, Any]) -> str:
    """All tables, the summary last."""
    parts = []
    for group, (title, render) in _TABLES.items():
        units = [unit for unit in data["units"] if unit["group"] == group]
        if units:
            parts.append(f"{title}\n{render(units)}")
    steady_units = [u for u in data["units"] if any("steady" in lane for lane in u["lanes"].values())]
    if steady_units:
        title = (
            "steady state: seconds of launches in alternating slices; of peer: over the fastest, energy over the least"
        )
        parts.append(f"{title}\n{_steady_table(steady_units)}")
    ceiling = data["ceiling"]
    machine = data["environment"]
    last = [
        f"{machine['gpu']}, torch {machine['torch']}, cuDNN {machine['cudnn']}, commit {str(machine['commit'])[:12]}"
    ]
    if ceiling["tflops"]:
        last.append(f"bf16 matmul {ceiling['size']}: {ceiling['tflops']:.0f} TFLOP/s ({ceiling['note']})")
    if ceiling.get("copy_gbs"):
        last.append(f"copy: {ceiling['copy_gbs']:.0f} GB/s, read and written")
    last += _skipped_lines(data["units"]) + _summary_lines(data)
    if data["dry_run"]:
        last.append("dry run on the CPU: these figures say nothing about any kernel")
    return "\n\n".join([*parts, "\n".join(last)])
