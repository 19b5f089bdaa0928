import os

# Read when the libraries are imported: four CPU devices for JAX to shard over, and no log lines of TensorFlow.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
