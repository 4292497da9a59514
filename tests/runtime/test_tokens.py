"""Text in an artifact: the tokenizer it carries, what becomes of a text, what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from decoders import MadeDecoder, fast_tokenizer, words
from t3c.artifact.folder import MANIFEST
from t3c.artifact.manifest import TOKENIZER, ModelEntry, TensorEntry
from t3c.artifact.reader import Artifact
from t3c.artifact.trim import trim
from t3c.errors import ArtifactError, CorruptError, DataError, MissingExtraError, SpecError
from t3c.runtime.remarks import Code, Remark
from t3c.runtime.tokens import Continued, Tokenizer, prompt_ids, read_tokenizer, text_inputs
from t3c.spec import TextSpec

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def artifact(decoder: MadeDecoder, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(decoder.path, tmp_path / "m.t3c"))


def made(length: int | None = None) -> Tokenizer:
    return Tokenizer(words(length).to_str().encode(), "here")


def test_an_artifact_carries_its_tokenizer(decoder: MadeDecoder, tmp_path: Path) -> None:
    opened = Artifact(decoder.path)
    assert opened.tokenizer == (decoder.path / TOKENIZER).read_bytes()
    assert opened.manifest.model.text == TextSpec(bos=1, stop=(2,))
    mine = Tokenizer.of(opened)
    assert mine.encode("w5 w7 w99 what") == [5, 7, 99, 0]
    assert mine.decode([1, 5, 7, 2]) == "w5 w7"
    part = trim(opened, ["tiny"], tmp_path / "part.t3c")
    assert part.tokenizer == opened.tokenizer
    assert part.manifest.model.text == opened.manifest.model.text
    # What a profile needs to run does not depend on it.
    sizes = {profile.name: profile.size_bytes for profile in opened.manifest.profiles}
    assert sizes["max"] <= opened.content_bytes() < opened.size_on_disk()


def test_what_was_changed_is_refused(artifact: Path, flip: Callable[[Path, int], None]) -> None:
    file = artifact / TOKENIZER
    raw = file.read_bytes()
    flip(file, 40)
    with pytest.raises(CorruptError, match=r"tokenizer\.json: its hash is not the manifest's"):
        Artifact(artifact)
    file.write_bytes(raw[:-1])
    with pytest.raises(CorruptError, match=r"tokenizer\.json: \d+ bytes, the manifest says"):
        Artifact(artifact, verify=False)
    file.unlink()
    with pytest.raises(CorruptError, match=r"tokenizer\.json: missing, or not a plain file"):
        Artifact(artifact)
    elsewhere = artifact.parent / "elsewhere.json"
    elsewhere.write_bytes(raw)
    file.symlink_to(elsewhere)
    with pytest.raises(CorruptError, match="not a plain file"):
        Artifact(artifact)


def test_what_the_manifest_does_not_name_is_not_read(artifact: Path) -> None:
    manifest = json.loads((artifact / MANIFEST).read_text())
    del manifest["files"][TOKENIZER], manifest["model"]["text"]
    (artifact / MANIFEST).write_text(json.dumps(manifest))
    opened = Artifact(artifact)
    assert opened.tokenizer is None
    assert opened.manifest.model.text is None
    with pytest.raises(DataError, match="no tokenizer in it: give one, or export it with"):
        Tokenizer.of(opened)
    assert Tokenizer.of(opened, artifact).encode("w5") == [5]
    manifest["files"]["code.py"] = manifest["files"]["graph.onnx"]
    (artifact / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match=r"files must be graph\.onnx"):
        Artifact(artifact)
    del manifest["files"]["code.py"]
    manifest["model"]["text"] = {"bos": -1}
    (artifact / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(CorruptError, match="tokens are whole numbers from 0"):
        Artifact(artifact)


def test_a_tokenizer_is_a_file_a_folder_or_a_fast_one(tmp_path: Path) -> None:
    raw = words().to_str().encode()
    (tmp_path / TOKENIZER).write_bytes(raw)
    assert read_tokenizer(tmp_path) == (raw, None)
    assert read_tokenizer(str(tmp_path / TOKENIZER)) == (raw, None)
    fast, spec = read_tokenizer(fast_tokenizer())
    assert Tokenizer(fast, "fast").encode("w5 w6") == [5, 6]
    assert spec == TextSpec(bos=1, stop=(2,))
    with pytest.raises(DataError, match=r"none/tokenizer\.json: no such file|none: no such file"):
        read_tokenizer(tmp_path / "none")
    with pytest.raises(DataError, match="int: not a path and not a fast tokenizer"):
        read_tokenizer(5)
    for text in (b"{", b"\xff", b"{}"):
        (tmp_path / TOKENIZER).write_bytes(text)
        with pytest.raises(ArtifactError, match=r"not a tokenizer: "):
            read_tokenizer(tmp_path)
    with pytest.raises(SpecError, match="tokens are whole numbers from 0"):
        TextSpec(stop=(-2,))


def test_a_prompt_begins_as_texts_do() -> None:
    assert prompt_ids(made(), "w5 w6", TextSpec(bos=1)).tolist() == [[1, 5, 6]]
    assert prompt_ids(made(), "<s> w5", TextSpec(bos=1)).tolist() == [[1, 5]]
    assert prompt_ids(made(), "w5", TextSpec()).tolist() == [[5]]
    assert prompt_ids(made(), "w5", None).tolist() == [[5]]
    for nothing in ("", " \n"):
        with pytest.raises(DataError, match="the prompt is empty"):
            prompt_ids(made(), nothing, None)
    with pytest.raises(DataError, match="here: cannot encode the prompt"):
        prompt_ids(made(), "\udcff", None)


def entry(name: str, *sizes: int | str | None, dtype: str = "int64") -> TensorEntry:
    return TensorEntry(name=name, dtype=dtype, shape=(None, *sizes))


def model(*inputs: TensorEntry) -> ModelEntry:
    return ModelEntry(name="net", parameters=1, inputs=inputs, outputs=(), quantized=())


def test_text_is_padded_and_cut_to_what_a_model_takes() -> None:
    names = ("input_ids", "attention_mask", "token_type_ids")
    fixed = model(*(entry(name, 4) for name in names))
    inputs, warnings = text_inputs(made(length=9), "w5 w6", fixed)
    told = {name: value.tolist() for name, value in inputs.items()}
    assert told == {
        "input_ids": [[5, 6, 7, 7]], "attention_mask": [[1, 1, 0, 0]],
        "token_type_ids": [[0, 0, 0, 0]],
    }  # fmt: skip
    assert warnings == []
    inputs, warnings = text_inputs(made(), "w5 w6 w7 w8 w9", fixed)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert warnings == [Remark(Code.PROMPT_CUT, count=5, limit=4)]
    assert str(warnings[0]) == "the prompt of 5 tokens was cut to 4"
    inputs, warnings = text_inputs(made(length=9), "w5 w6", model(entry("input_ids", "sequence")))
    assert inputs["input_ids"].tolist() == [[5, 6]]
    assert warnings == []
    inputs, warnings = text_inputs(made(), "w5 w6", model(entry("x", 3, dtype="int32")))
    assert inputs["x"].tolist() == [[5, 6, 0]]
    assert inputs["x"].dtype == np.int32
    assert [warning.code for warning in warnings] == [Code.PADDING_READ]
    assert str(warnings[0]) == "net takes no attention_mask: 1 tokens of padding count as text"


def test_what_is_cut_still_ends_as_texts_do() -> None:
    rust = words()
    special = [("<s>", 1), ("</s>", 2)]
    rust.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", None, special)
    ended = Tokenizer(rust.to_str().encode(), "here")
    inputs, _ = text_inputs(ended, "w5 w6 w7 w8", model(entry("input_ids", 4)))
    assert inputs["input_ids"].tolist() == [[1, 5, 6, 2]]


@pytest.mark.parametrize(
    "inputs",
    [
        (entry("x", 3, dtype="float32"),),
        (entry("input_ids", 3), entry("pixels", 3)),
        (entry("a", 3), entry("attention_mask", 3)),
    ],
)
def test_a_model_that_takes_no_text_is_refused(inputs: tuple[TensorEntry, ...]) -> None:
    with pytest.raises(DataError, match=r"net takes .*: text gives input_ids, attention_mask"):
        text_inputs(made(), "w5", model(*inputs))


def test_pieces_are_whole_characters_and_make_the_text() -> None:
    """Bytes as tokens: a character of three of them is told with the last."""
    vocabulary = {
        letter: i for i, letter in enumerate(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    }
    rust = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    rust.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = tokenizers.decoders.ByteLevel()
    bytes_ = Tokenizer(rust.to_str().encode(), "here")
    prompt, more = bytes_.encode("ab"), bytes_.encode(" 日x")
    said = Continued(bytes_, prompt)
    assert [said.add(token) for token in more] == [" ", "", "", "日", "x"]
    assert said.add(more[1]) == ""  # never finished, and told at the end
    assert said.text == " 日x�"
    assert said.rest() == "�"
    assert said.rest() == ""


def test_spaces_between_prompt_and_text_are_kept() -> None:
    said = Continued(made(), [1, 5])
    assert [said.add(token) for token in (6, 2, 7)] == [" w6", "", " w7"]
    assert said.text == " w6 w7"


def test_a_missing_library_says_which_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = words().to_str().encode()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"tokenizers is not installed.*t3c\[text\]"):
        Tokenizer(raw, "here")
