from __future__ import annotations

from dataclasses import replace

from trainer.report.observer import RankUse
from trainer.run.ranks import pack, unpack

RANK = RankUse(3, 1, 0.1, 0.2, 0.05, 0.003, 6, 60 << 30, 70 << 30, 80 << 30, 3 << 30, 4 << 30, (5 << 40) + 1)


def test_a_row_survives_the_exchange_to_the_byte() -> None:
    on_a_cpu = replace(RANK, peak_allocated_bytes=None, peak_reserved_bytes=None, device_bytes=None)
    for row in (RANK, on_a_cpu):
        back = unpack(pack(row))
        assert back == row
        assert [type(value) for value in vars(back).values()] == [type(value) for value in vars(row).values()]
