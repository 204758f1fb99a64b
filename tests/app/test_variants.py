"""Variants on several kinds of hardware: which profile holds where, and mistakes in them."""

from pathlib import Path
from typing import Any

import pytest

from sloop.app.application import Application
from sloop.app.load import load_application
from sloop.errors import InputError
from sloop.profile.profile import path_beside, save_profile
from sloop.profile.published import RESNET18_HUMAN, RESNET_T

ON_T4 = {
    "latency_ms": {"form": "quadratic", "alpha": 0, "beta": 0.5, "gamma": 3},
    "max_batch": 32,
    "accelerator": "T4",
    "device_memory_bytes": 2e9,
}
MIXED = [{"hardware": "c5.2xlarge", "count": 2}, {"hardware": "g4dn.xlarge"}]


def application(variant: dict[str, Any], *nodes: dict[str, Any]) -> Application:
    stages = [{"name": "a", **variant}]
    return load_application({"name": "x", "slo_ms": 9, "stages": stages, "cluster": {"nodes": list(nodes or MIXED)}})


def kinds(app: Application) -> dict[str, str]:
    """Per kind of hardware that the only variant can run on, the accelerator it uses."""
    return {kind: profile.accelerator for kind, profile in app.profiles_of(app.stages[0].variants[0]).items()}


def test_a_profile_holds_on_every_kind_that_profiles_does_not_name() -> None:
    app = application({"profile": "ResNet-T", "profiles": {"g4dn.xlarge": ON_T4, "m5.xlarge": "ResNet18-human"}})
    variant = app.stages[0].variants[0]
    assert variant.on("c5.2xlarge") == RESNET_T
    assert variant.on("m5.xlarge") == RESNET18_HUMAN, "a kind that the cluster does not have is no mistake"
    on_t4 = variant.on("g4dn.xlarge")
    assert on_t4 is not None
    assert (on_t4.accelerator, on_t4.device_memory_bytes) == ("T4", 2_000_000_000)
    assert app.hardware == ("c5.2xlarge", "g4dn.xlarge")
    assert kinds(app) == {"c5.2xlarge": "", "g4dn.xlarge": "T4"}


def test_a_kind_without_a_profile_is_not_used() -> None:
    assert kinds(application({"profiles": {"g4dn.xlarge": ON_T4}})) == {"g4dn.xlarge": "T4"}
    assert kinds(application({"profiles": {"m5.xlarge": "ResNet-T"}})) == {}


def test_a_profile_for_an_accelerator_holds_where_there_is_one() -> None:
    assert kinds(application({"profile": ON_T4})) == {"g4dn.xlarge": "T4"}


def test_profiles_of_single_kinds_are_found_beside_the_model(tmp_path: Path) -> None:
    """`sloop profile --hardware KIND` writes them; what the file declares comes first."""
    model = tmp_path / "net.onnx"
    model.write_bytes(b"")
    for kind, profile in {"": RESNET_T, "g4dn.xlarge": RESNET18_HUMAN, "m5.xlarge": RESNET18_HUMAN}.items():
        save_profile(profile, path_beside(model, kind))
    assert path_beside(model, "g4dn.xlarge").name == "net.onnx.g4dn.xlarge.profile.json"
    variant = application({"model": str(model)}).stages[0].variants[0]
    assert (variant.profile, dict(variant.profiles)) == (RESNET_T, {"g4dn.xlarge": RESNET18_HUMAN})
    declared = application({"model": str(model), "profiles": {"g4dn.xlarge": ON_T4}}).stages[0].variants[0]
    assert declared.profiles["g4dn.xlarge"].accelerator == "T4"
    assert not application({"model": str(model), "profile": "ResNet-T"}).stages[0].variants[0].profiles


def test_a_broken_profile_of_a_kind_beside_the_model_is_named(tmp_path: Path) -> None:
    model = tmp_path / "net.onnx"
    model.write_bytes(b"")
    path_beside(model, "g4dn.xlarge").write_text("{}")
    with pytest.raises(InputError, match=r"its profile 'net.onnx.g4dn.xlarge.profile.json' is unusable"):
        application({"model": str(model)})


def test_custom_kinds_are_known_by_the_name_of_their_group() -> None:
    fast = {"hardware": "custom", "name": "fast", "cores": 8, "devices": [{"kind": "A10", "memory_gib": 24}]}
    slow = {"hardware": "custom", "name": "slow", "cores": 2}
    on_a10 = ON_T4 | {"accelerator": "A10"}
    assert kinds(application({"profiles": {"fast": on_a10, "slow": "ResNet-T"}}, fast, slow)) == {
        "fast": "A10",
        "slow": "",
    }


@pytest.mark.parametrize(
    ("variant", "says"),
    [
        ({"profiles": {"c5.2xlage": "ResNet-T"}}, r"unknown hardware 'c5\.2xlage'\nhelp: did you mean 'c5\.2xlarge'"),
        ({"profiles": {"rack": "ResNet-T"}}, r"profiles\.rack: unknown hardware 'rack'\nhelp: known here: c5\.2xlarge"),
        ({"profiles": {}}, "must be at least one profile"),
        ({"profiles": "ResNet-T"}, "profiles: must be a mapping"),
        (
            {"profiles": {"g4dn.xlarge": ON_T4 | {"accelerator": "V100"}}},
            r"profiles\.g4dn\.xlarge\.accelerator: .*has T4",
        ),
        ({"profiles": {"p3.2xlarge": ON_T4}}, r"'T4', and no node of p3\.2xlarge has one\nhelp: the hardware has V100"),
        ({"profiles": {"c5.2xlarge": ON_T4}}, "help: the hardware has none; correct the profile, or the `devices`"),
        (
            {"profile": ON_T4 | {"accelerator": "A100"}},
            r"profile\.accelerator: .*no node of c5\.2xlarge and g4dn\.xlarge",
        ),
        ({"profile": {**ON_T4, "accelerator": ""}}, "device_memory_bytes is given without an accelerator"),
        (
            {"profile": {**ON_T4, "device_memory_bytes": -1}},
            "device_memory_bytes: must be a whole number of at least 0",
        ),
    ],
)
def test_mistakes_are_named(variant: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"(?s){says}"):
        application(variant)


def test_padding_is_a_value_for_each_input_of_a_stage_or_of_all_its_variants() -> None:
    stage = application({"profile": "ResNet-T", "pad": {"ids": 0, "scale": 0.5, "is_word": False}}).stages[0]
    assert stage.variants[0].pad == {"ids": 0, "scale": 0.5, "is_word": False}
    assert type(stage.variants[0].pad["is_word"]) is bool
    assert stage.pads
    padded = {"name": "long", "profile": "ResNet-T", "pad": {"ids": 0}}
    other = {"name": "short", "profile": "ResNet-T"}
    assert not application({"variants": [padded, other]}).stages[0].pads, "queues of a stage are those of all variants"
    assert application({"variants": [padded, other | {"pad": {"ids": 1}}]}).stages[0].pads


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"pad": {}}, "at least one input and its value"),
        ({"pad": [0]}, "a mapping"),
        ({"pad": {"ids": "0"}}, "a number"),
        ({"pad": {"ids": float("inf")}}, "a number"),
        ({"pad": {"ids": 0}, "joins_rows": False}, "rows that do not share a forward pass need no padding"),
        ({"pad": {"ids": 0}, "batch": False}, "rows that do not share a forward pass need no padding"),
        ({"pad": {"ids": 0}, "variants": [{"name": "a", "profile": "ResNet-T"}]}, "either 'pad' or 'variants'"),
    ],
)
def test_padding_that_says_nothing_or_is_of_no_use_is_refused(more: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        application(more if "variants" in more else {"profile": "ResNet-T", **more})
