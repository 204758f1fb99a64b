from pathlib import Path

import pytest

from sloop.demo import model as module
from sloop.demo.model import squeezenet
from sloop.errors import MachineError
from sloop.profile.model import read_signature


def test_a_real_model_whose_batch_is_free(tmp_path: Path) -> None:
    path = squeezenet(tmp_path)
    signature = read_signature(path)
    assert signature.inputs[0].shape == (-1, 3, 224, 224)
    assert signature.fixed_batch is None
    written_ns = path.stat().st_mtime_ns
    assert squeezenet(tmp_path).stat().st_mtime_ns == written_ns  # made once


def test_without_the_package_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INSIDE", Path("nowhere.onnx"))
    with pytest.raises(MachineError, match="onnx package") as raised:
        squeezenet(tmp_path)
    assert "sloop-serve[demo]" in raised.value.help
