"""Numbers as a person reads them."""

from __future__ import annotations

NOTHING = "-"


def bytes_text(count: int | None) -> str:
    """1536 -> "1.50 KiB"; None -> "-"."""
    if count is None:
        return NOTHING
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def count_text(count: float) -> str:
    """8030261248 -> "8.03 B"."""
    value = float(count)
    for unit in ("", " K", " M", " B"):
        if abs(value) < 1000:
            return f"{value:.0f}" if unit == "" else f"{value:.2f}{unit}"
        value /= 1000
    return f"{value:.2f} T"


def flops_text(flops_per_s: float | None) -> str:
    """9.89e14 -> "989.0 TFLOP/s"; None -> "-"."""
    if flops_per_s is None:
        return NOTHING
    return f"{flops_per_s / 1e12:.1f} TFLOP/s" if flops_per_s >= 1e12 else f"{flops_per_s / 1e9:.1f} GFLOP/s"


def rate_text(bytes_per_s: float | None) -> str:
    """5.52e10 -> "55.2 GB/s"."""
    return NOTHING if bytes_per_s is None else f"{bytes_per_s / 1e9:.1f} GB/s"


def milliseconds_text(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:.1f} ms"


def percent_text(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.1%}"


def change_text(share: float | None) -> str:
    """0.123 -> "+12.3%"."""
    return NOTHING if share is None else f"{share:+.1%}"


def duration_text(seconds: float) -> str:
    """3725.4 -> "1:02:05"."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"
