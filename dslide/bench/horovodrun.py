"""Horovod's launcher for Gloo, without its question whether Gloo was built.

    python -m dslide.bench.horovodrun ARGUMENTS OF horovodrun

To answer it, horovodrun imports TensorFlow before it starts anything: five to ten seconds of every run. Where
Gloo is missing, the ranks themselves fail with Horovod's message.
"""

from horovod.runner import launch

if __name__ == "__main__":
    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
