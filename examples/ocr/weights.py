"""The three networks, which lie inside the `rapidocr` package: PP-OCR's small models as ONNX, under Apache-2.0.

Promises sessions like sloop's own: so many threads, which sleep when idle. Of the package only these files are used.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import onnxruntime as ort

SOFTWARE: Final = f"ONNX Runtime {ort.__version__}"
DETECTION: Final = "*_det_*.onnx"
ORIENTATION: Final = "*_cls_*.onnx"
RECOGNITION: Final = "*_rec_*.onnx"


def session(pattern: str, threads: int) -> Any:  # noqa: ANN401  # ONNX Runtime has no types
    """The network whose file is named like `pattern`. FileNotFoundError where the package is not here."""
    found = find_spec("rapidocr")
    files = sorted(Path(found.origin).parent.glob(f"models/{pattern}")) if found and found.origin else []
    if not files:
        raise FileNotFoundError(f"no {pattern} of the rapidocr package: pip install rapidocr")
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return ort.InferenceSession(str(files[0]), options, providers=["CPUExecutionProvider"])
