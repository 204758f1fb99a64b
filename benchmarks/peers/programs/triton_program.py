"""The model behind Triton, bound by PyTriton: the Open Inference Protocol, JSON and binary alike."""

import numpy as np
from passes import ANSWER, ROW, SETTINGS, Passes
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor, TimeoutAction
from pytriton.triton import Triton, TritonConfig

LIMITS = {name: int(value) for name, value in SETTINGS.limits.items()}


def policy():
    if not LIMITS:
        return None
    return QueuePolicy(timeout_action=TimeoutAction.REJECT, **LIMITS)


if __name__ == "__main__":
    passes = Passes()

    @batch
    def infer(**inputs):
        return {SETTINGS.output: passes.run(inputs[SETTINGS.input])}

    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=SETTINGS.port,
        allow_grpc=False,
        metrics_port=int(SETTINGS.options["metrics_port"]),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="model",
            infer_func=infer,
            inputs=[Tensor(name=SETTINGS.input, dtype=np.float32, shape=ROW)],
            outputs=[Tensor(name=SETTINGS.output, dtype=np.float32, shape=ANSWER)],
            config=ModelConfig(
                max_batch_size=SETTINGS.batch_max,
                batcher=DynamicBatcher(
                    max_queue_delay_microseconds=int(SETTINGS.options["wait_us"]),
                    default_queue_policy=policy(),
                ),
            ),
        )
        triton.serve()
