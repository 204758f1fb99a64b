"""The models of Flashpoint's evaluation: the printed means (section 7.5, check 5), layers, origins of figures."""

from statistics import fmean

import pytest
from click.testing import CliRunner

from sloop.cli import main
from sloop.profile.published import PUBLISHED
from sloop.vocabulary import LINK_MBPS, STORE_MBPS
from sloop_systems.flashpoint.published import FLASHPOINT_MODELS, FlashpointModel

T5 = FLASHPOINT_MODELS["T5-3B"]
MODELS = list(FLASHPOINT_MODELS.values())


def download_s(model: FlashpointModel, mbps: float) -> float:
    return model.size_bytes.value * 8 / (mbps * 1e6)


def test_the_printed_means_of_the_stages() -> None:
    """Download, load and send take 581.2, 214.0 and 18.0 inferences on average, and download 71.5 % of it."""
    exec_s = [model.exec_ms.value / 1e3 for model in MODELS]
    stages = {
        581.2: [download_s(model, STORE_MBPS) for model in MODELS],
        214.0: [model.load_s.value for model in MODELS],
        18.0: [model.send_s.value for model in MODELS],
    }
    means = [fmean(a / b for a, b in zip(stage, exec_s, strict=True)) for stage in stages.values()]
    assert means == [pytest.approx(figure, rel=0.005) for figure in stages]
    assert sum(means) == pytest.approx(813.2, rel=0.005)
    assert means[0] / sum(means) == pytest.approx(0.7146, abs=5e-4)


def test_the_cold_starts_of_t5() -> None:
    local_s, load_s = T5.send_s.value, T5.load_s.value
    assert download_s(T5, STORE_MBPS) + load_s + local_s == pytest.approx(56.771, abs=1e-3)
    assert download_s(T5, LINK_MBPS) + load_s + local_s == pytest.approx(27.501, abs=1e-3)
    assert load_s + local_s == pytest.approx(15.34, abs=5e-3)
    assert local_s == 1.206


def test_the_fit_of_the_calibrated_stages() -> None:
    """Section 3.1: load = 0.2433 + MB/821.03 and send = 0.01679 + MB/9592.9, exact for T5."""
    for model in MODELS:
        size_mb = model.size_bytes.value / 1e6
        assert model.load_s.value == pytest.approx(0.2433 + size_mb / 821.03, abs=6e-4)
        assert model.send_s.value == pytest.approx(0.01679 + size_mb / 9592.9, abs=6e-4)


def test_every_figure_says_where_it_comes_from() -> None:
    for model in MODELS:
        figures = (model.size_bytes, model.exec_ms, model.load_s, model.send_s, model.crossing_bytes)
        assert all("Flashpoint" in figure.source and figure.value > 0 for figure in figures)
        assert model.size_bytes.origin == "published"
    assert [figure.origin for figure in (T5.exec_ms, T5.load_s, T5.send_s)] == ["fitted", "published", "published"]
    assert all(model.load_s.origin == "assumed" for model in MODELS if model is not T5)


@pytest.mark.parametrize("name", FLASHPOINT_MODELS)
def test_layers_have_the_bytes_of_the_file_and_all_of_the_time(name: str) -> None:
    profile, model = PUBLISHED[name], FLASHPOINT_MODELS[name]
    assert profile.layers is not None
    blocks = profile.layers.blocks
    assert sum(block.param_bytes for block in blocks) == profile.weights_bytes == round(model.size_bytes.value)
    assert sum(block.load_ms for block in blocks) == pytest.approx(1e3 * profile.load_s)
    execution_ms = sum(block.latency_ms.latency_ms(1, 1) for block in blocks)
    assert execution_ms == pytest.approx(model.exec_ms.value)
    assert sum(size for _, size in model.layers) == pytest.approx(model.size_bytes.value, rel=2e-4)
    assert 4 * model.parameters == pytest.approx(model.size_bytes.value, rel=0.02)


def test_inference_is_44_59_percent_slower_if_cut_everywhere() -> None:
    """Sections 3.2 and 4.1.3: 43.94 % for T5, which is 1.144 ms for each of its 54 boundaries."""
    slower = {}
    for model in MODELS:
        boundary_ms = model.crossing_bytes.value * 8 / (LINK_MBPS * 1e3)
        slower[model.name] = 100 * (len(model.layers) - 1) * boundary_ms / model.exec_ms.value
    assert slower["T5-3B"] == pytest.approx(43.94, abs=5e-3)
    assert fmean(slower.values()) == pytest.approx(44.59, abs=5e-3)
    assert T5.crossing_bytes.value * 8 / (LINK_MBPS * 1e3) == pytest.approx(1.1440674, abs=1e-4)


def test_t5_has_55_layers_of_which_the_largest_takes_2_353_percent() -> None:
    sizes = [size for _, size in T5.layers]
    assert len(sizes) == 55
    assert sum(size > 10_000 for size in sizes) == 49
    assert max(sizes) / sum(sizes) == pytest.approx(0.02353, abs=1e-5)


def test_nobody_is_advised_on_a_machine_without_a_price() -> None:
    result = CliRunner().invoke(main, ["advise", "GPT-2-XL", "--rate", "1", "--slo-ms", "4000"])
    assert result.exit_code == 1
    assert "lambda.a10 has no price" in result.output
