"""Latency against throughput, one line a system, one panel a workload, as a PNG. Needs the `bench` extra."""

from __future__ import annotations

from pathlib import Path

from triptych.bench.report import Column, groups, value
from triptych.bench.results import Results
from triptych.errors import ConfigError

_THROUGHPUT = Column("tokens/s per device", lambda s: s.tokens_per_s_per_device)
_LATENCY = (
    Column("TTFT p90 (s)", lambda s: s.ttft_s.p90 if s.ttft_s else None),
    Column("E2E p90 (s)", lambda s: s.e2e_s.p90 if s.e2e_s else None),
)


def plot(results: Results, file: Path) -> None:
    """Medians over rounds; each point is one load. Raises ConfigError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib: pip install 'triptych[bench]'") from None
    workloads = list(dict.fromkeys(cell.workload for cell in results.cells))
    if not workloads:
        raise ConfigError("plot: the result has no rounds")
    figure = Figure(figsize=(6 * len(_LATENCY), 4 * len(workloads)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(workloads), len(_LATENCY), squeeze=False)
    for row, workload in zip(panels, workloads, strict=True):
        for panel, latency in zip(row, _LATENCY, strict=True):
            for system in results.spec.systems:
                points = []
                for found, load, by_system in groups(results):
                    cells = by_system.get(system.name, [])
                    x, y = value(cells, _THROUGHPUT), value(cells, latency)
                    if found == workload and x is not None and y is not None:
                        points.append((x, y, load))
                if points:
                    panel.plot([p[0] for p in points], [p[1] for p in points], marker="o", label=system.name)
                    for x, y, load in points:
                        panel.annotate(load, (x, y), textcoords="offset points", xytext=(4, 4), fontsize=7)
            panel.set(title=workload, xlabel=_THROUGHPUT.title, ylabel=latency.title)
            panel.margins(0.15)
            panel.set_ylim(0, panel.get_ylim()[1])
            panel.grid(alpha=0.3)
            if panel.lines:
                panel.legend(fontsize=8)
    figure.savefig(file, dpi=120)
