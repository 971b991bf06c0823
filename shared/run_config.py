"""The section `run` of the configuration."""

from pydantic import Field, field_validator

from shared.section import Section
from shared.yaml_text import short

_MAX_NAME_BYTES = 200  # of a run: file systems allow 255, of which the time takes 16


class RunConfig(Section):
    """Name, folder, seed and limits of a run."""

    name: str = Field("", description="name of the run; empty: the configuration file's name")
    directory: str = Field("runs", description="folder that holds the run folders")
    seed: int = Field(1, ge=0, description="every random number of the run derives from it")
    max_updates: int = Field(0, ge=0, description="stop after this many updates; 0: no limit")
    max_env_steps: int = Field(
        0,
        ge=0,
        description="stop after this many environment steps (all agents act in one), or, with a "
        "source, samples trained; 0: no limit",
    )
    max_minutes: float = Field(0, ge=0, description="stop after this many minutes; 0: no limit")
    start_from: str = Field(
        "",
        description="fine-tuning: the checkpoint, or the run's folder (its best one), that a new "
        "run takes its weights from; empty: random weights",
    )
    plugin_folders: tuple[str, ...] = Field(
        (),
        description="folders with the files of plug-ins named module:Name; empty: where anything "
        "is named so, the configuration file's folder and the working directory",
    )

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name.isprintable() or "/" in name or name in (".", ".."):
            raise ValueError(
                f"{name!r} cannot name a folder: it must have neither '/' nor control characters; "
                "set run.directory to put the run elsewhere"
            )
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise ValueError(f"{short(name)} is longer than {_MAX_NAME_BYTES} bytes")
        return name
