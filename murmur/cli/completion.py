"""Shell completion: names of configurations, runs, benchmarks and baselines after Tab.

Typer calls these with what was typed so far. A name that cannot be listed is simply not offered.
"""

from pathlib import Path


def complete_config(incomplete: str) -> list[str]:
    """Return configurations that come with murmur; if none fits, YAML files and folders here."""
    from murmur.shared.config.files import config_names

    files = Path(incomplete).parent.glob("*.y*ml")
    names = _starting(incomplete, config_names())
    return names or _starting(incomplete, [*map(str, files), *_folders(incomplete)])


def complete_run(incomplete: str) -> list[str]:
    """Return runs and sweeps under runs/, the newest first; if none fits, folders here."""
    inside = [*Path("runs").glob("*/config.yaml"), *Path("runs").glob("*/sweep.yaml")]
    found = sorted(inside, key=lambda p: p.stat().st_mtime)
    names = _starting(incomplete, [str(path.parent) for path in reversed(found)])
    return names or _starting(incomplete, _folders(incomplete))


def complete_environment(incomplete: str) -> list[str]:
    """Return names of environments."""
    from murmur.shared.config.plugins import plugin_names

    return _starting(incomplete, plugin_names("environment"))


def complete_source(incomplete: str) -> list[str]:
    """Return names of sources; if none fits, YAML files here."""
    from murmur.shared.config.plugins import plugin_names

    files = Path(incomplete).parent.glob("*.y*ml")
    names = _starting(incomplete, plugin_names("source"))
    return names or _starting(incomplete, [*map(str, files)])


def _folders(incomplete: str) -> list[str]:
    return [str(p) for p in Path(incomplete).parent.glob("*") if p.is_dir()]


def _starting(incomplete: str, names: list[str]) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
