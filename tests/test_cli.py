"""The command line as a stranger types it: exit codes, one JSON object, one line of error."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from conftest import Made
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import DENSE, FACTORS
from t3c.artifact.upgrade import SCHEMA_VERSION
from t3c.cli import main

pytestmark = pytest.mark.usefixtures("briefly")
COMMAND = [sys.executable, "-c", "from t3c.cli import main; main()"]
Done = subprocess.CompletedProcess[str]


def typed(*arguments: object) -> Done:
    """A command as a process of its own, which also pays for what it imports."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def t3c(*arguments: object) -> Done:
    """A command in this process: what it prints, and the code it exits with."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["t3c", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
    code = stopped.value.code
    assert isinstance(code, int)
    return Done(arguments, code, out.getvalue(), err.getvalue())


def ok(*arguments: object) -> dict:
    return one_object(t3c(*arguments, "--json"))


def one_object(done: Done) -> dict:
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


def refused(message: str, *arguments: object, by: Callable[..., Done] = t3c) -> None:
    done = by(*arguments)
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert re.fullmatch(rf"error: [^\n]*{message}[^\n]*\n", done.stderr), done.stderr


def test_processes_answer_as_calls_do(made: Made, tmp_path: Path) -> None:
    """What libraries print of their own accord is on neither stream."""
    run = ("run", made.artifact, "--input", made.folder / "one.npy", "--size-mb", 0.0001)
    done = typed(*run, "--json")
    assert done.stderr == ""
    assert one_object(done)["warnings"] == ok(*run)["warnings"] != []
    refused("no such file", "run", made.artifact, "--input", tmp_path / "none.npy", by=typed)
    refused("[Nn]o such option", "inspect", made.artifact, "--colour", by=typed)


def test_inspect(made: Made) -> None:
    summary = ok("inspect", made.artifact, "--verify")
    assert summary["verified"] is True
    assert [p["name"] for p in summary["profiles"]][-1] == "max"
    assert all(p["epsilon"] > 0 for p in summary["profiles"])
    shown = t3c("inspect", made.artifact)
    assert shown.returncode == 0
    assert "max" in shown.stdout


def test_run_takes_pictures_and_arrays(made: Made, tmp_path: Path) -> None:
    x = made.digits.test[0][0, 0].numpy()
    pixels = ((x * 0.35 + 0.3).clip(0, 1) * 255).round().astype(np.uint8)
    Image.fromarray(pixels).convert("RGB").save(tmp_path / "digit.png")
    np.savez(tmp_path / "one.npz", anything=x[None])
    answers = [
        ok("run", made.artifact, "--input", path, "--latency-ms", 1000, "--explain")
        for path in (made.folder / "one.npy", tmp_path / "digit.png", tmp_path / "one.npz")
    ]
    for answer in answers:
        assert answer["profile"] == "max"
        assert answer["certificate"]["epsilon"] > 0
        assert "for 95% of inputs" in answer["guarantee"]
        assert [row["chosen"] for row in answer["explain"]].count(True) == 1
    classes = [answer["answers"][0]["classes"] for answer in answers]
    assert answers[0]["answers"][0]["output"] == pytest.approx(
        answers[2]["answers"][0]["output"], abs=1e-4
    )
    assert classes[0][0]["class"] == classes[1][0]["class"]
    assert classes[0][0]["probability"] == pytest.approx(classes[1][0]["probability"], abs=0.05)
    text = t3c("run", made.artifact, "--input", made.folder / "one.npy", "--size-mb", 0.0001)
    assert text.returncode == 0
    assert "warning: no profile meets the limits" in " ".join(text.stdout.split())


def test_bench_and_report(made: Made, tmp_path: Path) -> None:
    done = t3c("bench", made.artifact, "--rounds", 5, "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    names = [v["name"] for v in result["variants"]]
    profiles = [f"t3c-{p.name}" for p in made.exported.profiles]
    assert names == ["full", "ptq8", *profiles]
    keys = {
        "name", "method", "accuracy", "perplexity", "agreement", "neighbours", "below_full_ci95",
        "samples", "latency_ms", "size_bytes", "params", "flops", "drift",
    }  # fmt: skip
    for variant in result["variants"]:
        assert set(variant) == keys
        assert set(variant["latency_ms"]) >= {"p50", "p90", "p99", "ci95"}
        assert set(variant["drift"]) == {
            "mean", "spectral", "first_order", "epsilon", "worst_case", "coverage",
        }  # fmt: skip
        assert variant["samples"] == 100
        assert variant["below_full_ci95"][0] < variant["below_full_ci95"][1]
    assert result["variants"][0]["drift"]["mean"] == 0
    assert result["variants"][1]["drift"]["mean"] < 0.2
    assert result["variants"][1]["accuracy"] >= result["variants"][0]["accuracy"] - 0.05
    assert result["monotone"] == {"checked": 1000, "violations": 0}
    (tmp_path / "bench.json").write_text(done.stdout)
    page = tmp_path / "page.html"
    shown = t3c("report", made.artifact, "--bench", tmp_path / "bench.json", "--out", page)
    assert shown.returncode == 0, shown.stderr
    html = page.read_text()
    assert not re.search(r"(src|href)=|url\(|@import|<script", html)
    for text in [*names, "blocks.2.conv2", "Drift against certificate"]:
        assert text.removeprefix("t3c-") in html


def test_export_trims_and_writes_for_tensorrt(made: Made, tmp_path: Path) -> None:
    part = tmp_path / "part.t3c"
    done = ok("export", made.artifact, "--profiles", "tiny,med", "--out", part)
    assert done["profiles"] == ["tiny", "med"]
    assert done["bytes"] < done["bytes_before"]
    assert [row["name"] for row in ok("inspect", part, "--verify")["profiles"]] == ["tiny", "med"]
    answer = ok("run", part, "--input", made.folder / "one.npy", "--size-mb", "100")
    assert answer["profile"] == "med"
    beside = shutil.copytree(made.artifact, tmp_path / "net.t3c")
    done = t3c("export", beside, "--profiles", "tiny")
    assert done.stdout.startswith(f"{tmp_path / 'net-tiny.t3c'}: tiny, ")
    file = tmp_path / "max.onnx"
    assert ok("export", made.artifact, "--onnx", file, "--profile", "max")["bytes"] > 0
    assert file.stat().st_size > 0
    for arguments in ([], ["--profiles", "tiny", "--onnx", file], ["--onnx", file]):
        refused("--onnx FILE", "export", made.artifact, *arguments)
    refused("no profile 'huge'", "export", made.artifact, "--profiles", "tiny,huge")
    refused("name at least one", "export", made.artifact, "--profiles", ",")
    refused("no profile 'huge'", "export", made.artifact, "--onnx", file, "--profile", "huge")


def test_audit(made: Made) -> None:
    data = made.folder / "test.npz"
    given = ("--budgets", 100, "--data", data, "--rounds", 5, "--busy", "--json")
    done = t3c("audit", made.artifact, *given)
    found = json.loads(done.stdout)
    assert found["budgets"] == 100
    assert found["monotone_violations"] == 0
    assert set(found["monotone"]) == {"rank_and_bits", "size", "cost", "drift", "accuracy"}
    assert set(found["over"]) == {"p50", "p90"}
    assert found["accuracy"].keys() == found["live"].keys()
    assert done.returncode == 0
    text = t3c("audit", made.artifact, "--budgets", 20, "--rounds", 2, "--busy")
    assert "0 monotone violations" in " ".join(text.stdout.split())


def test_certify(made: Made, copied: Path, tmp_path: Path) -> None:
    images, labels = (part.numpy() for part in made.digits.test)
    data, test = tmp_path / "mine.npz", tmp_path / "test.npz"
    np.savez(data, x=images[:160], y=labels[:160])
    np.savez(test, input=images[160:240])
    original = made.folder / "original.onnx"
    few = ("--gain-samples", 2, "--worst-case")
    given = ("certify", copied, "--data", data, "--original", original, *few)
    found = ok(*given, "--slices", "y", "--test", test, "--measure", "kl", "--flip-cap", 0.5)
    assert [e["profile"] for e in found["entries"]][-1] == "max"
    figures = ("mean", "epsilon", "first_order", "spectral", "worst_case")
    assert all(entry[name] > 0 for entry in found["entries"] for name in figures)
    assert set(found["entries"][0]["measures"]) == {"absolute", "kl", "flip"}
    assert found["held_out"]["samples"] == 80
    assert len(found["slices"]) == 10 * len(found["entries"])
    assert "max" in found["capped"]["profiles"]
    picture = Path(found["plot"]).read_text()
    assert picture.startswith("<svg")
    assert "worst case (bound)" in picture
    shown = t3c(*given, "--slices", "y", "--plot", tmp_path / "mine.svg")
    assert shown.returncode == 0, shown.stderr
    assert "epsilon holds for 95% of new samples" in shown.stdout.replace("\n", " ")
    assert (tmp_path / "mine.svg").exists()
    before = (copied / "ledger.json").read_bytes()
    refused("no such file", "certify", copied, "--data", data, "--original", "none.onnx")
    refused("no array colour", *given, "--slices", "colour")
    refused("unknown measure 'size'", *given, "--measure", "size")
    np.savez(data, z=images[:60])
    refused("no array input", *given)
    assert (copied / "ledger.json").read_bytes() == before


def test_calibrate_merge_and_quick(made: Made, copied: Path, tmp_path: Path) -> None:
    few = ("--rounds", 4, "--grid", 6, "--busy", "--json")
    device = ("--engine", "onnxruntime", "--threads", 1)
    done = t3c("calibrate", copied, *device, *few, "--forms")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == "measured"
    assert set(found["proxies"]) == {"hybrid", "flops", "bytes"}
    for row in found["profiles"].values():
        assert 0 < row["p50"] <= row["p90"] <= row["p99"]
        assert row["cold_ms"] > 0
        assert row["activation_bytes"] > 0
    layers = len(made.exported.profiles) * len(made.exported.profiles.top.points)
    assert len(found["forms"]) == layers
    assert all(row["why"] for row in found["forms"])
    table = Path(found["table"])
    assert not list(table.parent.glob("*.journal"))
    # A table is a file to share: taken from here and added again, it is the same device.
    shared = tmp_path / "shared.json"
    shared.write_bytes(table.read_bytes())
    table.unlink()
    assert t3c("calibrate", copied, "--merge", shared).returncode == 0
    assert table.read_bytes() == shared.read_bytes()
    other = made_of_other_content(copied, tmp_path)
    refused("measured on other content", "calibrate", other, "--merge", shared)
    done = t3c("calibrate", copied, "--engine", "openvino", "--threads", 1, "--quick", *few)
    assert json.loads(done.stdout)["error"] is not None, done.stderr
    text = t3c("run", copied, "--input", made.folder / "one.npy", "--threads", 1, "--latency-ms", 9)
    assert "latencies are from 3 profiles measured" in " ".join(text.stdout.split())


def made_of_other_content(artifact: Path, folder: Path) -> Path:
    """The artifact with another model's name, so that its content is another."""
    other = Path(shutil.copytree(artifact, folder / "other.t3c"))
    raw = json.loads((other / MANIFEST).read_text())
    raw["model"]["name"] = "other"
    (other / MANIFEST).write_text(json.dumps(raw))
    (other / "ledger.json").unlink()
    shutil.rmtree(other / "devices")
    return other


def test_a_killed_calibration_is_taken_up_again(copied: Path) -> None:
    few = ("--threads", "1", "--busy", "--rounds", "3", "--grid", "0", "--json")
    command = [sys.executable, "-m", "t3c.cli", "calibrate", str(copied), *few]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    kept = 0
    while first.poll() is None and kept < 2:
        time.sleep(0.02)
        found = list((copied / "devices").glob("*.journal"))
        kept = len(found[0].read_bytes().splitlines()) - 1 if found else 0
    first.kill()
    first.wait()
    assert kept >= 2
    assert not list((copied / "devices").glob("openvino-1t*.json"))
    again = t3c("calibrate", copied, *few)
    assert again.returncode == 0
    assert re.search(r"going on from \d+ steps", again.stderr)
    assert list((copied / "devices").glob("openvino-1t*.json"))


def test_two_calibrations_of_one_device_do_not_meet(copied: Path) -> None:
    from t3c.device.machine import describe
    from t3c.engines import open_engine
    from t3c.files import locked

    key = describe(open_engine("openvino", 1)).key
    with locked(copied / "devices" / f"{key}.json"):
        given = ("calibrate", copied, "--threads", 1, "--busy")
        refused("another process is writing it", *given, by=typed)


def test_without_arguments_it_helps() -> None:
    done = t3c()
    assert done.returncode == 0
    assert "inspect" in done.stdout
    assert t3c("--version").stdout.startswith("t3c ")


def test_names_are_printed_as_they_are(copied: Path) -> None:
    (copied / "ledger.json").unlink()
    for table in (copied / "devices").iterdir():
        table.unlink()
    raw = json.loads((copied / MANIFEST).read_text())
    raw["model"]["name"] = "[/x] [bold]"
    (copied / MANIFEST).write_text(json.dumps(raw))
    done = t3c("inspect", copied)
    assert (done.returncode, done.stdout[:11]) == (0, "[/x] [bold]")


def test_bad_artifacts(made: Made, copied: Path, flip: Callable[[Path, int], None]) -> None:
    one = made.folder / "one.npy"
    refused("nowhere: no such artifact folder", "inspect", "nowhere")
    refused("no such artifact folder", "run", "nowhere", "--input", one)
    flip(copied / FACTORS, 2000)
    refused("factors.safetensors: its hash", "inspect", copied, "--verify")
    refused("factors.safetensors: its hash", "run", copied, "--input", one)
    flip(copied / FACTORS, 2000)
    raw = (copied / DENSE).read_bytes()
    (copied / DENSE).write_bytes(raw[:-8])
    refused("dense.safetensors: .* bytes, the manifest says", "inspect", copied)
    (copied / DENSE).write_bytes(raw)
    text = (copied / MANIFEST).read_text()
    (copied / MANIFEST).write_text(
        text.replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99')
    )
    refused("schema_version 99 is not one this t3c reads", "inspect", copied)


def test_bad_requests(made: Made, tmp_path: Path) -> None:
    one, artifact = made.folder / "one.npy", made.artifact
    refused("latency_ms must be positive", "run", artifact, "--input", one, "--latency-ms", -1)
    refused("drift must be positive, got nan", "run", artifact, "--input", one, "--drift", "nan")
    refused("max_drop must be 0 or more", "run", artifact, "--input", one, "--max-drop", -1)
    refused("quantile must be p50", "run", artifact, "--input", one, "--quantile", "p75")
    refused("unknown engine 'abacus'", "run", artifact, "--input", one, "--engine", "abacus")
    refused("unknown engine 'abacus'", "calibrate", artifact, "--engine", "abacus")
    refused("no such artifact folder", "calibrate", "nowhere")
    refused("nowhere.json", "calibrate", artifact, "--merge", "nowhere.json")
    refused("x and y are needed", "audit", artifact, "--data", made.folder / "calibration.npz")
    refused("no such file", "run", artifact, "--input", tmp_path / "missing.npy")
    np.save(tmp_path / "wrong.npy", np.zeros((3, 5), np.float32))
    wrong = r"shape \(3, 5\) does not fit \(batch, 1, 32, 32\)"
    refused(wrong, "run", artifact, "--input", tmp_path / "wrong.npy")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    refused("not readable", "run", artifact, "--input", tmp_path / "objects.npy")
    (tmp_path / "text.png").write_text("not a picture")
    refused("neither an array nor a picture", "run", artifact, "--input", tmp_path / "text.png")
    (tmp_path / "short.npz").write_bytes(b"PK\x03\x04")
    # numpy leaves such a file open, which a process of its own outlives.
    refused("not readable", "run", artifact, "--input", tmp_path / "short.npz", by=typed)
    refused("budgets", "audit", artifact, "--budgets", 0)
    refused("unknown baseline magic", "bench", artifact, "--against", "magic")
    refused("no such file", "bench", artifact, "--data", tmp_path / "none.npz")
    refused("no such file", "report", artifact, "--bench", tmp_path / "none.json")
    Image.new("L", (20000, 20000)).save(tmp_path / "bomb.png")
    refused("neither an array nor a picture", "run", artifact, "--input", tmp_path / "bomb.png")
    np.savez(tmp_path / "small.npz", x=np.zeros((4, 1, 10, 32), np.float32))
    refused("does not fit", "bench", artifact, "--data", tmp_path / "small.npz")
    refused("[Nn]ot a directory", "demo", "--out", one / "x")
    refused("[Nn]o such option", "inspect", artifact, "--colour")
    refused("[Mm]issing", "run", artifact)
    refused("[Nn]o such command", "fly")


def last_line(done: Done) -> str:
    """The error; libraries that a model pulls in may chatter before it."""
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr.rstrip("\n").rsplit("\n", 1)[-1]


def test_convert_plans_and_converts(tmp_path: Path) -> None:
    plan = ok("convert", "--model", "vit-large", "--plan")
    shares = plan["layer_params"]
    assert shares["elastic"] >= 0.95
    assert shares["rank_elastic_share"] >= 0.8
    assert len({layer["block"] for layer in plan["layers"] if layer["block"]}) == 24
    assert plan["error"] is None
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "model_type": "resnet", "architectures": ["ResNetForImageClassification"],
                "embedding_size": 16, "hidden_sizes": [32, 64], "depths": [1, 1], "num_labels": 7,
                "layer_type": "basic",
            }
        )
    )  # fmt: skip
    done = ok(
        "convert", "--model", config, "--exclude", "*embedder*", "--rank-cap", "convolution=1"
    )
    assert done["error"] < 1e-5
    assert any(item["reason"] == "excluded" for item in done["skipped"])
    shown = t3c("convert", "--model", config, "--plan", "--convolution", "cp")
    assert shown.returncode == 0
    assert "BatchNorm2d has no elastic form" in shown.stdout


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("nowhere is no folder", ["nowhere"]),
        ("pattern '*.none' matches no layer", ["resnet-50", "--include", "*.none"]),
        ("a rank cap is ROLE=SHARE", ["resnet-50", "--rank-cap", "linear"]),
        ("rank_caps are shares of full rank by role", ["resnet-50", "--rank-cap", "x=1"]),
        ("the model has no layer that can be made", ["resnet-50", "--min-weights", "100000000"]),
    ],
)
def test_convert_refuses_in_one_line(message: str, arguments: list[str]) -> None:
    line = last_line(t3c("convert", "--plan", "--model", *arguments))
    assert line.startswith(f"error: {message}")
    assert len(line) < 400
