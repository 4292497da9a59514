"""Settings from YAML: lists of sections, types that are strict, and refusals that say where."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from t3c.errors import DataError, SpecError
from t3c.zoo.settings import build, changed, near, parse_yaml, read_settings


@dataclass(frozen=True)
class Stop:
    """A stop of a route."""

    place: str
    minutes: int = 5
    share: float = 0.5

    def __post_init__(self) -> None:
        if self.minutes < 0:
            raise SpecError(f"a stop lasts 0 minutes or more, got {self.minutes}")


@dataclass(frozen=True)
class Crew:
    driver: str = "Ada"
    guides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Route:
    name: str
    stops: tuple[Stop, ...] = ()
    crew: Crew = field(default_factory=Crew)
    spare: Crew | None = None
    kind: Literal["bus", "tram"] = "bus"
    open: bool = True
    length: int | None = None
    fares: dict[str, float] = field(default_factory=dict)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "route.yaml"


def loaded(file: Path, text: str) -> Route:
    file.write_text(text, encoding="utf-8")
    return read_settings(file, Route)


def refusal(file: Path, text: str) -> str:
    """What is said after the file's name: one line."""
    with pytest.raises(SpecError) as caught:
        loaded(file, text)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(f"{file}: ")
    return said.removeprefix(f"{file}: ")


def test_lists_of_sections_and_sections(file: Path) -> None:
    text = """
    name: north
    stops:
      - {place: mill, minutes: 3}
      - place: lake
        share: 1e-3
      - {place: "12"}
    crew: {driver: Bo, guides: [Cy, Di]}
    spare:
    kind: tram
    open: false
    length: 12
    fares: {short: 1, long: 2.5}
    """
    assert loaded(file, text) == Route(
        "north", (Stop("mill", 3), Stop("lake", share=0.001), Stop("12")),
        Crew("Bo", ("Cy", "Di")), None, "tram", False, 12, {"short": 1.0, "long": 2.5},
    )  # fmt: skip
    assert loaded(file, "name: x\nstops: []\ncrew:\nspare: {}") == Route("x", spare=Crew())


@given(
    st.lists(
        st.builds(
            Stop, st.text("abc :#-'", min_size=1), st.integers(0, 10**6), st.floats(-1e9, 1e9)
        ),
        max_size=4,
    )
)
def test_what_is_written_is_what_is_built(stops: list[Stop]) -> None:
    text = json.dumps({"name": "x", "stops": [asdict(stop) for stop in stops]})
    assert build(Route, parse_yaml(text), "") == Route("x", tuple(stops))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nnme: y", "no setting nme: did you mean name?"),
        ("name: x\nzzz: y", "no setting zzz: known are name, stops, crew, spare"),
        ("name: x\n1: y", "no setting 1: known are"),
        (
            "name: x\nstops: [{place: a}, {plaec: b}]",
            "no setting stops.1.plaec: did you mean place?",
        ),
        ("name: x\ncrew: {drivers: y}", "no setting crew.drivers: did you mean driver?"),
        ("name: x\nspare: {drivers: y}", "no setting spare.drivers: did you mean driver?"),
        ("stops: []", "there is no name"),
        ("name: x\nstops: [{place: a}, {minutes: 1}]", "there is no stops.1.place"),
        ("name: x\nstops: {place: a}", "stops is a list, got {'place': 'a'}"),
        ("name: x\nstops: 3", "stops is a list, got 3"),
        ("name: x\nstops:", "stops is a list, got None"),
        ("name: x\nstops: [3]", "stops.0 is a mapping of settings, got 3"),
        ("name: x\nstops: [{place: a}, ~]", "stops.1 is a mapping of settings, got None"),
        ("name: x\nstops: [[{place: a}]]", "stops.0 is a mapping of settings"),
        ("name: x\ncrew: [1]", "crew is a mapping of settings, got [1]"),
        ("name: x\nstops: [{place: a, minutes: -1}]", "stops.0: a stop lasts 0 minutes or more"),
    ],
)
def test_what_cannot_be_is_said_with_its_place(file: Path, text: str, message: str) -> None:
    assert refusal(file, text).startswith(message)


@pytest.mark.parametrize(
    ("text", "where", "got"),
    [
        ("name: 12", "name", "12"),
        ("name: [x]", "name", "['x']"),
        ("name: x\nstops: [{place: a, minutes: '3'}]", "stops.0.minutes", "'3'"),
        ("name: x\nstops: [{place: a, minutes: 3.5}]", "stops.0.minutes", "3.5"),
        ("name: x\nstops: [{place: a, minutes: true}]", "stops.0.minutes", "True"),
        ("name: x\nstops: [{place: a, minutes: }]", "stops.0.minutes", "None"),
        ("name: x\nstops: [{place: a, share: half}]", "stops.0.share", "'half'"),
        ("name: x\ncrew: {guides: [a, 2]}", "crew.guides.1", "2"),
        ("name: x\ncrew: {guides: a}", "crew.guides", "'a'"),
        ("name: x\nkind: train", "kind", "'train'"),
        ("name: x\nopen: 1", "open", "1"),
        ("name: x\nopen: off", "open", "'off'"),
        ("name: x\nlength: '1'", "length", "'1'"),
        ("name: x\nfares: {a: b}", "fares.a", "'b'"),
    ],
)
def test_values_of_another_type_are_refused(file: Path, text: str, where: str, got: str) -> None:
    said = refusal(file, text)
    assert said.startswith(f"{where} should be ")
    assert said.endswith(f", got {got}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nname: x", "name is there twice, in what begins in line 1"),
        (
            "name: x\nstops:\n- place: a\n  share: 1\n  place: b",
            "place is there twice, in what begins in line 3",
        ),
        ("name: x\nfares: {a: 1, a: 2}", "a is there twice"),
        ("name: x\nfares: {1: 1, 1: 2}", "1 is there twice"),
        ("", "there are no settings"),
        ("- name", "there are no settings"),
        ("name: [", "this is not YAML"),
        ("name: !!python/object:os.system x", "this is not YAML"),
        ("? [a]\n: b", "this is not YAML"),
    ],
)
def test_texts_that_are_no_settings(file: Path, text: str, message: str) -> None:
    assert refusal(file, text).startswith(message)


def test_files_that_cannot_be_read(file: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"route\.yaml cannot be read: No such file"):
        read_settings(file, Route)
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_settings(tmp_path, Route)
    file.write_bytes(b"name: \xff")
    with pytest.raises(DataError, match="cannot be read"):
        read_settings(file, Route)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001), ("1.3e-3", 0.0013), ("5.", 5.0), (".5", 0.5), ("-2", -2), ("+3", 3),
        ("1_000", 1000), ("off", "off"), ("yes", "yes"), ("no", "no"), ("true", True),
        ("null", None), ("~", None), ("010", 10.0), ("0x10", "0x10"), ("1:30", "1:30"),
        ("2020-01-01", "2020-01-01"), ("'1'", "1"),
    ],
)  # fmt: skip
def test_plain_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(text)
    assert (found, type(found)) == (value, type(value))


def test_a_few_settings_are_exchanged() -> None:
    route = Route("x", (Stop("a"),), fares={"short": 1.0})
    settings = {("crew", "driver"): "Bo", ("length",): 3, ("fares", "long"): 2}
    assert changed(route, settings, "") == Route(
        "x", (Stop("a"),), Crew("Bo"), length=3, fares={"short": 1.0, "long": 2.0}
    )
    assert changed(route, {("stops",): [{"place": "b"}]}, "").stops == (Stop("b"),)
    for path, value, message in (
        (("crew", "drivr"), "x", "no setting crew.drivr: did you mean driver?"),
        (("stops",), [{"place": 1}], "stops.0.place should be a valid string, got 1"),
        (("name", "first"), "x", "name is x: it has no settings of its own"),
        (("stops",), [{"place": "a", "minutes": -1}], "stops.0: a stop lasts"),
    ):
        with pytest.raises(SpecError) as caught:
            changed(route, {path: value}, "")
        assert str(caught.value).startswith(message)


def test_hints() -> None:
    assert near("epoch", ["epochs", "side"]) == "did you mean epochs?"
    assert near("q", ["epochs", "side"]) == "known are epochs, side"
