from __future__ import annotations

from pathlib import Path

import pytest

from t3c.device.journal import Journal
from t3c.errors import ArtifactError

ABOUT = {"content": "abc", "config": {"rounds": 3, "pair": (1, 2)}}


def test_what_was_put_is_there_again(tmp_path: Path) -> None:
    path = tmp_path / "devices" / "x.journal"
    first = Journal(path, ABOUT)
    assert first.resumed == 0
    first.put("a", {"ms": (1.5, 2.5)})
    first.put("b", [1])
    again = Journal(path, ABOUT)
    assert (again.resumed, again.results.get("a"), again.results.get("b")) == (
        2,
        {"ms": [1.5, 2.5]},
        [1],
    )
    again.put("c", 3)
    assert Journal(path, ABOUT).resumed == 3
    again.finish()
    assert not path.exists()


def test_another_calibration_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    Journal(path, ABOUT).put("a", 1)
    assert Journal(path, {**ABOUT, "content": "other"}).resumed == 0
    assert Journal(path, ABOUT).resumed == 0  # the other one took its place


@pytest.mark.parametrize("cut", [1, 3, 8])
def test_a_line_that_was_cut_off_is_measured_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.journal"
    journal = Journal(path, ABOUT)
    journal.put("a", [1.0] * 3)
    whole = path.stat().st_size
    journal.put("b", [2.0] * 3)
    path.write_bytes(path.read_bytes()[: whole + cut])
    again = Journal(path, ABOUT)
    assert (again.results.get("a"), again.results.get("b")) == ([1.0] * 3, None)
    again.put("b", [4.0])
    assert Journal(path, ABOUT).results.get("b") == [4.0]


@pytest.mark.parametrize("raw", [b"", b"\x00\xff", b"[]\n", b"{}\n[1,2]\n", b'"x"\n{"a":1}\n'])
def test_what_is_no_journal_counts_for_nothing(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "x.journal"
    path.write_bytes(raw)
    assert Journal(path, ABOUT).resumed == 0


def test_a_journal_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="cannot be written"):
        Journal(tmp_path / "file" / "x.journal", ABOUT)


def test_without_a_path_nothing_is_written() -> None:
    journal = Journal(None, ABOUT)
    journal.put("a", (1, 2))
    assert journal.results.get("a") == [1, 2]
    journal.finish()


def test_what_is_of_another_kind_is_measured_again() -> None:
    journal = Journal(None, ABOUT)
    journal.put("times", {"a": [[1.0, 2.0]]})
    assert journal.read("times", dict[str, list[list[float]]]) == {"a": [[1.0, 2.0]]}
    assert journal.read("none", float) is None
    journal.put("times", {"a": "soon"})
    assert journal.read("times", dict[str, list[list[float]]]) is None
