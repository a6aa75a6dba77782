"""What vLLM's loader puts into a rank's parameters: ``real_load.py DIRECTORY RANK TP PORT DTYPE FILE``.

An oracle: real bytes, real process groups, nothing of shardconv. All ranks run at once, each in a process.
"""

from __future__ import annotations

import os
import sys

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",  # of a build for GPUs too
}


def main(directory: str, rank: str, tp: str, port: str, dtype: str, file: str) -> None:
    """Load the model and save its state before vLLM processes it."""
    os.environ["VLLM_DIST_IDENT"] = port  # names the shared memory of these ranks
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=directory,
        tensor_parallel_size=int(tp),
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            int(tp), int(rank), f"tcp://127.0.0.1:{port}", int(rank), "gloo"
        )
        parallel_state.initialize_model_parallel(int(tp), 1)
        loader = get_model_loader(config.load_config)
        with set_default_torch_dtype(config.model_config.dtype), torch.device("cpu"):
            model = loader.create_model(vllm_config=config, model_config=config.model_config)
            loader.load_weights(model, config.model_config)
        state = ShardedStateLoader._filter_subtensors(model.state_dict())
    torch.save({name: tensor.contiguous() for name, tensor in state.items()}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
