"""The table of a run: medians over rounds, and each against the baseline's. From the results alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from triptych.bench.ceilings import summarize
from triptych.bench.metrics import Distribution, Summary, median
from triptych.bench.results import Cell, Results

Row = list[str]


@dataclass(frozen=True)
class Column:
    """One measure of the table."""

    title: str
    of: Callable[[Summary], float | None]
    digits: int = 3
    compared: bool = True  # whether a ratio to the baseline means anything


def _p(spread: Distribution | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


COLUMNS = (
    Column("TTFT p50", lambda s: _p(s.ttft_s, "p50")),
    Column("TTFT p90", lambda s: _p(s.ttft_s, "p90")),
    Column("TPOT p50", lambda s: _p(s.tpot_s, "p50"), 4),
    Column("ITL p99", lambda s: _p(s.itl_s, "p99"), 4),
    Column("E2E p50", lambda s: _p(s.e2e_s, "p50")),
    Column("E2E p90", lambda s: _p(s.e2e_s, "p90")),
    Column("out tok/s/dev", lambda s: s.output_tokens_per_s_per_device, 2),
    Column("tok/s/dev", lambda s: s.tokens_per_s_per_device, 1),
    Column("img/s/dev", lambda s: s.images_per_s_per_device or None, 2),
    Column("CPU s/req", lambda s: s.cpu_s_per_request),
    Column("busy cores", lambda s: s.cores_busy, 2),
    Column("goodput/s", lambda s: s.goodput_per_s),
    Column("tok/chunk", lambda s: s.tokens_per_chunk, 2, compared=False),
)


def value(cells: Sequence[Cell], column: Column) -> float | None:
    """Median over the rounds in which it is defined."""
    found = [amount for cell in cells if (amount := column.of(cell.summary)) is not None]
    return median(found) if found else None


def groups(results: Results) -> Iterator[tuple[str, str, dict[str, list[Cell]]]]:
    """Workload, load, and the cells of each system in the order of the spec."""
    keys = dict.fromkeys((cell.workload, cell.load.label) for cell in results.cells)
    for workload, load in keys:
        here = [cell for cell in results.cells if (cell.workload, cell.load.label) == (workload, load)]
        names = [system.name for system in results.spec.systems]
        by_system = {name: [cell for cell in here if cell.system == name] for name in names}
        yield workload, load, {name: cells for name, cells in by_system.items() if cells}


def _kinds(cells: Sequence[Cell]) -> list[str]:
    kinds = sorted({kind for cell in cells for kind in cell.summary.ttft_s_by_kind})
    return kinds if len(kinds) > 1 else []


def rows(results: Results) -> list[Row]:
    """A header and a row a system, load and workload; seconds where no unit is named."""
    table = [["workload", "load", "system", "ok/fail", *(column.title for column in COLUMNS)]]
    for workload, load, by_system in groups(results):
        base = by_system.get(results.spec.baseline, [])
        for name, cells in by_system.items():
            done, failed = (sum(getattr(c.summary, f) for c in cells) for f in ("num_completed", "num_failed"))
            row = [workload, load, name, f"{done}/{failed}"]
            table.append(
                row + [_cell(value(cells, c), value(base, c), c, name != results.spec.baseline) for c in COLUMNS]
            )
    return table


def kind_rows(results: Results) -> list[Row]:
    """TTFT and E2E by kind of request, where a workload mixes kinds."""
    table = [["workload", "load", "system", "kind", "TTFT p50", "TTFT p90", "E2E p50", "E2E p90"]]
    for workload, load, by_system in groups(results):
        for kind in _kinds([cell for cells in by_system.values() for cell in cells]):
            columns = [
                Column(f"{field} {name}", lambda s, f=field, n=name, k=kind: _p(getattr(s, f).get(k), n))  # type: ignore[misc]
                for field in ("ttft_s_by_kind", "e2e_s_by_kind")
                for name in ("p50", "p90")
            ]
            base = by_system.get(results.spec.baseline, [])
            for name, cells in by_system.items():
                compared = name != results.spec.baseline
                row = [workload, load, name, kind]
                table.append(row + [_cell(value(cells, c), value(base, c), c, compared) for c in columns])
    return table


def _cell(found: float | None, base: float | None, column: Column, compared: bool) -> str:
    if found is None:
        return "-"
    text = f"{found:.{column.digits}f}"
    return f"{text} ({found / base:.2f}x)" if compared and column.compared and base else text


def laid_out(table: Sequence[Row], markdown: bool = False) -> str:
    widths = [max(len(row[k]) for row in table) for k in range(len(table[0]))]
    if markdown:
        lines = ["| " + " | ".join(row) + " |" for row in table]
        return "\n".join([lines[0], "|" + "---|" * len(widths), *lines[1:]])
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in table
    )


def report(results: Results, markdown: bool = False) -> str:
    """All of it as text."""
    spec, machine = results.spec, results.machine
    num_rounds = len({cell.round for cell in results.cells})
    state = "complete" if results.complete else "CUT SHORT"
    cores = {system.name: len(system.device_cores) for system in spec.systems}
    lines = [
        f"{machine.started}  triptych {machine.triptych} {machine.commit[:12] + '+' * machine.commit.endswith('+')}",
        f"{machine.cpu}, {machine.num_cores} cores, load average {machine.load_average[0]:.2f} at the start",
        f"{num_rounds} rounds ({state}), medians over rounds; times in seconds; (ratio) against {spec.baseline}",
        "devices: " + ", ".join(f"{name} {num}" for name, num in cores.items()),
    ]
    if (found := summarize(results.ceilings)) is not None:
        parts = (
            ("bf16 GFLOP/s", found.bf16_gflops),
            ("fp32 GFLOP/s", found.fp32_gflops),
            ("read GB/s", found.read_gb_per_s),
        )
        lines.append("a core at most, median (best): " + ", ".join(f"{n} {m:.1f} ({b:.1f})" for n, (m, b) in parts))
    lines += ["", laid_out(rows(results), markdown)]
    if len(kinds := kind_rows(results)) > 1:
        lines += ["", laid_out(kinds, markdown)]
    return "\n".join([*lines, "", laid_out(system_rows(results), markdown)])


def system_rows(results: Results) -> list[Row]:
    """Start-up, idle CPU, memory."""
    table = [["system", "ready s", "first answer s", "idle cores", "processes", "peak RSS GiB", "version"]]
    for name in dict.fromkeys(facts.name for facts in results.systems):
        facts = [found for found in results.systems if found.name == name]
        idle = [found for found in results.idle if found.system == name]
        cells = [cell for cell in results.cells if cell.system == name]
        peaks = [cell.peak_rss_bytes for cell in cells if cell.peak_rss_bytes is not None]
        counts = [cell.num_processes for cell in cells if cell.num_processes is not None]
        table.append(
            [
                name,
                _median([found.ready_s for found in facts if found.ready_s is not None], 1),
                _median([found.first_answer_s for found in facts if found.first_answer_s is not None], 1),
                _median([found.cores_busy for found in idle], 4),
                str(max(counts)) if counts else "-",
                f"{max(peaks) / 2**30:.2f}" if peaks else "-",
                facts[-1].version.splitlines()[0] if facts[-1].version else "-",
            ]
        )
    return table


def _median(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f}" if values else "-"
