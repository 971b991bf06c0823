"""The interface: presets, phases, reproducibility, what is refused."""

from dataclasses import replace

import pytest
import torch

from murmur.env_service.sources.size import sample_arrays
from murmur.learner_service.preprocess.augment.base import Augment
from murmur.learner_service.preprocess.augment.building import build_augment, build_rl_augment
from murmur.learner_service.preprocess.augment.presets import STRENGTHS, Strength, strength_of
from murmur.shared.config.experiment import AugmentConfig
from murmur.shared.config.section import validate
from murmur.shared.process.errors import ConfigError
from murmur.shared.wire.samples import SampleSpec
from murmur.shared.wire.spec import AGENT_CELL, ArraySpec, Discrete, EnvSpec

CPU = torch.device("cpu")
PRESETS = ("none", "minimal", "standard", "strong", "progressive")

SPEC = SampleSpec(
    "toy", sample_arrays((12, 16)), (1, 1), "0" * 64, tuple("abcde"), flip_pairs=((1, 2),)
)


def samples(count: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "image": torch.randint(0, 256, (count, 3, 12, 16), dtype=torch.uint8, generator=generator),
        "mask": torch.randint(0, 5, (count, 12, 16), dtype=torch.uint8, generator=generator),
        "index": torch.arange(count),
    }


def build(**options: object) -> Augment:
    return build_augment(validate(AugmentConfig, options), SPEC, CPU)


@pytest.mark.parametrize("preset", PRESETS)
def test_types_and_ranges_are_the_same_for_every_preset(preset: str) -> None:
    given = samples()
    before = {name: x.clone() for name, x in given.items()}
    out = build(preset=preset)(given, torch.Generator().manual_seed(0))
    assert out["image"].dtype == torch.float32
    assert out["image"].min() >= 0
    assert out["image"].max() <= 1
    assert out["mask"].dtype == torch.uint8
    assert set(out["mask"].unique().tolist()) <= {0, 1, 2, 3, 4, 255}
    assert out["index"] is given["index"]
    assert all(torch.equal(given[name], before[name]) for name in given)


@pytest.mark.parametrize("preset", ["minimal", "strong"])
def test_bytes_and_their_shares_of_one_give_the_same(preset: str) -> None:
    given = samples()
    floats = {**given, "image": given["image"] / 255}
    augment = build(preset=preset)
    one, two = (augment(b, torch.Generator().manual_seed(3)) for b in (given, floats))
    torch.testing.assert_close(one["image"], two["image"])


def test_a_saved_generator_repeats_the_batches() -> None:
    augment = build(preset="strong", mixup=0.3, cutmix=0.3)
    generator = torch.Generator().manual_seed(7)
    augment(samples(), generator)
    state = generator.get_state()
    first = [augment(samples(), generator) for _ in range(2)]
    generator.set_state(state)
    again = [build(preset="strong", mixup=0.3, cutmix=0.3)(samples(), generator) for _ in range(2)]
    for one, two in zip(first, again, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
    assert not torch.equal(first[0]["image"], first[1]["image"])


def test_none_returns_what_is_given_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    out = build(preset="none")(samples(), generator)
    torch.testing.assert_close(out["image"], samples()["image"] / 255)
    assert torch.equal(out["mask"], samples()["mask"])
    assert torch.equal(generator.get_state(), before)


def test_samples_of_a_batch_are_drawn_independently() -> None:
    image = torch.arange(16.0).expand(400, 3, 2, 16) / 16
    mask = torch.zeros(400, 2, 16, dtype=torch.uint8)
    out = build(preset="minimal")({"image": image, "mask": mask}, torch.Generator().manual_seed(0))
    mirrored = (out["image"] == image.flip(-1)).flatten(1).all(1)
    kept = (out["image"] == image).flatten(1).all(1)
    assert (mirrored ^ kept).all()
    assert 150 < mirrored.sum() < 250


def test_standard_leaves_each_part_out_as_often_as_it_says() -> None:
    # Flip 0.5, rotation 0.3, affine 0.3, colours 0.5: 0.5 * 0.7 * 0.7 * 0.5 = 12 % are untouched.
    count = 2000
    image = torch.rand(1, 3, 8, 8).expand(count, 3, 8, 8)
    mask = torch.zeros(count, 8, 8, dtype=torch.uint8)
    out = build(preset="standard")({"image": image, "mask": mask}, torch.Generator().manual_seed(0))
    untouched = ((out["image"] - image).abs().flatten(1).amax(1) < 1e-4).float().mean()
    assert abs(untouched - 0.1225) < 0.03


@pytest.mark.parametrize("per", ["epoch", "update"])
def test_progressive_changes_at_its_epoch_or_update(per: str) -> None:
    augment = build(preset="progressive", first="none", then="strong", at=2, per=per, mixup=0.1)
    generator = torch.Generator().manual_seed(0)
    phases = []
    for now in range(4):
        augment.advance(*((now, 99) if per == "epoch" else (99, now)))
        out = augment(samples(), generator)
        same = torch.allclose(out["mask"].float(), samples()["mask"].float())
        phases.append((augment.phase, same))
    assert [same for _, same in phases] == [True, True, False, False]
    assert phases[0][0] == phases[1][0] != phases[2][0] == phases[3][0]


def spec(*observations: ArraySpec) -> EnvSpec:
    return EnvSpec("toy", 2, observations, Discrete(3))


SCREEN = ArraySpec("screen", "uint8", (3, 8, 8))


def test_rl_shifts_images_of_bytes_and_nothing_else() -> None:
    config = AugmentConfig(preset="random-shift", pad=2, color=True)
    whole = spec(
        SCREEN, ArraySpec("maps", "float32", (1, 8, 8)), ArraySpec("speed", "float32", (2,))
    )
    augment = build_rl_augment(config, whole, CPU, ["observation/"])
    assert augment is not None
    batch = {
        "observation/screen": torch.randint(0, 256, (5, 2, 3, 8, 8), dtype=torch.uint8),
        "observation/maps": torch.rand(5, 2, 1, 8, 8),
        "action": torch.zeros(5, 2),
    }
    out = augment(batch, torch.Generator().manual_seed(0))
    assert not torch.equal(out["observation/screen"], batch["observation/screen"])
    assert all(out[name] is batch[name] for name in ("observation/maps", "action"))
    assert build_rl_augment(AugmentConfig(), whole, CPU) is None


@pytest.mark.parametrize(
    ("preset", "observations", "says"),
    [
        ("random-shift", (ArraySpec("x", "float32", (3,)),), "it has none"),
        ("random-shift", (SCREEN, ArraySpec(AGENT_CELL, "int32", (2,))), "names places"),
        ("standard", (SCREEN,), "not for an environment"),
    ],
)
def test_presets_that_do_not_fit_an_environment_are_refused(
    preset: str, observations: tuple[ArraySpec, ...], says: str
) -> None:
    config = validate(AugmentConfig, {"preset": preset})
    with pytest.raises(ConfigError, match=says):
        build_rl_augment(config, spec(*observations), CPU)


def test_presets_for_rl_are_refused_for_samples() -> None:
    with pytest.raises(ConfigError, match="is for environments"):
        build(preset="random-shift")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixup": 0.6, "cutmix": 0.6}, "more than 1"),
        ({"preset": "random-shift", "mixup": 0.1}, "is for RL"),
        ({"preset": "standard", "color": True}, "no effect"),
        ({"presets": "standard"}, "preset"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        validate(AugmentConfig, options)


def strength(preset: str, **options: object) -> Strength:
    return strength_of(preset, validate(AugmentConfig, options).bounds())


def test_bounds_change_a_preset_alone_where_they_are_given() -> None:
    assert strength("standard") == STRENGTHS["standard"]
    assert strength("standard", rotation_degrees=30, brightness=0.4) == replace(
        STRENGTHS["standard"], rotation_degrees=30.0, brightness=0.4
    )
    assert strength("none", flip_probability=1.0) == Strength(flip_probability=1.0)
    assert strength("none", shift=0.1) == Strength(
        flip_probability=0.0, shift=0.1, affine_probability=0.5
    )
    assert strength("minimal", contrast=0.2, color_probability=0.1) == Strength(
        contrast=0.2, color_probability=0.1
    )
    assert strength("none", blur_probability=0.3) == Strength(
        flip_probability=0.0, blur_probability=0.3
    )
    assert strength("strong", blur_sigma=[1.0, 1.5]).blur_sigma == (1.0, 1.5)
    assert strength("strong", rotation_probability=0.0).rotation_probability == 0


def test_bounds_do_what_they_say_to_pixels() -> None:
    given = samples()
    out = build(flip_probability=1.0)(given, torch.Generator().manual_seed(0))
    torch.testing.assert_close(out["image"], given["image"].flip(-1) / 255)
    bright = build(brightness=0.5, color_probability=1.0)
    grey = {"image": torch.full((500, 3, 2, 2), 0.4), "mask": torch.zeros(500, 2, 2).byte()}
    levels = bright(grey, torch.Generator().manual_seed(0))["image"][:, 0, 0, 0]
    assert 0.2 <= levels.min() < 0.22
    assert 0.58 < levels.max() <= 0.6


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rotation_probability": 0.5}, r"changes nothing: augment\.rotation_degrees is 0 with"),
        ({"color_probability": 0.5}, "augment.contrast, augment.saturation are 0 with preset=none"),
        ({"blur_sigma": [2.0, 1.0]}, "write the least sigma, above 0, then the largest"),
        ({"preset": "random-shift", "scale": 0.1}, "scale needs samples with masks"),
        ({"own": {"name": "noise"}}, "write it as package.module:Class"),
        ({"own": {"name": f"{__name__}:Doubling", "by": 3}}, "Doubling.*by|by.*Doubling|own.by"),
        ({"own": {"name": f"{__name__}:Nowhere"}}, "has no 'Nowhere'"),
    ],
)
def test_impossible_bounds_and_code_are_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(**options)


class Doubling:
    """Multiplies the array named, by a factor."""

    def __init__(self, device: torch.device, array: str = "image", factor: float = 2.0) -> None:
        self.array, self.factor = array, factor

    def __call__(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        return {**batch, self.array: batch[self.array] * self.factor}


class Forgetful(Doubling):
    """Loses the masks."""

    def __call__(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        return {"image": batch["image"]}


class Raising(Doubling):
    """Fails."""

    def __call__(
        self, batch: dict[str, torch.Tensor], generator: torch.Generator
    ) -> dict[str, torch.Tensor]:
        return {"image": batch["no such array"]}


def test_code_of_the_user_follows_the_preset() -> None:
    given, own = samples(), {"name": f"{__name__}:Doubling", "factor": 0.5}
    out = build(flip_probability=1.0, own=own)(given, torch.Generator().manual_seed(0))
    torch.testing.assert_close(out["image"], given["image"].flip(-1) / 510)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"name": f"{__name__}:Forgetful"}, "Forgetful' returned no 'mask'; return all of the bat"),
        ({"name": f"{__name__}:Raising"}, "Raising' failed: KeyError: 'no such array'"),
        ({"name": f"{__name__}:Doubling", "array": "index"}, "returned 'index' as torch.float32"),
    ],
)
def test_results_of_another_form_are_refused(own: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        build(own=own)(samples(), torch.Generator().manual_seed(0))


def test_code_of_the_user_changes_transitions() -> None:
    spec = EnvSpec("toy", 1, (ArraySpec("x", "float32", (2,)),), Discrete(2))
    own = {"name": f"{__name__}:Doubling", "array": "observation/x"}
    augment = build_rl_augment(validate(AugmentConfig, {"own": own}), spec, CPU, ("observation/",))
    assert augment is not None
    out = augment({"observation/x": torch.ones(3, 1, 2)}, torch.Generator().manual_seed(0))
    assert (out["observation/x"] == 2).all()
    for options in ({"rotation_degrees": 5.0}, {"flip_probability": 0.5}):
        with pytest.raises(ConfigError, match="is for samples with masks, not for an environment"):
            build_rl_augment(validate(AugmentConfig, options), spec, CPU)
