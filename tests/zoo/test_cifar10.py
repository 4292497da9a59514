"""CIFAR-10 from small files of the package's format, and its networks with and without weights."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from t3c.artifact.graph import to_onnx
from t3c.engines.torch_operations import OPERATIONS
from t3c.errors import DataError
from t3c.zoo import cifar10 as zoo

ROWS = {"train": 2, "test": 3}
STD, MEAN = (torch.tensor(v)[:, None, None] for v in (zoo.IMAGE.std, zoo.IMAGE.mean))


def _has_cifar10() -> bool:
    try:
        return zoo.cifar10_folder().is_dir()
    except DataError:
        return False


needs_weights = pytest.mark.skipif(not os.environ.get("T3C_DATA"), reason="T3C_DATA is not set")
needs_images = pytest.mark.skipif(not _has_cifar10(), reason="t3c data get cifar10 has not run")


def pixels(part: str) -> np.ndarray:
    """Pixels (sheets * rows, 32, 32, 3) of a part, no two images alike."""
    count = len(zoo.SHEETS[part]) * ROWS[part]
    return np.random.default_rng(count).integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-10 of five sheets of two images to train on and one of three to test on."""
    for part, rows in ROWS.items():
        sheets = pixels(part).reshape(-1, rows, 1024, 3)
        for name, sheet in zip(zoo.SHEETS[part], sheets, strict=True):
            Image.fromarray(sheet).save(tmp_path / name)
        labels = list(range(len(pixels(part))))
        (tmp_path / zoo.LABELS[part]).write_text(json.dumps(labels))
    monkeypatch.delenv("T3C_DATA", raising=False)
    monkeypatch.setenv("T3C_CIFAR10", str(tmp_path))
    return tmp_path


def raw(images: Tensor) -> Tensor:
    """Pixels (n, 3, 32, 32) in 0..255 of normalised images."""
    return (images * STD + MEAN) * 255


@pytest.mark.parametrize("part", ["train", "test"])
def test_a_row_is_an_image_line_by_line_of_rgb(folder: Path, part: zoo.Part) -> None:
    images, labels = zoo.cifar10(part)
    expected = torch.from_numpy(pixels(part)).permute(0, 3, 1, 2).float()
    torch.testing.assert_close(raw(images), expected, atol=1e-3, rtol=0)
    assert labels.tolist() == list(range(len(expected)))


def test_a_known_pixel_is_where_it_belongs(folder: Path) -> None:
    sheet = Image.new("RGB", (1024, 3))
    sheet.putpixel((5 * 32 + 7, 1), (255, 0, 51))  # line 5, column 7 of the second image
    sheet.save(folder / "test_batch.png")
    images, _ = zoo.cifar10("test")
    expected = torch.zeros(3, 3, 32, 32)
    expected[1, :, 5, 7] = torch.tensor([255.0, 0.0, 51.0])
    torch.testing.assert_close(raw(images), expected, atol=1e-3, rtol=0)


def test_the_first_images_are_read(folder: Path) -> None:
    images, labels = zoo.cifar10("train", 3)
    everything, _ = zoo.cifar10("train")
    assert labels.tolist() == [0, 1, 2]
    assert torch.equal(images, everything[:3])
    with pytest.raises(DataError, match="there are 3 test images, 4 were asked for"):
        zoo.cifar10("test", 4)
    with pytest.raises(DataError, match="got 'valid'"):
        zoo.cifar10("valid")  # type: ignore[arg-type]


def test_images_and_labels_must_be_as_many(folder: Path) -> None:
    (folder / "train_lables.json").write_text("[1, 2, 3]")
    with pytest.raises(DataError, match="10 train images and 3 labels"):
        zoo.cifar10("train", 2)


@pytest.mark.parametrize("text", ["[1, 2", "{}", "[1, 2, 10]", "[1, 2, -1]", '[1, 2, "3"]', "\xff"])
def test_labels_that_are_none_are_refused(folder: Path, text: str) -> None:
    path = folder / "test_lables.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"test_lables\.json") as refusal:
        zoo.cifar10("test")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["data_batch_4.png", "train_lables.json"])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(DataError, match=name):
        zoo.cifar10("train")


@pytest.mark.parametrize("kept", [0, 10, 20, 40, 100, 0.5, 0.99])
def test_a_truncated_sheet_is_refused(folder: Path, kept: float) -> None:
    path = folder / "test_batch.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(DataError, match=r"test_batch\.png cannot be read") as refusal:
        zoo.cifar10("test")
    assert "\n" not in str(refusal.value)


def test_a_sheet_of_another_width_is_refused(folder: Path) -> None:
    Image.new("RGB", (3072, 3)).save(folder / "test_batch.png")
    with pytest.raises(DataError, match="rows of 3072 pixels, an image has 1024"):
        zoo.cifar10("test")


def test_where_it_is_looked_for(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("root")
    monkeypatch.chdir(root)
    monkeypatch.setenv("T3C_DATA", str(root))
    assert zoo.cifar10_folder() == folder
    (root / "cifar10").mkdir()
    assert zoo.cifar10_folder() == root / "cifar10"
    monkeypatch.delenv("T3C_DATA")
    monkeypatch.setenv("T3C_CIFAR10", "nowhere")
    with pytest.raises(DataError, match="nowhere is no folder: run `t3c data get cifar10`"):
        zoo.cifar10("test")
    monkeypatch.delenv("T3C_CIFAR10")
    with pytest.raises(
        DataError, match="out/data/cifar10 is no folder: run `t3c data get cifar10`"
    ):
        zoo.cifar10("test")
    (root / "out/data/cifar10").mkdir(parents=True)
    assert zoo.cifar10_folder() == Path("out/data/cifar10")


@pytest.fixture(scope="module")
def net() -> nn.Module:
    """A ResNet-20 with random weights and statistics, so that no norm is the identity."""
    torch.manual_seed(0)
    model = zoo.CifarResNet(20).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.running_mean, std=0.2)  # type: ignore[arg-type]
    return model


def test_a_shortcut_subsamples_and_pads_on_both_sides() -> None:
    x = torch.randn(2, 16, 8, 8)
    y = zoo.Block(16, 32, 2).shortcut(x)
    assert torch.equal(y[:, 8:24], x[:, :, ::2, ::2])
    assert not y[:, :8].any()
    assert not y[:, 24:].any()
    assert zoo.Block(16, 16, 1).shortcut(x) is x


@pytest.mark.parametrize(("depth", "parameters"), [(20, 269_722), (56, 853_018)])
def test_depth_counts_the_layers_with_weights(depth: zoo.Depth, parameters: int) -> None:
    model = zoo.CifarResNet(depth)
    weighty = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(weighty) == depth
    assert sum(p.numel() for p in model.parameters()) == parameters
    with pytest.raises(DataError, match="20 or 56, got 32"):
        zoo.CifarResNet(32)  # type: ignore[arg-type]


def test_a_graph_with_a_free_batch_size_computes_the_same(net: nn.Module) -> None:
    model = to_onnx(net, torch.randn(2, 3, 32, 32))
    onnx.checker.check_model(model)
    assert {node.op_type for node in model.graph.node} <= {*OPERATIONS, "Constant"}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    ort = pytest.importorskip("onnxruntime")
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for count in (1, 5):
        x = torch.randn(count, 3, 32, 32)
        with torch.inference_mode():
            expected = net(x).numpy()
        np.testing.assert_allclose(session.run(None, {"input": x.numpy()})[0], expected, atol=1e-4)


@pytest.fixture
def weights(net: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The network's weights as the data folder has them: without the counts of batches."""
    path = tmp_path / "cifar10-resnets" / "resnet20.safetensors"
    path.parent.mkdir()
    state = net.state_dict()
    save_file({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}, path)
    monkeypatch.setenv("T3C_DATA", str(tmp_path))
    return path


def test_weights_are_loaded(net: nn.Module, weights: Path) -> None:
    loaded = zoo.resnet(20)
    x = torch.randn(2, 3, 32, 32)
    assert not loaded.training
    with torch.inference_mode():
        assert torch.equal(loaded(x), net(x))


def test_weights_that_do_not_fit_are_refused(net: nn.Module, weights: Path) -> None:
    with pytest.raises(DataError, match=r"does not hold cifar10-resnets/resnet56"):
        zoo.resnet(56)
    whole, state = weights.read_bytes(), net.state_dict()
    kept = {k: v for k, v in state.items() if k != "linear.bias"}
    spoilt = [{**state, "extra": torch.zeros(1)}, kept, {**kept, "linear.bias": torch.zeros(9)}]
    for tensors in spoilt:
        save_file(tensors, weights)
        with pytest.raises(DataError, match=r"of ResNet-20: .*(extra|linear\.bias)") as e:
            zoo.resnet(20)
        assert "\n" not in str(e.value)
    weights.write_bytes(whole[:-5])
    with pytest.raises(DataError, match="no weights of ResNet-20"):
        zoo.resnet(20)


@pytest.mark.data
@needs_weights
@needs_images
@pytest.mark.parametrize("depth", [20, 56])
def test_the_networks_know_the_images(depth: zoo.Depth) -> None:
    model = zoo.resnet(depth)
    for part, least in (("test", 0.88), ("train", 0.97)):
        images, labels = zoo.cifar10(part, 400)  # type: ignore[arg-type]
        with torch.inference_mode():
            logits = model(images)
        assert (logits.argmax(1) == labels).float().mean() > least
        assert F.cross_entropy(logits, labels) < 0.6
