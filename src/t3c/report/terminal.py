"""What the command line says of artifacts, answers and comparisons: as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from t3c.artifact.devices import DeviceTable
from t3c.artifact.ledger import Certification
from t3c.artifact.reader import Artifact
from t3c.runtime.runtime import Answer, Runtime
from t3c.runtime.select import explain
from t3c.runtime.standing import guarantee, top_classes
from t3c.spec import Budget, Form


def summarize(artifact: Artifact, verified: bool) -> dict[str, Any]:
    """An artifact in short."""
    manifest, ledger, devices = artifact.manifest, artifact.ledger(), artifact.devices()
    epsilons = {entry.profile: entry.epsilon for entry in ledger.entries} if ledger else {}
    rows = []
    for profile in manifest.profiles:
        points = profile.points.values()
        rows.append(
            {
                "name": profile.name,
                "size_bytes": profile.size_bytes,
                "mean_bits": sum(p.bits for p in points) / len(points),
                "epsilon": epsilons.get(profile.name),
                "p50_ms": {
                    t.device.key: t.profiles[profile.name].p50
                    for t in devices
                    if profile.name in t.profiles
                },
                "points": {n: [p.rank, p.bits] for n, p in profile.points.items()},
            }
        )
    return {
        "path": str(artifact.path),
        "schema_version": manifest.schema_version,
        "t3c_version": manifest.t3c_version,
        "content": artifact.content,
        "verified": verified,
        "trimmed_from": manifest.trimmed_from,
        "bytes": artifact.size_on_disk(),
        "content_bytes": artifact.content_bytes(),
        "model": manifest.model.model_dump(mode="json", exclude={"quantized"}),
        "layers": len(manifest.layers),
        "profiles": rows,
        "devices": [t.device.key for t in devices],
        "parity": [row.model_dump(mode="json") for row in ledger.parity] if ledger else [],
    }


def answer_json(runtime: Runtime, answer: Answer) -> dict[str, Any]:
    """An answer with its classes, where it has them, its profile and its guarantee."""
    classes = runtime.artifact.manifest.model.classes
    rows = [
        {
            "shape": list(output.shape),
            "output": output.tolist(),
            "classes": [
                {"class": name, "probability": share}
                for name, share in top_classes(output, classes)
            ],
        }
        for output in answer.output
    ]
    certificate = answer.certificate
    return {
        "answers": rows,
        "profile": answer.profile,
        "reason": answer.reason,
        "warnings": list(answer.warnings),
        "certificate": None if certificate is None else asdict(certificate),
        "guarantee": guarantee(certificate),
        "device": runtime.device.model_dump(),
    }


def explain_choice(runtime: Runtime, answer: Answer, budget: Budget) -> list[dict[str, Any]]:
    """Every profile as the choice saw it, and why it was or was not chosen."""
    told = explain(runtime.candidates, budget, answer.profile)
    told |= {name: f"does not run here: {reason}" for name, reason in runtime.refused.items()}
    return [
        {
            "profile": c.profile,
            "latency_ms": None if c.latency is None else c.latency.at(budget.quantile),
            "guard": c.guard,
            "with_guard_ms": c.latency_ms(budget.quantile),
            "size_mb": c.size_mb,
            "energy_mj": c.energy_mj,
            "epsilon": c.drift,
            "chosen": c.profile == answer.profile,
            "why": told[c.profile],
        }
        for c in runtime.placed.candidates
    ]


def certification_json(found: Certification) -> dict[str, Any]:
    """A certification without what only machines read: hashes of samples, models of activations."""
    return found.model_dump(mode="json", exclude={"keys", "monitors", "forms"})


def table_json(table: DeviceTable, path: str) -> dict[str, Any]:
    """A device's table in short."""
    return {
        "device": table.device.model_dump(mode="json"),
        "table": path,
        "source": table.source,
        "error": table.error,
        "profiles": {
            name: {
                **asdict(latency),
                "guard": table.guard(name),
                "factored": sum(
                    form is not Form.DENSE for form in table.forms.get(name, {}).values()
                ),
                **(table.starts[name].model_dump() if name in table.starts else {}),
                "energy_mj": table.energy_mj.get(name),
            }
            for name, latency in table.profiles.items()
        },
        "proxies": {
            name: {k: v for k, v in asdict(proxy).items() if k != "coefficients"}
            for name, proxy in table.proxies.items()
        },
        "grouped": sum(g.worth for g in table.groups),
        "groups": len(table.groups),
        "energy": table.energy,
        "energy_proxy": None if table.energy_proxy is None else asdict(table.energy_proxy),
        "conditions": None if table.conditions is None else asdict(table.conditions),
    }


def print_table(payload: dict[str, Any], console: Console) -> None:
    """A calibration for people."""
    device = payload["device"]
    console.print(
        f"{device['cpu']}, {device['engine']} {device['engine_version']}, "
        f"{device['threads']} threads: {payload['source']}"
    )
    titles = (
        "profile",
        "p50 ms",
        "p90",
        "p99",
        "guard",
        "factored layers",
        "cold start ms",
        "peak MB",
    )
    table = Table(*titles)
    for name, row in payload["profiles"].items():
        peak = row.get("peak_bytes")
        table.add_row(
            name, *(f"{row[key]:.3f}" for key in ("p50", "p90", "p99")), f"{row['guard']:.1%}",
            str(row["factored"]), cell(row.get("cold_ms"), ".0f"),
            cell(None if peak is None else peak / 1e6, ".0f"),
        )  # fmt: skip
    console.print(table)
    for name, proxy in payload["proxies"].items():
        if proxy["mape"] is not None:
            console.print(
                f"proxy {name}: off by {proxy['mape']:.1%} on {proxy['held_out']} profiles not "
                f"among the {proxy['fitted']} it was fitted to (R^2 {cell(proxy['r2'], '.3f')}; "
                f"a constant {cell(proxy['constant_mape'], '.1%')})"
            )
    if payload["groups"]:
        console.print(
            f"{payload['grouped']} of {payload['groups']} groups of layers run as one product"
        )
    console.print(f"energy {payload['energy']}")
    if payload["conditions"]:
        print_conditions(payload["conditions"], console)


def print_conditions(conditions: dict[str, Any], console: Console) -> None:
    """What disturbed a measurement, if anything did."""
    if conditions["repeated"]:
        console.print(f"{conditions['repeated']} disturbed stretches were measured again")
    if conditions["disturbed"]:
        console.print(f"warning: a disturbed stretch was kept: {conditions['reason']}")


def print_variants(payload: dict[str, Any]) -> None:
    """A comparison as a table."""
    table = Table()
    names = ("accuracy", "perplexity", "agreement", "neighbours")
    first = payload["variants"][0]
    metric = next((name for name in names if first[name] is not None), "quality")
    for title in ("variant", metric, "p50 ms", "p90 ms", "MB", "drift", "epsilon", "covered"):
        table.add_column(title, no_wrap=True, justify="left" if title == "variant" else "right")
    for v in payload["variants"]:
        drift = v["drift"]
        table.add_row(
            v["name"],
            cell(v.get(metric), ".3f"),
            f"{v['latency_ms']['p50']:.3f}",
            f"{v['latency_ms']['p90']:.3f}",
            f"{v['size_bytes'] / 1e6:.3f}",
            cell(drift["mean"], ".4f"),
            cell(drift["epsilon"], ".4f"),
            cell(drift["coverage"], ".3f"),
        )
    console = Console(markup=False, highlight=False)
    console.print(table)
    device, monotone = payload["device"], payload["monotone"]
    console.print(
        f"{payload['variants'][0]['samples']} test samples; batch 1, in turns, on {device['cpu']}, "
        f"{device['engine']} {device['engine_version']}, {device['threads']} threads; "
        f"{monotone['violations']} violations in {monotone['checked']} monotone checks"
    )


def cell(value: float | None, form: str) -> str:
    """A number, or a dash for what is not available."""
    return "-" if value is None else format(value, form)
