"""The evaluation text: two splits that share no paragraph, always the same; WikiText-2 only if its bytes are right."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path

import pytest

from artifact import text
from artifact.errors import UserError


@pytest.fixture(autouse=True)
def own_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ARTIFACT_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def paragraphs(part: text.Text) -> set[str]:
    return {" ".join(each.split()) for each in part.text.split("\n\n")} - {""}


def test_python_docs_are_two_disjoint_halves_long_enough_for_8k_contexts() -> None:
    one, other = text.load(None, "evaluation"), text.load(None, "calibration")
    assert not paragraphs(one) & paragraphs(other)
    assert min(len(one.text), len(other.text)) > 120_000  # about 4 characters a token: three windows of 8K tokens
    assert "pydoc_data" in one.origin and one.sha256 == hashlib.sha256(one.text.encode()).hexdigest()
    assert text.load(None, "evaluation") == one
    assert one.sha256[:12] in one.label and one.origin in one.label


def test_repeats_across_topics_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    import pydoc_data.topics

    topics = {"b": "shared\n\nonly b", "a": "shared\n\nonly a", "c": "only  a\n\nc"}
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)
    assert text.load(None, "evaluation").text == "shared\n\nonly a\n\nc\n"
    assert text.load(None, "calibration").text == "only b\n"


def test_a_python_without_its_documentation_names_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pydoc_data.topics", None)
    with pytest.raises(UserError, match="--text"):
        text.load(None, "evaluation")


def test_a_file_is_cut_at_a_line_end_into_disjoint_halves(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("".join(f"line {n}\n" for n in range(100)), encoding="utf-8")
    one, other = text.load(str(file), "evaluation"), text.load(str(file), "calibration")
    assert one.text + other.text == file.read_text() and one.text.endswith("\n")
    assert abs(len(one.text) - len(other.text)) < 20 and "own.txt" in one.name


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (b"", "two halves"),
        (b"one line", "two halves"),
        (b"a\xff\n" * 9, r"not UTF-8 text \(byte 1\)"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: bytes | None, words: str) -> None:
    file = tmp_path / "bad.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=words):
        text.load(str(file), "evaluation")


def test_an_unknown_split_is_our_bug() -> None:
    with pytest.raises(ValueError, match="neither"):
        text.load(None, "train")  # type: ignore[arg-type]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for huggingface_hub and datasets: they serve the files of a folder, one row a line."""
    library, served = tmp_path / "library", tmp_path / "served"
    library.mkdir()
    served.mkdir()
    (library / "huggingface_hub.py").write_text(
        "import pathlib\n"
        "def hf_hub_download(dataset, name, repo_type, revision, local_files_only):\n"
        f"    file = pathlib.Path({str(served)!r}) / pathlib.Path(name).name\n"
        "    if local_files_only and not (file.parent / 'cached').exists(): raise FileNotFoundError(name)\n"
        "    return str(file)\n"
    )
    (library / "datasets.py").write_text(
        "def load_dataset(kind, data_files, split, cache_dir):\n"
        "    return {'text': open(data_files, newline='').read().splitlines(keepends=True)}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(library))
    monkeypatch.setattr(text, "_hub_reachable", lambda: True)
    pins = {}
    for split, (name, _) in text.PARQUET.items():
        content = f" = {split} = \n\n text of {split} \n".encode()
        (served / Path(name).name).write_bytes(content)
        pins[split] = (name, hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(text, "PARQUET", pins)
    return served


def test_wikitext_is_fetched_verified_and_then_used(hub: Path) -> None:
    assert "fetched and verified" in text.fetch_wikitext()
    part = text.load(None, "evaluation")
    assert part.text == " = evaluation = \n\n text of evaluation \n" and text.REVISION[:12] in part.origin
    assert "calibration" in text.load(None, "calibration").text
    assert "verified copy" in text.fetch_wikitext()


def test_a_cached_dataset_needs_no_network(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_hub_reachable", lambda: pytest.fail("asked the network"))
    (hub / "cached").touch()
    assert "fetched" in text.fetch_wikitext()


def test_wikitext_of_other_bytes_is_not_used(hub: Path) -> None:
    (hub / "test-00000-of-00001.parquet").write_bytes(b"something else\n")
    assert "pinned is" in text.fetch_wikitext()
    assert "pydoc_data" in text.load(None, "evaluation").origin


def test_a_copy_altered_later_is_not_used(hub: Path, own_data_folder: Path) -> None:
    text.fetch_wikitext()
    (own_data_folder / "text" / "wikitext-2-evaluation.txt").write_text("altered\n")
    assert "pydoc_data" in text.load(None, "evaluation").origin


def test_one_split_alone_is_never_mixed_with_the_other_text(hub: Path, own_data_folder: Path) -> None:
    text.fetch_wikitext()
    (own_data_folder / "text" / "wikitext-2-calibration.txt").unlink()
    assert {text.load(None, split).origin.split()[0] for split in ("evaluation", "calibration")} == {"pydoc_data"}


def test_an_unreachable_hub_is_given_up_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    assert not text._hub_reachable()
    assert time.monotonic() - start < text.REACH_S + 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(text.threading, "Thread", lambda **_: pytest.fail("asked the network"))
    assert not text._hub_reachable()
