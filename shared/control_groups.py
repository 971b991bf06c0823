"""The control groups of this process, which limit its processors and its memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ControlGroup:
    """One group.

    Attributes:
        folder: where the kernel shows its files.
        version: 1 or 2.
    """

    folder: Path
    version: int

    def number(self, file: str, key: str = "") -> int | None:
        """Return a number of one of the group's files; None if there is none, as of "max".

        Args:
            file: name of the file.
            key: first word of the number's line; empty: the file is one number.
        """
        try:
            lines = (self.folder / file).read_text().splitlines()
            words = next((line.split() for line in lines if line.startswith(f"{key} ")), [])
            return int(words[1]) if key else int(lines[0])
        except (OSError, ValueError, IndexError):
            return None


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Yield this process's groups of a controller and those above, the process's own first.

    Args:
        controller: "cpu" or "memory".
        root: where /proc and /sys are looked for.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy, whose controllers are not named; version 1 one for each.
        if controllers and controller not in controllers.split(","):
            continue
        names = (controllers, controller) if controllers else ("", "unified")
        for mount in dict.fromkeys(mounted / name for name in names):
            # In a container the path may be the host's: then the mount itself is the group.
            group = mount / path.strip("/")
            for folder in (group, *group.parents):
                if folder.is_relative_to(mount):
                    yield ControlGroup(folder, 1 if controllers else 2)
