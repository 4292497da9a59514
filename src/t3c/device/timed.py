"""The whole networks a calibration times: the artifact's profiles and a grid of mixtures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from t3c.artifact.devices import AS_FAST, DeviceTable, choose_forms
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution, certified_forms, execution_of
from t3c.device.grid import mixtures, widest_ranges
from t3c.device.predict import work_of
from t3c.measure.latency import Blocks, summarize

STILL_AS_FAST = 1.1  # AS_FAST, where the intervals do not tell the two apart


class Timed(NamedTuple):
    """A profile in the forms the layers' times choose, or in those its certificate is for."""

    profile: str
    certified: bool = False

    def __str__(self) -> str:
        return f"{self.profile} in {'certified' if self.certified else 'chosen'} forms"


def timed_profiles(artifact: Artifact, table: DeviceTable) -> dict[Timed, Execution]:
    """Return the artifact's profiles, and those whose certificates are for other forms twice."""
    executions: dict[Timed, Execution] = {}
    certified = certified_forms(artifact.ledger(), table.device)
    for profile in artifact.manifest.chain:
        chosen = execution_of(artifact, table, profile)
        executions[Timed(profile.name)] = chosen
        forms = certified.get(profile.name)
        if forms is not None and forms != chosen.forms:
            grouped = table.grouped(profile.points, forms)
            other = Execution(profile, forms, chosen.ranges, grouped, table.few)
            executions[Timed(profile.name, certified=True)] = other
    return executions


def timed_grid(
    artifact: Artifact,
    table: DeviceTable,
    chain: Mapping[Timed, Execution],
    count: int,
    seed: int,
) -> dict[Timed, Execution]:
    """Return mixtures of the artifact's profiles, each of other work than all before it.

    Profiles that differ in bits alone, or in ranks that run dense, are the same work.
    """
    ranges = widest_ranges(artifact)
    executions: dict[Timed, Execution] = {}
    seen = {work_of(artifact, execution).tobytes() for execution in chain.values()}
    for profile in mixtures(artifact, count, seed):
        forms = choose_forms(table.layers, artifact.manifest.specs, profile.points)
        grouped = table.grouped(profile.points, forms)
        execution = Execution(profile, forms, ranges, grouped, table.few)
        work = work_of(artifact, execution).tobytes()
        if work not in seen:
            seen.add(work)
            executions[Timed(profile.name)] = execution
    return executions


def with_profiles(
    table: DeviceTable, chain: Mapping[Timed, Execution], blocks: Mapping[Timed, Blocks]
) -> tuple[DeviceTable, dict[str, Timed]]:
    """Add the profiles' times to a table, in the certified forms where those are as fast.

    Also return which of its executions each profile is now run as.
    """
    chosen = {name: _chosen(name, blocks) for name in _names(chain)}
    update = {
        "profiles": {name: summarize(blocks[key]) for name, key in chosen.items()},
        "forms": {name: dict(chain[key].forms) for name, key in chosen.items()},
    }
    return table.model_copy(update=update), chosen


def _names(keys: Iterable[Timed]) -> list[str]:
    return list(dict.fromkeys(key.profile for key in keys))


def _chosen(name: str, blocks: Mapping[Timed, Blocks]) -> Timed:
    mine, other = Timed(name), Timed(name, certified=True)
    if other not in blocks:
        return mine
    fast, certified = summarize(blocks[mine]), summarize(blocks[other])
    overlap = certified.ci95[0] <= fast.ci95[1]
    limit = fast.p50 * (STILL_AS_FAST if overlap else AS_FAST)
    return other if certified.p50 <= limit else mine
