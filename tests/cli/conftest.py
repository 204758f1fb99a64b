"""An application that needs nothing but its file."""

from pathlib import Path

import pytest

APPLICATION = """\
name: demo
slo_ms: 1000
stages:
  - name: classify
    profile: ResNet-T
system: {name: static, cores: 8}
cluster: {nodes: [{hardware: c5.4xlarge, count: 2}]}
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.yaml"
    path.write_text(APPLICATION)
    return path
