"""What executors with several workers are built on."""
