"""What the system tells of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from t3c.measure.processor import cache_bytes


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [(["48K", "1024K", "32768K"], 32 << 20), (["32M", "2M"], 32 << 20), (["odd", ""], 0), ([], 0)],
)
def test_the_largest_cache(tmp_path: Path, sizes: list[str], wanted: int) -> None:
    for index, size in enumerate(sizes):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        (folder / "size").write_text(f"{size}\n")
    assert cache_bytes(tmp_path) == wanted
