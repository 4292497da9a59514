"""An artifact on an engine of this machine: how each profile runs here, and what is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx

from t3c.artifact.devices import DISTURBED, DeviceTable, choose_forms
from t3c.artifact.ledger import Certification, Ledger, QualityEntry
from t3c.artifact.reader import Artifact
from t3c.device.execution import Execution, certified_forms, execution_of, possible
from t3c.device.machine import describe
from t3c.device.predict import nearest, transferred
from t3c.engines import Engine
from t3c.errors import CorruptError
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.select import Candidate
from t3c.spec import Certificate, Profile


def disturbance(path: Path, table: DeviceTable) -> Remark | None:
    """Return what to say of an artifact's table whose measurement was disturbed; else None."""
    if not table.disturbed:
        return None
    causes = []
    if table.conditions is not None and table.conditions.disturbed:
        causes.append(table.conditions.reason)
    if table.spread >= DISTURBED:
        causes.append(f"times went up by {table.spread:.0%} for a while")
    return Remark(Code.DISTURBED, other=str(path), causes=tuple(causes))


class Placed:
    """What a runtime knows before it runs anything.

    `note` is a warning about its latencies, None where they were measured here. `refused` are
    profiles that are not to run here, and why: their outputs were not torch's when that was
    checked, or the engine lacks a form.
    """

    def __init__(self, artifact: Artifact, engine: Engine) -> None:
        self.artifact, self.engine = artifact, engine
        self.device = describe(engine)
        self.chain = artifact.manifest.chain
        self.table, self.note = self._find_table(artifact.devices())
        ledger = artifact.ledger()
        self.executions = {p.name: self._execution(p, ledger) for p in self.chain}
        self.forms = {name: dict(execution.forms) for name, execution in self.executions.items()}
        self.certified = self._find_certificates(ledger)
        self.certificates = {name: found for name, (found, _) in self.certified.items()}
        self.quality = self._find_quality(ledger)
        self.candidates = [self._candidate(p) for p in self.chain]
        self.refused = self._find_refused(ledger)

    def graph(self, profile: str) -> onnx.ModelProto:
        """The graph the engine runs for a profile."""
        return self.executions[profile].graph(self.artifact, self.device.weight_bits)

    def _find_table(self, tables: list[DeviceTable]) -> tuple[DeviceTable | None, Remark | None]:
        """Return this device's table, else one made from the nearest device's, and a warning."""
        for table in tables:
            if table.device == self.device:
                elsewhere = Remark(Code.OTHER_TABLE, causes=(table.source,))
                return table, None if table.measured else elsewhere
        donor = nearest(tables, self.device)
        if donor is None:
            return None, Remark(Code.NO_TABLE)
        table = transferred(self.artifact, donor, tables, self.device)
        return table, Remark(Code.TRANSFERRED_TABLE, causes=(table.source,))

    def _execution(self, profile: Profile, ledger: Ledger | None) -> Execution:
        """The profile as this device executes it."""
        if self.table is not None:
            return execution_of(self.artifact, self.table, profile)
        specs = self.artifact.manifest.specs
        forms = certified_forms(ledger, self.device).get(profile.name)
        forms = forms or choose_forms((), specs, profile.points)
        if not possible(self.artifact, profile, forms):
            raise CorruptError(
                f"{self.artifact.path}: its certificates are of forms its layers do not have"
            )
        return Execution(profile, forms, self.artifact.ranges(profile.name))

    def _find_certificates(
        self, ledger: Ledger | None
    ) -> dict[str, tuple[Certificate, Certification]]:
        """Certificates of the profiles as this device executes them.

        Bounds hold for all profiles of one certification at once, so the latest that has the most
        of them is taken, and no other.
        """
        best: dict[str, tuple[Certificate, Certification]] = {}
        for certification in ledger.on(self.engine.name) if ledger else ():
            found = {
                name: (certificate, certification)
                for name, forms in self.forms.items()
                if (certificate := certification.of(name, forms, self.device.weight_bits))
            }
            best = found if len(found) > len(best) else best
        return best

    def _find_quality(self, ledger: Ledger | None) -> dict[str, QualityEntry]:
        """How good the profiles are as this device executes them, where that was measured."""
        name, bits = self.engine.name, self.device.weight_bits
        return {
            profile: found
            for profile, forms in self.forms.items()
            if ledger and (found := ledger.quality_of(profile, name, forms, bits))
        }

    def _find_refused(self, ledger: Ledger | None) -> Mapping[str, Remark]:
        name, bits = self.engine.name, self.device.weight_bits
        parity = ledger.parity_of(name, bits) if ledger else {}
        refused = {
            p: Remark(Code.DIFFERS, p, causes=(row.reason,))
            for p, row in parity.items()
            if row.reason
        }
        kernels = self.artifact.manifest.kernels.get(name)
        for profile, forms in self.forms.items() if kernels else ():
            lacking = tuple(sorted(set(forms.values()) - set(kernels.forms if kernels else ())))
            if lacking:
                lacks = Remark(Code.NO_FORM, profile, engine=name, names=lacking)
                refused.setdefault(profile, lacks)
        return refused

    def _candidate(self, profile: Profile) -> Candidate:
        known = self.table is not None and profile.name in self.table.profiles
        certificate = self.certificates.get(profile.name)
        quality = self.quality.get(profile.name)
        return Candidate(
            profile.name,
            latency=self.table.profiles[profile.name] if self.table and known else None,
            size_mb=self.artifact.manifest.size_bytes(profile.name) / 1e6,
            energy_mj=self.table.energy_mj.get(profile.name) if self.table else None,
            drift=certificate.epsilon if certificate else None,
            guard=self.table.guard(profile.name) if self.table and known else 0.0,
            drop=quality.drop if quality else None,
        )
