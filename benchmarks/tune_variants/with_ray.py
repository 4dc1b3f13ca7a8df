"""Ray Tune: trials of one process, as many at once as there are cores: with_ray.py ROOT TRIALS EPOCHS NOTES."""

import os
import sys
import tempfile
from pathlib import Path


def trainable(config):
    import ray.tune
    from training import note, train

    trial = ray.tune.get_context().get_trial_id()

    def report(epoch, accuracy):
        note(config["notes"], trial, epoch, accuracy)
        ray.tune.report({"accuracy": accuracy})
        return False

    train(config["root"], config["epochs"], config["lr"], config["hidden"], report)


def main(root, trials, epochs, notes):
    import ray
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler
    from ray.tune.search.optuna import OptunaSearch

    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent / "mnist_variants")])
    environment = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    cores = len(os.sched_getaffinity(0))
    ray.init(num_cpus=cores, include_dashboard=False, runtime_env={"env_vars": environment}, log_to_driver=False)
    space = {
        "lr": tune.loguniform(1e-5, 1e-1),
        "hidden": tune.choice([64, 128, 256]),
        "root": root,
        "epochs": epochs,
        "notes": notes,
    }
    with tempfile.TemporaryDirectory() as folder:
        tune.Tuner(
            tune.with_resources(trainable, {"cpu": 1}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=trials,
                search_alg=OptunaSearch(seed=0),
                scheduler=ASHAScheduler(max_t=epochs, grace_period=1, reduction_factor=3),
            ),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
