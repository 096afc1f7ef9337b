"""Models from a folder or from the hub: what they are, and what is said when they cannot be had."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from millrace.demo.place import Place
from millrace.errors import MillraceError, RetryableError, UsageError

Loaded = TypeVar("Loaded")

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_GIVE = "give a folder that transformers loads a model from, or a name on the hub such as openai/whisper-tiny"


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a model comes from: `given` by the user, and the folder that this is on the driver, if it is one. Picklable."""

    given: str
    folder: str | None = None

    @classmethod
    def find(cls, given: str) -> Source:
        """The folder of this name or, without one, the model of the hub. Raises `UsageError` where it can be neither."""
        path = Path(given).expanduser()
        if path.is_dir():
            return cls(given=given, folder=str(path.absolute()))
        if not _HUB_NAME.fullmatch(given):
            raise UsageError(f"there is no folder {given}", next_step=_GIVE)
        return cls(given=given)

    @property
    def here(self) -> str:
        """What transformers is to load from in this process."""
        if self.folder is None:
            return self.given
        # A folder in a job's working directory is there on every node, but below another path.
        found = next((path for path in (self.folder, self.given) if Path(path).is_dir()), None)
        if found is None:
            raise UsageError(
                f"this node has no folder {self.folder}", next_step="put it on a disk that all nodes share"
            )
        return found

    def configuration(self) -> dict[str, Any]:
        """What its `config.json` says."""
        if self.folder is None:
            found = self.load(_hub_configuration)
            if not found:
                raise UsageError(f"{self.given} of the hub has no config.json", next_step=_GIVE)
            return found
        file = Path(self.folder) / "config.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(f"{self.given} has no config.json", next_step=_GIVE) from error
        except (OSError, ValueError) as error:
            raise UsageError(f"{file} cannot be read: {error}", next_step=_GIVE) from error
        if not isinstance(found, dict):
            raise UsageError(f"{file} is no configuration", next_step=_GIVE)
        return found

    def extractor(self) -> Any:
        """Its feature extractor."""
        from transformers import AutoFeatureExtractor

        return self.load(AutoFeatureExtractor.from_pretrained)

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        from transformers import AutoTokenizer

        return self.load(AutoTokenizer.from_pretrained)

    def generation(self) -> dict[str, Any]:
        """What its `generation_config.json` says; nothing where there is none."""
        from huggingface_hub.errors import EntryNotFoundError
        from transformers import GenerationConfig

        if self.folder is not None and not (Path(self.here) / "generation_config.json").exists():
            return {}
        try:
            values: dict[str, Any] = GenerationConfig.from_pretrained(self.here).to_dict()
        except OSError as error:
            if any(isinstance(cause, EntryNotFoundError) for cause in _causes(error)):
                return {}
            raise self._cannot_load(error) from error
        return values

    def load(self, load: Callable[[str], Loaded]) -> Loaded:
        """What `load` makes of `here`; where transformers cannot load it, an error that says what to do."""
        from safetensors import SafetensorError

        here = self.here
        try:
            return load(here)
        except MillraceError:
            raise
        except OSError as error:
            raise self._cannot_load(error) from error
        except (ValueError, RuntimeError, ImportError, SafetensorError) as error:
            raise UsageError(f"{self.given} cannot be loaded: {_first_line(error)}", next_step=_GIVE) from error

    def _cannot_load(self, error: OSError) -> MillraceError:
        """What to raise for transformers' one error for everything; the reason is in its causes."""
        from huggingface_hub import errors

        if self.folder is not None:
            return UsageError(
                f"the folder {self.given} cannot be loaded: {_first_line(error)}",
                next_step="save the model with its processor there",
            )
        causes = _causes(error)

        def among(*kinds: type[BaseException]) -> bool:
            return any(isinstance(cause, kinds) for cause in causes)

        if among(errors.GatedRepoError):
            return UsageError(f"the hub lets not everyone have {self.given}", next_step="log in to it (HF_TOKEN)")
        if among(errors.RepositoryNotFoundError):
            return UsageError(f"there is no folder {self.given}, and no such model on the hub", next_step=_GIVE)
        if among(errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
            return RetryableError(
                f"there is no folder {self.given}, and the hub cannot be reached for a model of that name",
                next_step="give a folder or no model, or see to the network (HF_ENDPOINT, HF_HUB_OFFLINE)",
            )
        return UsageError(f"{self.given} cannot be loaded from the hub: {_first_line(error)}", next_step=_GIVE)


def _hub_configuration(name: str) -> dict[str, Any]:
    from transformers import PreTrainedConfig

    values: dict[str, Any] = PreTrainedConfig.get_config_dict(name)[0]
    return values


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in chain:
        chain.append(following)
        following = following.__cause__ or following.__context__
    return chain


def write_folder(target: Place, fill: Callable[[str], None]) -> list[str]:
    """Let `fill` write files into an empty folder, bring them to `target`, and give their names."""
    with tempfile.TemporaryDirectory(prefix="millrace-model-") as folder:
        fill(folder)
        names = sorted(path.name for path in Path(folder).iterdir() if path.is_file())
        for name in names:
            target.write(name, (Path(folder) / name).read_bytes())
    return names
