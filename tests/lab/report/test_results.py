from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lab.report.results import (
    MISSING,
    SECTIONS,
    UNMEASURED,
    headline,
    number,
    pareto_front,
    results_table,
    results_text,
)

ROOT = Path(__file__).parents[3]
PROFILES = ("tiny", "small", "med", "large", "max")


def row(name: str, drop: float, p50: float, size: float, **more: Any) -> dict[str, Any]:
    """A method that loses `drop` of 0.9, give or take 0.002; ptq8 takes 10 ms and 8 MB."""
    return {
        "name": name, "method": f"{name} made", "accuracy": 0.9 - drop, "samples": 10_000,
        "drop": drop, "drop_low": drop - 0.002, "drop_high": drop + 0.002, "p50": p50,
        "p90": 1.25 * p50, "to_ptq8": p50 / 10, "to_ptq8_p90": p50 / 10, "size_mb": size,
        "size_to_ptq8": size / 8, "epsilon": None, "drift": 0.1, "minutes": 0, "steps": 0,
    } | more  # fmt: skip


RESULTS = [
    row("full", 0.0, 30.0, 32.0, drift=0.0),
    row("ptq8", 0.001, 10.0, 8.0),
    row("ptq4", 0.5, 9.9, 1.0),
    row("lrft", 0.02, 3.0, 2.0, minutes=20, steps=3000),
    row("t3c-tiny", 0.03, 4.0, 3.0, epsilon=0.5),
    row("t3c-med", 0.0049, 7.0, 5.0, epsilon=0.2),
    row("t3c-max", 0.0, 9.5, 7.5, epsilon=None),
]
TABLES: dict[str, list[dict[str, Any]]] = {
    "results": RESULTS,
    "sweep": [
        RESULTS[4] | {"budget": "4 ms", "profile": "tiny"},
        RESULTS[5] | {"budget": "5.5 MB", "profile": "med"},
    ],
    "violations": [
        {"profile": "med", "budget_ms": 8.0, "runs": 200, "over": 3, "mape": 0.031},
        {"profile": "max", "budget_ms": 9.0, "runs": 200, "over": 0, "mape": None},
    ],
    "audit": [
        {"method": "t3c", "checked": 2000, "accuracy_violations": 0, "latency_violations": 1,
         "budget_violations": 0.25},
    ],
    "seeds": [
        {"name": "t3c-med", "seeds": 3, "accuracy": 0.89, "accuracy_sem": 0.0005, "p50": 7.0,
         "p50_sem": None, "tail_gap": 0.4},
    ],
    "certificates": [
        {"name": "med", "epsilon": 0.2, "coverage": 0.953, "coverage_low": 0.94,
         "coverage_high": 0.96, "mean_drift": 0.1, "p95_drift": 0.19, "first_order": 0.11,
         "spectral": float("nan"), "pearson": 0.98, "spearman": 1.0},
    ],
    "ablations": [
        {"variant": "joint", "detail": "both", "accuracy": 0.895, "drop": 0.005, "p50": 7.0,
         "to_ptq8": None, "size_mb": 5.0, "violations": 0, "epsilon": None},
        {"variant": "rank-only", "detail": "a | b", "accuracy": None, "drop": None, "p50": 7.0,
         "to_ptq8": None, "size_mb": 5.5, "violations": 1, "epsilon": None},
    ],
    "allocation_blocks": [
        {"profile": p, "block": b, "rank": 0.5, "bits": 7.25}
        for p in PROFILES for b in ("early", "head") if (p, b) != ("max", "head")
    ],
    "devices": [
        {"profile": p, "device": d, "p50": 4.0 if p + d != "tinyonnxruntime" else None, "p90": 5.0}
        for p in PROFILES for d in ("openvino", "onnxruntime")
    ],
    "proxies": [
        {"proxy": p, "device": d, "mape": m}
        for p, d, m in (("flops", "a", 0.1), ("hybrid", "a", 0.05), ("flops", "b", 0.02),
                        ("hybrid", "b", 0.03))
    ],
    "energy": [{"reason": "no counter is readable"}],
}  # fmt: skip
FIGURES = [
    {"name": "med_below_full", "value": 0.0049, "limit": 0.005, "ok": True},
    {"name": "med_p50_to_ptq8", "value": None, "limit": 0.65, "ok": False},
]
MACHINE = {"cpu": "a processor", "cores": 2, "memory_gb": 25.3}
PAYLOAD = {"figures": FIGURES, "tables": TABLES, "machine": MACHINE}


def cells(markdown: str) -> list[dict[str, str]]:
    """The lines of the first table, by column."""
    lines = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in markdown.splitlines()
        if line.startswith("|")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def section(text: str, heading: str) -> str:
    return text.split(f"### {heading}\n")[1].split("\n### ")[0]


def test_the_table_has_the_columns_of_the_paper() -> None:
    found = {line["method"]: line for line in cells(results_table(RESULTS))}
    assert list(found) == [r["name"] for r in RESULTS]
    med = found["t3c-med"]
    assert med["p50 [p90], ms"] == "**7.00** [8.75]"
    assert med["to ptq8"] == "0.70 [0.70]"
    assert med["size, MB"] == "**5.00**"
    assert med["below full, points [95%]"] == "0.49 [0.29, 0.69]"
    assert med["epsilon"] == "0.200"
    assert found["ptq8"]["epsilon"] == "none"
    assert found["t3c-max"]["epsilon"] == MISSING
    assert found["full"]["mean drift"] == "0"


def test_bold_is_what_can_be_told() -> None:
    found = {line["method"]: line for line in cells(results_table(RESULTS))}
    bold = {
        column: {name for name, line in found.items() if "**" in line[column]}
        for column in found["full"]
    }
    # ptq8's interval reaches that of the best, t3c-med's (0.29 to 0.69 points) does not.
    assert bold.pop("accuracy, %") == {"t3c-max", "ptq8"}
    # lrft is faster and ptq4 smaller, but they answer worse; the original is not compared.
    assert bold.pop("p50 [p90], ms") == {"t3c-med"}
    assert bold.pop("size, MB") == {"t3c-med"}
    assert not any(bold.values())


def test_nothing_is_fast_where_nothing_is_near() -> None:
    rows = [RESULTS[0], row("ptq8", 0.0051, 10.0, 8.0), row("t3c-max", 0.1, 5.0, 4.0)]
    assert "at most 0.5 points below the original are 0 of 2: none." in headline(rows).lower()
    lines = cells(results_table(rows))
    assert not any("**" in line["p50 [p90], ms"] + line["size, MB"] for line in lines)


def test_an_interval_that_starts_at_zero_overlaps() -> None:
    rows = [
        row("full", 0.0, 30.0, 32.0),
        row("ptq8", 0.0, 10.0, 8.0),
        row("t3c-max", 0.002, 9.0, 7.0),
    ]
    assert rows[2]["drop_low"] == 0.0
    lines = {line["method"]: line for line in cells(results_table(rows))}
    assert lines["t3c-max"]["accuracy, %"] == "**89.80**"


def test_the_headline_names_winners_whoever_they_are() -> None:
    text = headline(RESULTS)
    assert "3 of 6: ptq8, t3c-med, t3c-max" in text
    assert "Fastest of them: t3c-med (7.00 ms, 0.70 of ptq8)" in text
    assert "Smallest of them: t3c-med (5.00 MB, 0.62 of ptq8)" in text
    assert "than any of: lrft, t3c-med, t3c-max." in text
    slow = [dict(r, p50=20.0) if r["name"].startswith("t3c") else r for r in RESULTS]
    assert "Fastest of them: ptq8" in headline(slow)


def test_the_front_has_what_nothing_beats() -> None:
    front = pareto_front(RESULTS[1:])
    assert [r["name"] for r in front] == ["lrft", "t3c-med", "t3c-max"]
    twins = [row("a", 0.1, 5.0, 1.0), row("b", 0.1, 5.0, 1.0), row("c", 0.1, 5.1, 1.0)]
    assert [r["name"] for r in pareto_front(twins)] == ["a", "b"]
    assert pareto_front([row("a", 0.1, 5.0, 1.0) | {"p50": None}]) == []


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "3", True])
def test_only_finite_numbers_count(value: Any) -> None:
    assert number({"a": value}, "a") is None
    assert number({"a": 3}, "a") == 3.0
    assert number({}, "a") is None


def test_every_section_says_what_was_measured() -> None:
    text = results_text("net", PAYLOAD, ["pareto", "ablations"])
    over = cells(section(text, "Budgets kept"))
    assert [line["over it"] for line in over] == ["3 (1.5%)", "0 (0.0%)"]
    assert [line["error of the proxy, %"] for line in over] == ["3.1", MISSING]
    audit = cells(section(text, "Monotone budgets"))[0]
    assert (audit["checked"], audit["less latency"], audit["missed"]) == ("2,000", "1", "25.0%")
    seeds = cells(section(text, "Seeds"))[0]
    assert (seeds["accuracy, %"], seeds["p50, ms"]) == ("89.00 ± 0.05", "7.00")
    covered = cells(section(text, "Certificates"))[0]
    assert covered["coverage, % [expected]"] == "95.3 [94.0, 96.0]"
    assert cells(section(text, "Devices"))[0] == {
        "profile": "tiny", "openvino": "4.00 [5.00]", "onnxruntime": MISSING,
    }  # fmt: skip
    blocks = cells(section(text, "Allocation"))
    assert blocks[0]["head"] == "0.50, 7.2"
    assert blocks[-1]["head"] == MISSING
    assert [line["a"] for line in cells(section(text, "Predicted latency"))] == ["10.0", "**5.0**"]
    assert [line["b"] for line in cells(section(text, "Predicted latency"))] == ["**2.0**", "3.0"]
    assert section(text, "Energy").strip() == "Not measured: no counter is readable."
    limits = cells(section(text, "Limits"))
    assert [line[""] for line in limits] == ["holds", "**short**"]
    assert limits[1]["value"] == MISSING
    assert "Tested on 10,000 samples." in text
    assert text.endswith("Measured on a processor, 2 cores, 25.3 GB.\n")
    assert re.findall(r"\]\((.*)\)", text) == [
        "results-net-pareto.svg",
        "results-net-ablations.svg",
    ]


def test_columns_without_a_value_are_left_out_and_cells_are_not() -> None:
    lines = cells(section(results_text("net", PAYLOAD), "Ablations"))
    assert not {"to ptq8", "epsilon"} & set(lines[0])
    assert lines[1]["accuracy, %"] == lines[1]["below full, points [95%]"] == MISSING
    assert lines[1]["detail"] == r"a \| b"
    assert "spectral" not in cells(section(results_text("net", PAYLOAD), "Certificates"))[0]


def test_any_table_may_be_missing() -> None:
    whole = results_text("net", PAYLOAD)
    for key, heading, _, _ in SECTIONS:
        for tables in ({k: v for k, v in TABLES.items() if k != key}, TABLES | {key: []}):
            text = results_text("net", PAYLOAD | {"tables": tables})
            assert 0 < len(text) < len(whole)
            assert f"### {heading}\n" not in text
    assert results_text("net", {"figures": [], "tables": {}, "machine": MACHINE}) == UNMEASURED


def _docs(monkeypatch: pytest.MonkeyPatch, folder: Path) -> ModuleType:
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location("docs_of_results", ROOT / "benchmarks/docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_filled_where_something_was_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "out").mkdir()
    page = tmp_path / "docs" / "results.md"
    empty = (ROOT / "docs" / "results.md").read_text()
    empty = re.sub(
        r"(<!-- results [\w-]+ -->\n).*?(<!-- end -->)", r"\1as it was\n\2", empty, flags=re.S
    )
    page.write_text(empty)
    docs = _docs(monkeypatch, tmp_path)
    assert docs.main() == 0
    assert page.read_text() == empty
    payload = json.dumps(PAYLOAD)
    (tmp_path / "out" / "results-cifar10-vit.json").write_text(payload)
    assert docs.main() == 0
    text = page.read_text()
    assert text.count("as it was\n") == empty.count("as it was\n") - 1 == 4
    assert results_text("cifar10-vit", json.loads(payload), ["pareto", "ablations"]) in text
    assert text.startswith(empty[: empty.index("<!-- results")])
    drawn = {path.name for path in (tmp_path / "docs").glob("*.svg")}
    assert drawn == set(re.findall(r"\]\((results-[\w-]+\.svg)\)", text)) != set()
    assert docs.main() == 0
    assert page.read_text() == text


def test_the_page_has_a_place_for_every_model() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    for model in ("resnet50", "cifar10-cnn", "cifar10-vit"):
        assert f"make results-{model}`" in text
        assert len(re.findall(rf"<!-- results {model} -->\n.*?<!-- end -->", text, re.S)) == 1


SPOKEN = [
    {"name": name, "method": "made", "perplexity": 5.0 * (1 + over), "tokens": 16_000, "over": over,
     "over_low": over - 0.002, "over_high": over + 0.002, "p50": p50, "p90": 1.2 * p50,
     "tokens_per_second": 1e3 / p50, "speed_to_ptq8w": 2 / p50, "to_ptq8w": p50 / 2,
     "first_ms": 9.0, "first_p90": 10.0, "size_mb": size, "size_to_ptq8w": size / 16,
     "blocks_mb": size - 9, "blocks_to_ptq8w": (size - 9) / 7, "epsilon": None, "drift": 0.1,
     "minutes": 0, "steps": 0}
    for name, over, p50, size in (("full", 0.0, 5.0, 60.0), ("ptq8w", 0.001, 2.0, 16.0),
                                  ("ptq4", 0.08, 1.9, 13.0), ("t3c-med", 0.015, 1.6, 13.2))
]  # fmt: skip


def test_language_models_have_a_table_of_their_own() -> None:
    found = {line["method"]: line for line in cells(results_table(SPOKEN))}
    med = found["t3c-med"]
    assert (med["perplexity"], med["over full, % [95%]"]) == ("5.07", "1.50 [1.30, 1.70]")
    assert med["p50 [p90] of a token, ms"] == "**1.60** [1.92]"
    assert (med["tokens/s"], med["tokens/s to ptq8w"]) == ("625", "1.25")
    assert (med["size, MB"], med["blocks to ptq8w"]) == ("**13.2**", "0.60")
    # ptq4 is smaller, but 8% over the original.
    assert "**" not in found["ptq4"]["size, MB"]
    text = headline(SPOKEN)
    assert "At most 2% over the original's perplexity are 2 of 3: ptq8w, t3c-med." in text
    assert "Fastest of them: t3c-med (1.60 ms, 0.80 of ptq8w)" in text
    assert "less perplexed than any of: ptq8w, t3c-med." in text
    assert "Tested on 16,000 tokens." in results_text("lm", {"tables": {"results": SPOKEN}})
