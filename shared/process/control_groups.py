"""The control groups of this process, which limit its processors and its memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class ControlGroup:
    """A control group.

    Attributes:
        folder: folder of the group's files in the kernel's file system.
        version: version of the kernel's interface, 1 or 2.
    """

    folder: Path
    version: int

    def number(self, file: str, key: str = "") -> int | None:
        """Return a number from one of the group's files; None if it holds none, such as "max".

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
        root: folder that contains proc and sys.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = _mounts(controller, root)
    for line in lines:
        _, controllers, path = line.split(":", 2)
        # Version 2 has one hierarchy, whose controllers are not named; version 1 one for each.
        if controllers and controller not in controllers.split(","):
            continue
        version = 1 if controllers else 2
        names = (controllers, controller) if controllers else ("", "unified")
        usual = [(root / "sys/fs/cgroup" / name, "/") for name in dict.fromkeys(names)]
        for mount, of in mounts[version] or usual:
            # In a container the mount may be the group that the host calls `of`, and its own path
            # may lead outside: then the mount itself is the group.
            inside = PurePosixPath(path)
            if inside.is_relative_to(of):
                inside = inside.relative_to(of)
            parts = [part for part in inside.parts if part != "/"]
            if ".." in parts:
                parts = []
            for n in range(len(parts), -1, -1):
                yield ControlGroup(mount.joinpath(*parts[:n]), version)


def _mounts(controller: str, root: Path) -> dict[int, list[tuple[Path, str]]]:
    """Find the mount points of a controller's hierarchies, and the group mounted at each.

    proc_pid_mountinfo(5): "36 35 0:31 /group /mount/point rw - cgroup source rw,cpu,cpuacct".

    Returns:
        version, 1 or 2 -> (mount point, group mounted there) pairs.
    """
    found: dict[int, list[tuple[Path, str]]] = {1: [], 2: []}
    try:
        lines = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        (*_, of, point), kind = left.split()[:5], right.split()
        place = root / point.replace("\\040", " ").lstrip("/"), of.replace("\\040", " ")
        if kind[:1] == ["cgroup2"]:
            found[2].append(place)
        elif kind[:1] == ["cgroup"] and controller in kind[-1].split(","):
            found[1].append(place)
    return found
