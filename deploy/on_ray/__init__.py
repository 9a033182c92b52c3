"""A run on the machines of a Ray cluster. Ray carries processes (which run where, and again when a machine is lost), never trajectories."""

import os

# Read by Ray when it is imported, here and in the raylets that cluster.py starts.
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "0",  # a worker a CPU would be started before anybody asks
    "RAY_prestart_worker_first_driver": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a process without GPUs of Ray's sees what its machine shows, as elsewhere
    "RAY_DEDUP_LOGS_SKIP_REGEX": ".",  # what raylets write, which Ray would print on our standard output
}
os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
