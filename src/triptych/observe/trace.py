"""A request's timeline drawn for a terminal: one bar a span, all on one scale. Called by `triptych demo`."""

from __future__ import annotations

from triptych.types import Span, Timing

MIN_BAR = 10


def draw(timing: Timing, width: int = 100) -> str:
    """Lines of at most `width` characters where that leaves room for a bar. The scale ends with the last span drawn."""
    groups = [
        ("critical path", timing.critical_path),
        ("items", timing.items),
        ("after the first token", timing.after_first_token),
    ]
    spans = [span for _, group in groups for span in group]
    scale_s = max([timing.ttft_s, *(span.start_s + span.duration_s for span in spans)])
    names = max([len(span.name) for span in spans], default=0)
    details = max([len(span.detail) for span in spans], default=0)
    bar = max(MIN_BAR, width - names - details - len("  ||  +12345.6 ms 12345.6 ms  "))
    lines = [
        f"first token after {_ms(timing.ttft_s)}, all after {_ms(timing.e2e_s)}; |{'-' * 5}| = {_ms(scale_s * 5 / bar)}"
    ]
    for title, group in groups:
        if group:
            lines.append(title)
            lines += [_line(span, scale_s, bar, names) for span in group]
    return "\n".join(line.rstrip() for line in lines)


def _line(span: Span, scale_s: float, bar: int, names: int) -> str:
    times = f"+{_ms(span.start_s):>10} {_ms(span.duration_s):>10}"
    return f"  {span.name:<{names}} |{_bar(span, scale_s, bar)}| {times}  {span.detail}"


def _bar(span: Span, scale_s: float, width: int) -> str:
    if scale_s <= 0:
        return " " * width
    first = min(int(span.start_s / scale_s * width), width - 1)
    length = max(1, min(round(span.duration_s / scale_s * width), width - first))
    return " " * first + "█" * length + " " * (width - first - length)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
