"""Where a run's metrics and progress go: its folder, TensorBoard, trackers, the terminal.

base.py has the interface; runs/training.py chooses the sinks of a run, and the loop tells them.
"""
