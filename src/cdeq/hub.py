"""Folders on the Hugging Face hub, by huggingface_hub's own mixin; what is in a folder is not its concern.

The package is an extra, imported when it is needed.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

FILES = ("*.json", "*.safetensors", "README.md")
"""What is fetched of a repository: data alone, never code or pickles."""


class HubError(Exception):
    """A repository that cannot be read or written, with the reason."""


def fetch_folder(repo_id: str, **where: Any) -> Path:
    """The files of a repository in the local cache, downloaded if need be.

    `where`: revision, cache_dir, token, local_files_only and force_download, as huggingface_hub has them.
    """
    folder_class = _folder_class()
    with _one_line(repo_id, where.get("revision")):
        return folder_class.from_pretrained(repo_id, **where).path


def push_folder(folder: Path, repo_id: str, **options: Any) -> str:
    """Upload a folder as one commit, making the repository if there is none; returns the commit's address.

    `options`: private, token, branch, commit_message, create_pr and so on, as huggingface_hub has them.
    """
    folder_class = _folder_class()
    with _one_line(repo_id, options.get("branch")):
        return folder_class(folder).push_to_hub(repo_id, **options)


# The mixin as a base class of Student would be imported with cdeq. So what it saves and loads is a folder, by a class
# made when it is first needed; this also keeps its hands off a student's config.json, which it would delete first.
@cache
def _folder_class() -> Any:
    try:
        hub = import_module("huggingface_hub")
    except ImportError as error:
        raise ImportError(
            "repositories of the hub come with huggingface_hub, which is not installed: pip install 'cdeq[hub]'"
        ) from error

    class HubFolder(hub.ModelHubMixin, library_name="cdeq"):  # type: ignore[name-defined, call-arg]
        def __init__(self, path: str | Path):
            self.path = Path(path)

        def _save_pretrained(self, save_directory: Path) -> None:
            shutil.copytree(self.path, save_directory, dirs_exist_ok=True)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **where: Any) -> Any:
            known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
            given = {name: where[name] for name in known}
            return cls(hub.snapshot_download(model_id, allow_patterns=list(FILES), **given))

    return HubFolder


@contextmanager
def _one_line(repo_id: str, revision: str | None) -> Iterator[None]:
    """What goes wrong between here and the hub as one line that says what to do."""
    errors = import_module("huggingface_hub.errors")
    name = repo_id if revision is None else f"{repo_id} at revision {revision}"
    try:
        yield
    except errors.HFValidationError:
        problem = f"{repo_id!r} is neither a folder nor the name of a repository, as 'owner/name'"
        raise HubError(problem) from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        problem = "is not in the cache, and the hub cannot be reached or may not be asked"
        raise HubError(f"{name} {problem}") from error
    except errors.RevisionNotFoundError as error:
        raise HubError(f"{repo_id} has no revision {revision}") from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(f"there is no repository {repo_id}, or it needs a `token`") from error
    except (ValueError, AttributeError) as error:  # the mixin looks into config.json before we do
        raise HubError(f"{name} has a config.json that cannot be read: {error}") from error
    except (OSError, errors.HTTPError) as error:
        told = " ".join(str(error).split())
        raise HubError(f"{name}: {type(error).__name__}: {told}") from error
