"""Files, variables and --set items give a configuration, or one line that says what is wrong."""

from murmur.shared.config.experiment import ExperimentConfig
from murmur.shared.config.files import ENV_PREFIX, load
from murmur.shared.process.errors import ConfigError
from tests.fuzz import Reader, scratch

MODULES = (
    "murmur.shared.config.files",
    "murmur.shared.config.section",
    "murmur.shared.config.text",
)
_TEXT = b"environment: {name: spread}\nrun: {seed: 3}\n"
SEEDS = [
    b"\0" + _TEXT,
    b"\0extends: spread\n",
    b"\0learner: {port: 6000, batcher: {max_wait_ms: 1.5}}\n",
    b"\1\0",
    b"\2learner.port=5",
    b"\2algorithm={name: coma}",
    b"\3LEARNER__PORT\n5",
    b"\4\0evaluation.environment.x=1",
]
_FOLDER = scratch()
_FILE = _FOLDER / "fuzzed.yaml"
_SMALL = _FOLDER / "small.yaml"
_SMALL.write_text("environment: {name: spread}\n")


def one(data: bytes) -> str:
    reader = Reader(data)
    name, overrides, environ = str(_SMALL), [], {}
    match reader.below(5):
        case 0:
            _FILE.write_bytes(reader.rest())
            name = str(_FILE)
        case 1:
            _FILE.write_bytes(reader.edited(_TEXT))
            name = str(_FILE)
        case 2:
            overrides = [reader.rest().decode("utf-8", "surrogateescape")]
        case 3:
            key, _, value = reader.rest().decode("utf-8", "surrogateescape").partition("\n")
            environ = {ENV_PREFIX + key: value}
        case _:
            name = reader.rest().decode("utf-8", "surrogateescape")
    try:
        config = load(name, overrides, environ)
    except ConfigError:
        return "refused"
    assert isinstance(config, ExperimentConfig)
    assert config.run.name
    return "loaded"
