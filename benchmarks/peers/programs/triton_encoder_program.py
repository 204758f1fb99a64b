"""A text encoder behind Triton, bound by PyTriton. Its batcher joins only texts of one length."""

import os

import numpy as np
import onnxruntime
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.triton import Triton, TritonConfig

MODEL, BATCH_MAX = os.environ["ENCODER"], int(os.environ["BATCH_MAX"])
WAIT_MS, TIMEOUT_MS = float(os.environ["WAIT_MS"]), float(os.environ["TIMEOUT_MS"])
PORT, METRICS_PORT = int(os.environ["PORT"]), int(os.environ["METRICS_PORT"])


if __name__ == "__main__":
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(MODEL, options, providers=["CPUExecutionProvider"])

    @batch
    def infer(ids, mask):
        return {"embedding": session.run(["embedding"], {"ids": ids, "mask": mask})[0]}

    config = TritonConfig(http_address="127.0.0.1", http_port=PORT, allow_grpc=False, metrics_port=METRICS_PORT)
    policy = QueuePolicy(
        timeout_action=TimeoutAction.REJECT,
        default_timeout_microseconds=int(1e3 * TIMEOUT_MS),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="encoder",
            infer_func=infer,
            inputs=[Tensor(name=name, dtype=np.int64, shape=(-1,)) for name in ("ids", "mask")],
            outputs=[Tensor(name="embedding", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(
                max_batch_size=BATCH_MAX,
                batcher=DynamicBatcher(max_queue_delay_microseconds=int(1e3 * WAIT_MS), default_queue_policy=policy),
            ),
        )
        triton.serve()
