"""The MNIST job with Ray Train, which starts its own processes: with_ray.py ROOT EPOCHS PROCESSES [tuned]"""

import json
import os
import sys
import tempfile
from pathlib import Path

import torch.nn.functional as F
from common import Stopwatch, accuracy_of, data_loader, make_optimizer, network, prepare_process


def train(config):
    import ray.train
    import ray.train.torch

    root, tuned = config["root"], config["tuned"]
    prepare_process(tuned)
    model = ray.train.torch.prepare_model(network())
    loader = ray.train.torch.prepare_data_loader(data_loader(root, tuned))
    optimizer = make_optimizer(model.parameters(), tuned)
    watch, total = Stopwatch(), 0.0
    context = ray.train.get_context()
    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if not tuned:
                total += loss.item()
            watch.step()
        watch.epoch()
    if context.get_world_rank() == 0:
        net = model.module if context.get_world_size() > 1 else model
        Path(config["out"]).write_text(json.dumps({"ends": watch.ends, "accuracy": accuracy_of(net, root)}))


def main(root, epochs, processes, tuned):
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    here = str(Path(__file__).parent)
    environment = {"PYTHONPATH": here, "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=processes + 1, include_dashboard=False, runtime_env={"env_vars": environment})
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out.json")
        config = {"root": root, "epochs": epochs, "tuned": tuned, "out": out}
        scaling = ScalingConfig(num_workers=processes, use_gpu=False)
        TorchTrainer(
            train, train_loop_config=config, scaling_config=scaling, run_config=RunConfig(storage_path=folder)
        ).fit()
        ray.shutdown()
        print(Path(out).read_text())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "tuned" in sys.argv)
