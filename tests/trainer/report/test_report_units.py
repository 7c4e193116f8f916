from __future__ import annotations

import pytest

from trainer.report import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (896 << 20, "896.00 MiB"),
        (1 << 30, "1.00 GiB"),
        (3 << 40, "3.00 TiB"),
    ],
)
def test_bytes(count: int | None, text: str) -> None:
    assert units.bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (124_439_808, "124.44 M"), (8_030_261_248, "8.03 B"), (2e12, "2.00 T")]
)
def test_counts(count: float, text: str) -> None:
    assert units.count_text(count) == text


def test_other_units() -> None:
    assert units.flops_text(989.4e12) == "989.4 TFLOP/s"
    assert units.flops_text(50.44e9) == "50.4 GFLOP/s"
    assert units.flops_text(None) == "-"
    assert units.milliseconds_text(0.12345) == "123.5 ms"
    assert units.percent_text(0.4567) == "45.7%"
    assert units.duration_text(3725.4) == "1:02:05"
