"""Packed files: what is read back is what was written, and takes the bits that it should."""

from __future__ import annotations

from pathlib import Path

import openvino as ov
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lab.baselines.finetune import to_openvino
from lab.baselines.pack import Format, decode, encode, on_grid, pack, packed_bytes, unpack
from t3c.errors import CorruptError, SpecError

SHAPES = [(1, 1), (3, 5), (4, 3, 2, 2), (7, 9)]


def weights(shape: tuple[int, ...], seed: int, kept: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * (torch.rand(shape, generator=generator) < kept)


class Net(nn.Module):
    """A convolution, a norm whose numbers matter, and two linear layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.register_buffer("steps", torch.arange(3))
        for value in (self.norm.weight, self.norm.bias, self.norm.running_mean):
            nn.init.normal_(value)  # type: ignore[arg-type]
        nn.init.uniform_(self.norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(self.one(self.norm(self.conv(x)).mean((2, 3))))
        return out


@pytest.fixture(scope="module")
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@given(st.sampled_from(SHAPES), st.integers(2, 8), st.booleans(), st.integers(0, 99))
def test_what_is_decoded_is_the_weight_on_its_grid(
    shape: tuple[int, ...], bits: int, sparse: bool, seed: int
) -> None:
    weight, form = weights(shape, seed, kept=0.5), Format(bits, sparse)
    rounded = on_grid(weight, form)
    raw = encode(weight, form)
    assert torch.equal(decode(raw, shape, Format(bits, sparse)), rounded)
    step = weight.flatten(1).abs().amax(1) / form.top
    off = (weight - rounded).flatten(1).abs().amax(1)
    assert bool((off <= step * 0.5001).all())
    left = int((rounded != 0).sum()) if sparse else weight.numel()
    bitmap = -(-weight.numel() // 8) if sparse else 0
    assert len(raw) == 4 * shape[0] + bitmap + -(-left * bits // 8)


@given(st.integers(2, 8), st.integers(0, 99))
def test_a_weight_that_is_on_its_grid_stays_as_it_is(bits: int, seed: int) -> None:
    scale = weights((6,), seed).abs() + 0.01
    codes = torch.randint(
        -(2 ** (bits - 1) - 1), 2 ** (bits - 1), (6, 11), generator=torch.Generator().manual_seed(1)
    )
    weight = codes * scale[:, None]
    form = Format(bits, scale=scale)
    assert torch.equal(decode(encode(weight, form), (6, 11), form), weight)


def test_a_file_has_every_tensor_once_and_exactly(net: Net) -> None:
    formats = {"conv.weight": Format(4), "two.weight": Format(8, sparse=True)}
    found = unpack(pack(net, formats))
    assert torch.equal(found.pop("conv.weight"), on_grid(net.conv.weight, Format(4)))
    assert torch.equal(found.pop("two.weight"), on_grid(net.one.weight, Format(8)))
    scale, shift = found.pop("norm.scale"), found.pop("norm.shift")
    x = torch.randn(2, 8, 4, 4)
    torch.testing.assert_close(x * scale[:, None, None] + shift[:, None, None], net.norm(x))
    rest = {"conv.bias": net.conv.bias, "one.bias": net.one.bias, "two.bias": net.two.bias}
    assert set(found) == {*rest, "steps"}  # the shared weight and the norm's own are not repeated
    for name, value in rest.items():
        assert value is not None
        assert torch.equal(found[name], value)
    assert found["steps"].tolist() == [0, 1, 2]


def test_fewer_bits_and_zeros_take_less(net: Net) -> None:
    size = net.conv.weight.numel()
    plain, eight, four = (
        len(pack(net, formats))
        for formats in ({}, {"conv.weight": Format(8)}, {"conv.weight": Format(4)})
    )
    assert plain - eight == pytest.approx(3 * size - 4 * 8, abs=16)  # but for the header
    assert eight - four == size // 2
    raw = weights((64, 100), 0, kept=0.25)
    assert len(encode(raw, Format(8, sparse=True))) < 0.4 * len(encode(raw, Format(8)))


def test_the_size_on_disk_counts_the_topology(net: Net, tmp_path: Path) -> None:
    graph = to_openvino(net, torch.zeros(1, 3, 8, 8))
    ov.save_model(graph, tmp_path / "model.xml", compress_to_fp16=False)
    formats = {"conv.weight": Format(4)}
    expected = len(pack(net, formats)) + (tmp_path / "model.xml").stat().st_size
    assert packed_bytes(net, formats, graph) == expected


def test_rows_of_zeros_are_written() -> None:
    weight = torch.zeros(2, 4)
    weight[1] = torch.tensor([1.0, -1.0, 0.0, 1.0])
    for sparse in (False, True):
        form = Format(3, sparse)
        assert torch.equal(decode(encode(weight, form), (2, 4), form), weight)


def test_what_cannot_be_is_refused(net: Net) -> None:
    with pytest.raises(SpecError, match=r"bits must be in 2\.\.8, got 9"):
        Format(9)
    with pytest.raises(SpecError, match="the model has no weight head"):
        pack(net, {"head": Format(8)})
    with pytest.raises(SpecError, match=r"3 rows have scales of shape \(2,\)"):
        encode(torch.ones(3, 2), Format(8, scale=torch.ones(2)))
    with pytest.raises(CorruptError, match=r"no weight of shape \(3, 5\) in 4 bits"):
        decode(encode(torch.ones(3, 5), Format(8)), (3, 5), Format(4))
