"""Policies on the Hugging Face Hub: pushed with a model card, pulled, and read by `ps.load`; never any code."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.core.errors import CheckpointError, ConfigError, MissingExtraError, PenstockError
from penstock.core.files import require_name
from penstock.learn.policy_file import read_policy_file
from penstock.run.checkpoints.load import load
from penstock.run.sharing.card import CARD, CONTRACT, POLICY, write_bundle

SCHEME = "hf:"
"""Begins a name that `ps.load` takes in place of a path."""
FILES = (CARD, POLICY, CONTRACT, "curve.png", "replay.mp4")
"""All that is pushed or pulled; whatever else a repository holds stays there."""
_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*(@[\w./-]+)?", re.ASCII)
_TIMEOUT_S = 60.0
_LISTED = 5


class Transferred(NamedTuple):
    """The result of a push or pull."""

    where: str
    """Address of the repository; of a pull the folder."""
    files: list[str]
    left: list[str]
    """Files of the repository that were not touched."""


def push_run(
    run_dir: Path, name: str, which: str = "last", *, private: bool | None = None, trust: bool = False
) -> Transferred:
    """Pushes the policy of a run with its model card as one commit; a new repository is made.

    Args:
        name: `user/name`. private: of a new repository; None for the account's default.

    Raises:
        CheckpointError: no run, or without such a checkpoint. MissingExtraError: huggingface_hub is not installed.
            ConfigError: no such name, no token or one without the right, or a policy that cannot be saved.
            PenstockError: the Hub cannot be reached, or fails.
    """
    policy = load(run_dir, which, trust=trust)
    with _api(f"push to {name}") as api:
        repo, revision = _parts(name)
        if revision:
            raise ConfigError(f"push to {name!r}; expected user/name: a push goes to the newest revision")
        api.whoami()  # before anything is made; without a token it asks nobody
    with tempfile.TemporaryDirectory(prefix="penstock-push-") as folder:
        write_bundle(policy, run_dir, which, Path(folder), repo)
        with _api(f"push to {repo}") as api:
            api.create_repo(repo, private=private, exist_ok=True)
            before = api.list_repo_files(repo)
            api.upload_folder(
                repo_id=repo,
                folder_path=folder,
                allow_patterns=list(FILES),
                delete_patterns=list(FILES),  # those of an earlier push that this one lacks
                commit_message=f"penstock push, checkpoint {which}",
            )
        files = sorted(os.listdir(folder))
    return Transferred(f"{_endpoint()}/{repo}", files, _others(before))


def pull_run(name: str, folder: Path) -> Transferred:
    """Copies what `push_run` wrote into a folder, which must be absent or empty.

    Raises:
        MissingExtraError, ConfigError, PenstockError: as `push_run`; ConfigError also for a folder that holds
            something. CheckpointError: the repository holds no policy of penstock, or the folder cannot be written.
    """
    repo, revision = _parts(name)
    require_name(folder, "the folder")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} holds something already, which was not touched; choose another folder")
    with _api(f"pull {name}") as api:
        info = api.model_info(repo, revision=revision)  # all files of one commit
        listed = [entry.rfilename for entry in info.siblings or ()]
        if POLICY not in listed:
            raise CheckpointError(
                f"{name} holds no {POLICY}, so `penstock push` did not write it; it has {_in_words(listed)}"
            )
        found = {file: api.hf_hub_download(repo, file, revision=info.sha) for file in FILES if file in listed}
    _require_policy(name, Path(found[POLICY]))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            staged = Path(temporary) / "files"
            staged.mkdir()
            for file, path in found.items():
                shutil.copyfile(path, staged / file)
            if folder.exists():
                folder.rmdir()
            staged.rename(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}; choose another place") from error
    return Transferred(str(folder), sorted(found), _others(listed))


def fetch_policy(name: str) -> Path:
    """The policy's file of `hf:user/name` or `hf:user/name@revision` in the local cache of huggingface_hub.

    Without network it is the one that was fetched before. Errors as in `pull_run`.
    """
    repo, revision = _parts(name.removeprefix(SCHEME))
    with _api(f"load {name}") as api:
        path = Path(api.hf_hub_download(repo, POLICY, revision=revision)).resolve()
    _require_policy(name, path)
    return path


def _require_policy(name: str, path: Path) -> None:
    """Raises CheckpointError, with the name of the repository, unless a fetched file is one of `policy.save`."""
    path = path.resolve()
    try:
        read_policy_file(path)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error} (remove that file from the cache to have it fetched anew)") from error


def _parts(name: str) -> tuple[str, str | None]:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} names no repository; expected user/name, or user/name@revision")
    repo, _, revision = name.partition("@")
    return repo, revision or None


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _others(files: Sequence[str]) -> list[str]:
    return [file for file in files if file not in FILES and file != ".gitattributes"]


def _in_words(files: Sequence[str]) -> str:
    more = f" and {len(files) - _LISTED:,} more" if len(files) > _LISTED else ""
    return f"{', '.join(map(repr, files[:_LISTED]))}{more}" if files else "no files"


@contextlib.contextmanager
def _api(doing: str) -> Generator[Any]:
    """The client of huggingface_hub, whose errors in the block become one line."""
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]
        from huggingface_hub import errors, utils  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MissingExtraError("huggingface_hub", "hub") from error
    utils.get_session().timeout = _TIMEOUT_S  # else a server that never answers is waited for without end
    where, login = _endpoint(), "log in by `hf auth login`, or set HF_TOKEN"
    unreachable = f"{where} cannot be reached, and it was not fetched before; check the network"
    explained: dict[Any, PenstockError] = {  # the first class that fits
        errors.LocalTokenNotFoundError: ConfigError(f"no token of {where}; {login}"),
        errors.GatedRepoError: ConfigError(f"its owner grants access one by one; ask for it on {where}"),
        errors.RepositoryNotFoundError: ConfigError(
            f"{where} shows no such repository; check the name, or if private {login}"
        ),
        errors.RevisionNotFoundError: ConfigError(f"there is no such revision on {where}"),
        errors.LocalEntryNotFoundError: PenstockError(unreachable),
        errors.EntryNotFoundError: CheckpointError(f"it holds no {POLICY}, so `penstock push` did not write it"),
    }
    try:
        yield huggingface_hub.HfApi(endpoint=where, library_name="penstock")
    except PenstockError:
        raise
    except Exception as error:  # also of the HTTP client, which differs between versions of huggingface_hub
        found = next((found for kind, found in explained.items() if isinstance(error, kind)), None)
        if found is None:
            code = getattr(getattr(error, "response", None), "status_code", None)
            text = f"{where}: {type(error).__name__}: {_line(error)}; check the network"
            if code is not None:
                cure = f"; {login}, with the right to write where you push" if code in (401, 403) else ""
                text = f"{where} answered {code}: {_line(error)}{cure}"
            found = (ConfigError if code in (401, 403) else PenstockError)(text)
        raise type(found)(f"{doing}: {found}") from error


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
