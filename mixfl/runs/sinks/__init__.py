"""Where a run's progress and metrics go: folder, TensorBoard, trackers, terminal."""
